"""Reduce gradients around the ring of replicas: partial sums up to the last worker, totals on from there.

1.  Worker i gets from i - 1 the sum of the gradients of workers 1 to i - 1 of a stage, adds its own in its backward
    pass, and sends the sum to i + 1. The policy compresses these messages as sends of the axis ``dp``, backward.
2.  Worker N has the total. It encodes it once, by the codec that the policy names for such a send; these bytes go on
    to worker 1, and from there to N - 1, unchanged. All workers decode the same bytes: equal bits on all.

Every message is posted early, and awaited where it is needed.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.arrays import as_dtype
from hybridcomp.codecs import Codec, decode
from hybridcomp.policy import Message, Policy
from hybridcomp_lab.train.pipelines.mail import Mail

_PARTIAL, _TOTAL, _LENGTH, _START = range(1, 5)  # tags


class Ring:
    """Place of one worker in the ring; workers and stages count from 1.

    Args:
        group: process group of the replicas.
        policy: policy of compression.
        sizes: numbers of elements of each stage.

    Attributes:
        worker: number of this worker.
        workers: number of workers.
        sums: flat sums of each stage's gradients: partial in :meth:`await_partial`, which the worker adds to.
    """

    def __init__(self, group: dist.ProcessGroup, policy: Policy, sizes: list[int]) -> None:
        self._mail = Mail(group)  # its slots: tag and stage
        self._policy = policy
        self.worker = dist.get_rank(group) + 1
        self.workers = dist.get_world_size(group)
        self.sums = [torch.zeros(size) for size in sizes]
        self._totals = [torch.empty(size) for size in sizes]
        self._codecs: dict[int, Codec | None] = {}  # codecs of the totals that are to come, by stage
        self._messages: dict[int, Tensor] = {}  # encoded totals, by stage

    @property
    def is_last(self) -> bool:
        """Tell whether the totals are made here."""
        return self.worker == self.workers

    # -- partial sums ----------------------------------------------------------------------------------

    def open_partial(self, stage: int) -> None:
        """Post the receive of the sum over the workers before this one; in the order of the backward passes."""
        self._left(_PARTIAL, stage)
        if self.worker == 1:
            self.sums[stage - 1].zero_()
        else:
            self._receive(self.sums[stage - 1], _PARTIAL, stage)

    def await_partial(self, stage: int) -> Tensor:
        """Wait for the sum over the workers before this one, and return it, flat."""
        self._arrived(_PARTIAL, stage)
        return self.sums[stage - 1]

    def pass_partial(self, stage: int) -> None:
        """Send the sum, to which this worker has added its own, to the next one; not on the last worker."""
        self._send(self.sums[stage - 1], _PARTIAL, stage)

    # -- totals ----------------------------------------------------------------------------------------

    def make_total(self, stage: int, step: int) -> Tensor:
        """Send the sum over all workers on, from the last worker, and return it as all workers will have it."""
        total = self.sums[stage - 1]
        codec = self._codec(total, step)
        if codec is None:
            # The slot is that of the partial sums, whose buffer it is. Sent as bytes, which no policy compresses again.
            self._send(total.view(torch.uint8), _PARTIAL, stage, _TOTAL)
            return total
        message = codec.encode(total)
        if not codec.fixed_size:
            self._send(torch.tensor([message.numel()]), _LENGTH, stage)
        self._send(message, _TOTAL, stage)
        decoded: Tensor = decode(message, self._totals[stage - 1])
        return decoded

    def open_total(self, stage: int, step: int) -> None:
        """Post the receive of the total of a step; not on the last worker.

        Receives are posted in the order in which totals are made.
        """
        self._left(_TOTAL, stage)
        total = self._totals[stage - 1]
        codec = self._codecs[stage] = self._codec(total, step)
        if codec is None:
            self._receive(total.view(torch.uint8), _TOTAL, stage)
            return
        message = torch.empty(codec.bound(total.numel(), as_dtype(total.dtype)), dtype=torch.uint8)
        self._messages[stage] = message
        if codec.fixed_size:
            self._receive(message, _TOTAL, stage)

    def await_total(self, stage: int) -> Tensor:
        """Wait for the total, pass it on, and return it, flat."""
        codec, total = self._codecs.pop(stage), self._totals[stage - 1]
        if codec is None:
            self._arrived(_TOTAL, stage)
            self._pass_on(total.view(torch.uint8), _TOTAL, stage)
            return total
        message = self._messages.pop(stage)
        if not codec.fixed_size:
            length = torch.zeros(1, dtype=torch.int64)
            self._receive(length, _LENGTH, stage)
            self._arrived(_LENGTH, stage)
            self._pass_on(length, _LENGTH, stage)
            message = message[: int(length)]
            self._receive(message, _TOTAL, stage)
        self._arrived(_TOTAL, stage)
        self._pass_on(message, _TOTAL, stage)
        decoded: Tensor = decode(message, total)
        return decoded

    # -- both ------------------------------------------------------------------------------------------

    def start_next(self) -> None:
        """Start the next worker; not on the last one."""
        self._send(torch.zeros(1, dtype=torch.int64), _START, 0)

    def await_start(self) -> None:
        """Wait until the worker before lets this one begin; not on the first one."""
        self._mail.expect(_START, torch.zeros(1, dtype=torch.int64), self._before, _START)
        self._mail.arrived(_START)

    def flush(self) -> None:
        """Wait until everything has left."""
        self._mail.flush()

    @property
    def _before(self) -> int:
        return (self.worker - 2) % self.workers

    def _codec(self, total: Tensor, step: int) -> Codec | None:
        return codec_of(self._policy, "backward", total, step)

    def _receive(self, tensor: Tensor, tag: int, stage: int) -> None:
        self._mail.expect((tag, stage), tensor, self._before, tag)

    def _arrived(self, tag: int, stage: int) -> None:
        self._mail.arrived((tag, stage))

    def _pass_on(self, tensor: Tensor, tag: int, stage: int) -> None:
        if self.worker + 1 < self.workers:
            self._send(tensor, tag, stage)

    def _send(self, tensor: Tensor, slot: int, stage: int, tag: int | None = None) -> None:
        """Send to the next worker; the next such message may wait for the slot of another tag."""
        self._mail.send((slot, stage), tensor, self.worker % self.workers, slot if tag is None else tag)

    def _left(self, tag: int, stage: int) -> None:
        self._mail.left((tag, stage))


def codec_of(policy: Policy, phase: str, tensor: Tensor, step: int) -> Codec | None:
    """Return the codec of a message that is encoded once, and passed on; None where it is sent uncompressed.

    It is the policy's choice for a send of the axis ``dp``, which is the same on all workers.
    """
    dtype = as_dtype(tensor.dtype)
    message = Message("dp", "send", phase, dtype, tensor.nbytes, step=step, shape=(tensor.numel(),))
    choice = policy.choose(message)
    return choice.codec.at_step(step) if choice.compresses else None

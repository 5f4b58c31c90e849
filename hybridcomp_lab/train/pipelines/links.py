"""Send and receive a rank's messages to and from the neighbours of its stages."""

from __future__ import annotations

from collections import deque

import torch.distributed as dist
from torch import Tensor

import hybridcomp.torch as hct
from hybridcomp_lab.train.parallel.residual_stream import Stream


class Inbox:
    """Inbox of a residual stream, or its gradients, from one rank; one tensor is received ahead of its use.

    Args:
        group: process group of the pipeline.
        source: rank of the sender in the group.
        stream: shape and dtype of every tensor.
    """

    def __init__(self, group: dist.ProcessGroup, source: int, stream: Stream) -> None:
        self._group = group
        self._source = source
        self._stream = stream
        self._due = 0
        self._ahead: tuple[Tensor, dist.Work | None] | None = None

    def expect(self, count: int) -> None:
        """Expect ``count`` more tensors; no more than those are received."""
        self._due += count
        self._receive()

    def take(self) -> Tensor:
        """Return the next tensor; wait for it."""
        if self._ahead is None:
            raise RuntimeError("more messages are taken than are expected")
        tensor, work = self._ahead
        if work is not None:
            work.wait()
        self._ahead = None
        self._receive()
        return tensor

    def _receive(self) -> None:
        if self._due and self._ahead is None:
            self._due -= 1
            tensor = self._stream.empty()
            self._ahead = tensor, dist.irecv(tensor, group=self._group, group_src=self._source)


class Outbox:
    """Outbox of tensors to one rank.

    Args:
        group: process group of the pipeline.
        target: rank of the receiver in the group.
        phase: ``"forward"`` or ``"backward"``, for policies that tell them apart.
        room: number of tensors that may be on their way at once.
    """

    def __init__(self, group: dist.ProcessGroup, target: int, phase: str, room: int = 1) -> None:
        self._group = group
        self._target = target
        self._phase = phase
        self._room = room
        self._sent: deque[tuple[Tensor, dist.Work | None]] = deque()

    def send(self, tensor: Tensor) -> None:
        """Send without waiting for the receiver, if there is room."""
        self._leave(self._room - 1)
        tensor = tensor.contiguous()
        with hct.in_phase(self._phase):
            self._sent.append((tensor, dist.isend(tensor, group=self._group, group_dst=self._target)))

    def flush(self) -> None:
        """Wait until everything has left."""
        self._leave(0)

    def _leave(self, count: int) -> None:
        while len(self._sent) > count:
            _, work = self._sent[0]
            if work is not None:
                work.wait()
            self._sent.popleft()  # not before: the message is the tensor's own memory

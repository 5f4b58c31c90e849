"""Relay weights between workers: encoded once by the stage's owner, and passed on as they are.

So all workers that compute with a version have the same bits, its owner too, whose own weights are never rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hybridcomp.arrays import as_dtype
from hybridcomp.codecs import Codec, decode
from hybridcomp.policy import Policy
from hybridcomp.torch.flat import views
from hybridcomp_lab.train.pipelines.mail import Mail
from hybridcomp_lab.train.pipelines.ring import codec_of

_WEIGHTS, _LENGTH = 11, 12  # tags


class Room:
    """Memory of a stage's weights, which are here for a pass at a time.

    Autograd saves some of them in forward for backward. Here it saves their places among all weights instead, and finds
    them at these places again, in the memory at that time.

    Args:
        parameters: parameters of the stage; their weights are dropped.

    Attributes:
        size: number of elements of all weights.
        flat: weights, 1-D; empty while they are not here.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._shapes = [p.shape for p in parameters]
        self.size = sum(p.numel() for p in parameters)
        self._nothing = parameters[0].new_empty(1, requires_grad=False)
        self.close()

    def memory(self) -> Tensor:
        """Return new memory for weights, 1-D."""
        return self._nothing.new_empty(self.size)

    def enter(self, flat: Tensor) -> None:
        """Set the stage to compute with weights."""
        self.flat = flat
        for p, view in zip(self._parameters, views(flat, self._parameters), strict=True):
            p.data = view

    def close(self) -> None:
        """Drop the weights."""
        self.flat = self._nothing[:0]
        for p, shape in zip(self._parameters, self._shapes, strict=True):
            p.data = self._nothing.expand(shape)

    def forgetting(self) -> saved_tensors_hooks:
        """Return a context in which autograd keeps no weights alive."""
        return saved_tensors_hooks(self._forget, self._find)

    def _forget(self, tensor: Tensor) -> Tensor | _Place:
        same = tensor.untyped_storage().data_ptr() == self.flat.untyped_storage().data_ptr()
        return _Place(tensor.size(), tensor.stride(), tensor.storage_offset()) if same else tensor

    def _find(self, saved: Tensor | _Place) -> Tensor:
        if isinstance(saved, _Place):
            return self.flat.as_strided(saved.size, saved.stride, saved.offset)
        return saved


class _Place(NamedTuple):
    """Position of a tensor in the memory of a stage's weights."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


@dataclass(frozen=True)
class _Letter:
    """Message of weights, encoded or not.

    Attributes:
        raw: bytes: encoded, or the weights' own.
        codec: codec that has encoded them; None: they are not encoded.
    """

    raw: Tensor
    codec: Codec | None

    @property
    def sized(self) -> bool:
        """Tell whether the receiver knows the number of bytes."""
        return self.codec is None or self.codec.fixed_size

    def open(self, flat: Tensor) -> Tensor:
        """Return the weights: decoded into ``flat``, or in the message's own memory."""
        if self.codec is None:
            return self.raw.view(flat.dtype)
        decoded: Tensor = decode(self.raw, flat)
        return decoded


class Relay:
    """Relay of weights through a worker.

    Messages are sends of the axis ``dp``, in the forward phase.

    Args:
        mail: mail of the replicas.
        policy: policy of compression.
        rooms: rooms of the stages, from 1.
    """

    def __init__(self, mail: Mail, policy: Policy, rooms: Mapping[int, Room]) -> None:
        self._mail = mail
        self._policy = policy
        self._rooms = rooms
        self._coming: dict[int, tuple[int, _Letter]] = {}  # by stage, with the sender; room for any size
        self._here: dict[int, _Letter] = {}  # letters by stage
        self._leaving: dict[int, int] = {}  # calls of settle until a letter must have left, by stage

    @property
    def held(self) -> int:
        """Return the number of stages whose weights are coming, here, or leaving."""
        return len(self._coming) + len(self._here) + len(self._leaving)

    def hand_out(self, slot: str, weights: Tensor, target: int, step: int) -> None:
        """Send an owner's weights on their way to be used in a step; they may change at once.

        Args:
            slot: key of the slot, which only one message leaves at a time.
            weights: weights, flat.
            target: rank of the receiver in the group.
            step: step from 0.
        """
        self._send(slot, self._letter(weights, step), target)

    def bring(self, stage: int, weights: Tensor, step: int) -> None:
        """Copy an owner's weights into their memory, as all others will have them; they may change at once."""
        letter = self._letter(weights, step)
        self._here[stage] = letter
        self._rooms[stage].enter(letter.open(self._rooms[stage].memory()))

    def expect(self, stage: int, source: int, step: int) -> None:
        """Post the receive of a stage's weights for a step, from a rank of the group."""
        letter = self._blank(stage, step)
        self._coming[stage] = source, letter
        if letter.sized:
            self._mail.expect((_WEIGHTS, stage), letter.raw, source, _WEIGHTS)

    def arrived(self, stage: int) -> None:
        """Wait for a stage's weights, and put them into their room, if they are expected."""
        if stage not in self._coming:
            return
        source, letter = self._coming.pop(stage)
        if not letter.sized:
            length = torch.zeros(1, dtype=torch.int64)
            self._mail.expect((_LENGTH, stage), length, source, _LENGTH)
            self._mail.arrived((_LENGTH, stage))
            letter = replace(letter, raw=letter.raw[: int(length)])
            self._mail.expect((_WEIGHTS, stage), letter.raw, source, _WEIGHTS)
        self._mail.arrived((_WEIGHTS, stage))
        self._here[stage] = letter
        self._rooms[stage].enter(letter.open(self._rooms[stage].memory()))

    def leave(self, stage: int, target: int | None) -> None:
        """Drop a stage's weights, which have been used, and send them on to a rank of the group, if there is one."""
        letter = self._here.pop(stage)
        self._rooms[stage].close()
        if target is not None:
            self._send(stage, letter, target)
            self._leaving[stage] = 1 if letter.sized else 2

    def settle(self) -> None:
        """Wait, once in a pass, for messages that left one pass ago, and the next worker expects by now.

        A message of variable length is expected only when that worker has come to the same pass: that may take two.
        """
        for stage in list(self._leaving):
            self._leaving[stage] -= 1
            if self._leaving[stage] == 0:
                self._mail.left((_WEIGHTS, stage))
                del self._leaving[stage]

    def flush(self) -> None:
        """Wait until everything has left."""
        self._mail.flush()
        self._leaving.clear()

    def share(self, stage: int, weights: Tensor | None, source: int, step: int) -> None:
        """Broadcast a stage's weights to the memory of all workers; collective.

        Args:
            stage: stage from 1.
            weights: flat weights, on the rank of the group that has them.
            source: rank that has them.
            step: as in :meth:`hand_out`.
        """
        letter = self._blank(stage, step) if weights is None else self._letter(weights, step)
        length = torch.tensor([letter.raw.numel()])
        dist.broadcast(length, group=self._mail.group, group_src=source)
        letter = replace(letter, raw=letter.raw[: int(length)])
        dist.broadcast(letter.raw, group=self._mail.group, group_src=source)
        self._rooms[stage].enter(letter.open(self._rooms[stage].memory()))

    def _letter(self, weights: Tensor, step: int) -> _Letter:
        codec = codec_of(self._policy, "forward", weights, step)
        raw = weights.clone().view(torch.uint8) if codec is None else codec.encode(weights)
        return _Letter(raw, codec)

    def _blank(self, stage: int, step: int) -> _Letter:
        """Make an empty message, of the largest size, for weights to be received."""
        flat = self._rooms[stage].memory()
        codec = codec_of(self._policy, "forward", flat, step)
        if codec is None:
            return _Letter(flat.view(torch.uint8), None)
        return _Letter(torch.empty(codec.bound(flat.numel(), as_dtype(flat.dtype)), dtype=torch.uint8), codec)

    def _send(self, slot: str | int, letter: _Letter, target: int) -> None:
        if not letter.sized:
            length = torch.tensor([letter.raw.numel()])
            self._mail.send((_LENGTH, slot), length, target, _LENGTH, "forward")
        self._mail.send((_WEIGHTS, slot), letter.raw, target, _WEIGHTS, "forward")

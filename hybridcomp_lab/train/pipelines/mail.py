"""Send and receive messages between two ranks of a group, posted early and awaited where they are needed."""

from __future__ import annotations

from collections.abc import Hashable

import torch.distributed as dist
from torch import Tensor

import hybridcomp.torch as hct


class Mail:
    """Messages on their way to and from this rank.

    Each message has a slot, named by any key: only one at a time comes into a slot, and only one leaves from it.
    Messages of one tag between two ranks come in the order in which they are sent.

    Args:
        group: process group of the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._coming: dict[Hashable, dist.Work | None] = {}
        self._going: dict[Hashable, tuple[Tensor, dist.Work | None]] = {}

    def expect(self, slot: Hashable, tensor: Tensor, source: int, tag: int) -> None:
        """Post the receive of a message into ``tensor``, from a rank of the group."""
        self._coming[slot] = dist.irecv(tensor, group=self.group, group_src=source, tag=tag)

    def arrived(self, slot: Hashable) -> None:
        """Wait for the slot's message, if one is expected."""
        work = self._coming.pop(slot, None)
        if work is not None:
            work.wait()

    def send(self, slot: Hashable, tensor: Tensor, target: int, tag: int, phase: str = "backward") -> None:
        """Send to a rank of the group once the slot's message before has left.

        Args:
            slot: key of the slot, see the class.
            tensor: message; stays as it is until :meth:`left` of the slot.
            target: rank of the receiver in the group.
            tag: tag of the message.
            phase: ``"forward"`` or ``"backward"``, for policies that tell them apart.
        """
        self.left(slot)
        with hct.in_phase(phase):
            self._going[slot] = tensor, dist.isend(tensor, group=self.group, group_dst=target, tag=tag)

    def left(self, slot: Hashable) -> None:
        """Wait until the slot's message, if there is one, has left."""
        _, work = self._going.pop(slot, (None, None))
        if work is not None:
            work.wait()

    def flush(self) -> None:
        """Wait until everything has left."""
        for slot in list(self._going):
            self.left(slot)

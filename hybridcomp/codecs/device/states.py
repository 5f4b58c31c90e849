"""States of error feedback that are renewed by an exchange of addresses.

A kernel writes the next value of a state to another array of its size. Only the device knows whether that may be kept
(it must be finite), and the host does not wait for it: so a state's address is in device memory, in a :class:`Slot`,
and a kernel exchanges it with that of a spare. Spares are shared by all states of one size: there is one more array
than states, not twice as many.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridcomp.device import DeviceArray, Queue, Runtime

_THREADS = 256
_MODULE = "feedback"


class Slot:
    """The address of a state, which the device holds.

    Attributes:
        word: one uint64 of the device.
        nbytes: bytes of the state.
    """

    def __init__(self, nbytes: int, queue: Queue) -> None:
        self.nbytes = nbytes
        room = -(-nbytes // 16) * 16
        self.word = queue.array(1, np.uint64)
        self._first = queue.zeros(room)  # the state at first; some other slot's later
        queue.launch(_MODULE, "feedback_point", 1, 32, self.word, self._first.ptr)

    def clear(self, queue: Queue) -> None:
        """Make the state zero."""
        words = -(-self.nbytes // 4)
        blocks = queue.blocks(words, _THREADS * 4)
        queue.launch(_MODULE, "feedback_clear", blocks, _THREADS, self.word, 4 * words)

    def read(self, dtype: npt.DTypeLike, queue: Queue) -> npt.NDArray[Any]:
        """Return the state in host memory; waits for the device."""
        where = DeviceArray(queue.runtime, int(queue.read(self.word)[0]), self.nbytes, np.uint8, self)
        return queue.read(where).view(dtype)

    def write(self, values: npt.NDArray[Any], queue: Queue) -> None:
        """Set the state. Waits for the device."""
        where = DeviceArray(queue.runtime, int(queue.read(self.word)[0]), self.nbytes, np.uint8, self)
        queue.write(where, values)


class Slots:
    """All slots of a set of states, by device and size. Their memory is freed with this object."""

    def __init__(self) -> None:
        self._all: list[Slot] = []  # keeps every array alive: only the device knows which slot has which
        self._free: dict[tuple[int, int], list[Slot]] = defaultdict(list)
        self._spare: dict[tuple[int, Hashable, int], Slot] = {}

    def take(self, nbytes: int, queue: Queue) -> Slot:
        """Return a state of zeros."""
        free = self._free[_device(queue.runtime), nbytes]
        if not free:
            return self._new(nbytes, queue)
        slot = free.pop()
        slot.clear(queue)
        return slot

    def give(self, slot: Slot, queue: Queue) -> None:
        """Return to the free slots a state that nobody uses any more."""
        self._free[_device(queue.runtime), slot.nbytes].append(slot)

    def spare(self, nbytes: int, queue: Queue) -> Slot:
        """Return the slot to write to in the order of this queue, and to exchange a state with."""
        key = (_device(queue.runtime), queue.order, nbytes)
        if key not in self._spare:
            self._spare[key] = self._new(nbytes, queue)
        return self._spare[key]

    def _new(self, nbytes: int, queue: Queue) -> Slot:
        slot = Slot(nbytes, queue)
        self._all.append(slot)
        return slot


def _device(runtime: Runtime) -> int:
    return id(runtime)

"""Pool buffers for messages: fresh pages cost as much as a network does."""

from __future__ import annotations

import functools
from typing import Protocol

import numpy as np

from hybridcomp.arrays import ByteArray

_LEAST = 4096  # bytes
_KEPT = 64  # free buffers of a size


class Pool(Protocol):
    """Source of a transport's buffers."""

    def take(self, nbytes: int) -> ByteArray:
        """Return a buffer of ``nbytes``, at least one, that is not in use."""

    def give(self, buffer: ByteArray) -> None:
        """Return a buffer to the pool that no request uses any more."""


class HeapPool:
    """Pool of buffers of this process's own memory."""

    def __init__(self) -> None:
        self._free: dict[int, list[ByteArray]] = {}

    def take(self, nbytes: int) -> ByteArray:
        """Return a buffer of ``nbytes`` that is not in use."""
        free = self._free.get(size_class(nbytes))
        buffer = free.pop() if free else np.empty(size_class(nbytes), np.uint8)
        return buffer[:nbytes]

    def give(self, buffer: ByteArray) -> None:
        """Return a buffer to the pool that no request uses any more."""
        base = buffer if buffer.base is None else buffer.base
        assert isinstance(base, np.ndarray)
        free = self._free.setdefault(base.size, [])
        if len(free) < _KEPT:
            free.append(base)


def size_class(nbytes: int) -> int:
    """Return the size of the buffers that serve ``nbytes``: a power of two."""
    return _LEAST if nbytes <= _LEAST else 1 << int(nbytes - 1).bit_length()


@functools.cache
def heap() -> HeapPool:
    """Return the process's one pool."""
    return HeapPool()

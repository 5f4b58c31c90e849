"""Memory that the processes of a host share: messages are encoded into it, and read where they are.

An arena is one file in memory, without a name, far larger than what will be used of it: pages exist once they have been
written. Other processes of the same user open it as ``/proc/PID/fd/FD``, so that nothing is left behind when a process
is killed. A *lease*, in the line before each block, counts who still reads it.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections import deque
from typing import NamedTuple

import numpy as np

from hybridcomp import native
from hybridcomp.arrays import ByteArray
from hybridcomp.collectives.pools import HeapPool, size_class
from hybridcomp.errors import WireError

LINE = 64  # bytes before a block, for its lease
_MOST = 1 << 40
_TOKEN_BYTES = 8


class Card(NamedTuple):
    """Where another process finds an arena."""

    pid: int
    fd: int
    token: int
    nbytes: int


class Arena:
    """An arena, mapped into this process.

    Attributes:
        card: where it is.
        memory: all of it.
        start: its address here.
    """

    def __init__(self, card: Card, fd: int) -> None:
        mapped = mmap.mmap(fd, card.nbytes)
        self.card = card
        self.memory: ByteArray = np.frombuffer(mapped, np.uint8)
        self.start = address(self.memory)

    def block(self, offset: int, nbytes: int) -> ByteArray:
        """The block at an offset.

        Raises:
            WireError: no block can be there.
        """
        if offset % LINE or offset < LINE or nbytes > self.card.nbytes - offset:
            raise WireError(f"a shared message of {nbytes} bytes at {offset} of {self.card.nbytes}")
        return self.memory[offset : offset + nbytes]

    def lease(self, offset: int) -> ByteArray:
        """The line before the block at an offset."""
        return self.memory[offset - LINE : offset]


class ArenaPool:
    """The process's own arena, and the free blocks in it; its memory once that is used up.

    A buffer that was given back while others read it waits for them.
    """

    def __init__(self) -> None:
        """Make an arena.

        Raises:
            OSError: this system has none.
        """
        nbytes = min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), _MOST)
        token = int.from_bytes(secrets.token_bytes(_TOKEN_BYTES), "little")
        fd = os.memfd_create("hybridcomp")
        os.ftruncate(fd, nbytes)
        self.arena = Arena(Card(os.getpid(), fd, token, nbytes), fd)
        self.arena.memory[:_TOKEN_BYTES] = np.frombuffer(token.to_bytes(_TOKEN_BYTES, "little"), np.uint8)
        self._used = LINE
        self._sizes: dict[int, int] = {}  # by offset
        self._free: dict[int, list[int]] = {}  # offsets by size
        self._lent: deque[int] = deque()
        self._heap = HeapPool()

    def take(self, nbytes: int) -> ByteArray:
        """A buffer of ``nbytes`` that nobody uses."""
        size = size_class(nbytes)
        free = self._free.get(size)
        if not free and self._lent:
            self._collect()
            free = self._free.get(size)
        if free:
            return self.arena.block(free.pop(), nbytes)
        offset = self._used + LINE
        if offset + size > self.arena.card.nbytes:
            return self._heap.take(nbytes)
        self._used = offset + size
        self._sizes[offset] = size
        return self.arena.block(offset, nbytes)

    def give(self, buffer: ByteArray) -> None:
        """Take back a buffer that no request of this process uses any more."""
        offset = address(buffer) - self.arena.start
        size = self._sizes.get(offset)
        if size is None:
            self._heap.give(buffer)
        elif native.kernels().lease_held(self.arena.lease(offset)):
            self._lent.append(offset)
        else:
            self._free.setdefault(size, []).append(offset)

    def _collect(self) -> None:
        for _ in range(len(self._lent)):
            offset = self._lent.popleft()
            if native.kernels().lease_held(self.arena.lease(offset)):
                self._lent.append(offset)
            else:
                self._free.setdefault(self._sizes[offset], []).append(offset)


def open_arena(card: Card) -> Arena:
    """Map another process's arena.

    Raises:
        OSError: it is not to be had: another user's, or of another process namespace.
    """
    fd = os.open(f"/proc/{card.pid}/fd/{card.fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size != card.nbytes or os.pread(fd, _TOKEN_BYTES, 0) != card.token.to_bytes(
            _TOKEN_BYTES, "little"
        ):
            raise OSError(f"process {card.pid} has something else there")
        return Arena(card, fd)
    finally:
        os.close(fd)


def address(data: ByteArray) -> int:
    """Where an array begins."""
    return int(data.__array_interface__["data"][0])

"""Manage memory that the processes of a host share: messages are encoded into it and read in place.

An arena is one file in memory, without a name, far larger than the part that will be used: pages exist once they have
been written. Other processes of the same user open it as ``/proc/PID/fd/FD``, so that nothing is left behind when a
process is killed. A *lease*, in the line before each block, counts the readers of the block. An operation that fails
gives back neither its buffers nor its leases: a peer may be reading still. So each failure costs its messages' memory
for good.
"""

from __future__ import annotations

import mmap
import os
import resource
import secrets
from collections import deque
from typing import NamedTuple

import numpy as np

from hybridcomp import native
from hybridcomp.arrays import ByteArray
from hybridcomp.collectives.transport.pools import HeapPool, size_class
from hybridcomp.errors import WireError

LINE = 64  # bytes before a block, for its lease
_FIRST = 2 * LINE  # where blocks begin: after the token and a lease
_MOST = 1 << 40
_KEPT = 1 << 30  # bytes of free blocks that keep their pages
_MOST_LEASED = 1 << 28  # bytes of blocks that others may be late to read
_PAGE = mmap.PAGESIZE
_TOKEN_BYTES = 8
_LEASE_BYTES = 4


class ArenaHandle(NamedTuple):
    """Descriptor by which another process finds an arena."""

    pid: int
    fd: int
    token: int
    nbytes: int


class Arena:
    """Arena, mapped into this process.

    Attributes:
        handle: descriptor of the arena.
        memory: bytes of the whole arena, uint8.
        start: address of the arena in this process.
    """

    def __init__(self, handle: ArenaHandle, fd: int) -> None:
        mapped = mmap.mmap(fd, handle.nbytes)
        mapped.madvise(mmap.MADV_DONTDUMP)
        self.handle = handle
        self._mapped = mapped
        self.memory: ByteArray = np.frombuffer(mapped, np.uint8)
        self.start = address(self.memory)

    def block(self, offset: int, nbytes: int) -> ByteArray:
        """Return the block at an offset.

        Raises:
            WireError: no block can be there.
        """
        if offset % LINE or offset < _FIRST or not 0 < nbytes <= self.handle.nbytes - offset:
            raise WireError(f"a shared message of {nbytes} bytes at {offset} of {self.handle.nbytes}")
        return self.memory[offset : offset + nbytes]

    def lease(self, offset: int) -> int:
        """Return the address of the lease of the block at an offset."""
        return self.start + offset - LINE

    def drop(self, offset: int, nbytes: int) -> None:
        """Return the whole pages of a block without readers to the system; they read as zeros from now on."""
        start, end = -(-offset // _PAGE) * _PAGE, (offset + nbytes) // _PAGE * _PAGE
        if start < end:
            self._mapped.madvise(mmap.MADV_REMOVE, start, end - start)


class ArenaPool:
    """Pool of the free blocks of the process's own arena, and of heap memory once the arena is used up.

    A buffer that was given back while other processes read it waits for them.
    """

    def __init__(self) -> None:
        """Make an arena.

        Raises:
            OSError: this system has none, or limits the address space, which arenas would use up.
        """
        self.arena = make_arena()
        self._used = LINE
        self._sizes: dict[int, int] = {}  # block sizes by offset
        self._free: dict[int, list[int]] = {}  # offsets by size
        self._idle = 0  # bytes of the free blocks
        self._bare: dict[int, list[int]] = {}  # offsets by size of free blocks whose pages are gone
        self._leased: deque[int] = deque()  # offsets of blocks that were given back, but others still read
        self._late = 0  # bytes of the leased blocks
        self._heap = HeapPool()

    @property
    def used(self) -> int:
        """Return the bytes of the arena that have ever been taken, which do not grow while free blocks serve."""
        return self._used

    @property
    def crowded(self) -> bool:
        """Tell whether readers are so late that the owner should wait for them before it publishes more."""
        if self._late > _MOST_LEASED:
            self._collect()
        return self._late > _MOST_LEASED

    def unread(self, buffer: ByteArray) -> bool:
        """Tell whether other processes still read a buffer of this pool."""
        offset = address(buffer) - self.arena.start
        return offset in self._sizes and bool(native.kernels().lease_held(self.arena.lease(offset)))

    def take(self, nbytes: int) -> ByteArray:
        """Return a buffer of ``nbytes`` that is not in use."""
        size = size_class(nbytes)
        free = self._free.get(size)
        if not free and self._leased:
            self._collect()
            free = self._free.get(size)
        if free:
            self._idle -= size
            offset = free.pop()
            # A free block has no readers. Open MPI writes past receive buffers that are too short: see kernels/engine.
            self.arena.memory[offset - LINE : offset - LINE + _LEASE_BYTES] = 0
        elif bare := self._bare.get(size):
            offset = bare.pop()
        else:
            offset = self._used + LINE
            if offset + size > self.arena.handle.nbytes:
                return self._heap.take(nbytes)
            self._used = offset + size
            self._sizes[offset] = size
        return self.arena.memory[offset : offset + nbytes]

    def give(self, buffer: ByteArray) -> None:
        """Return a buffer to the pool that no request of this process uses any more."""
        offset = address(buffer) - self.arena.start
        if offset in self._sizes:
            self._take_back(offset)
        else:
            self._heap.give(buffer)

    def _take_back(self, offset: int) -> None:
        size = self._sizes[offset]
        if native.kernels().lease_held(self.arena.lease(offset)):
            self._leased.append(offset)
            self._late += size
        elif self._idle + size <= _KEPT:
            self._idle += size
            self._free.setdefault(size, []).append(offset)
        else:
            self.arena.drop(offset, size)
            self._bare.setdefault(size, []).append(offset)

    def _collect(self) -> None:
        for _ in range(len(self._leased)):
            offset = self._leased.popleft()
            self._late -= self._sizes[offset]
            self._take_back(offset)


def make_arena() -> Arena:
    """Make an arena of this process.

    Raises:
        OSError: this system has none, or limits the address space, which arenas would use up.
    """
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        raise OSError("this process's address space is limited")
    nbytes = min(_PAGE * os.sysconf("SC_PHYS_PAGES"), _MOST)
    token = int.from_bytes(secrets.token_bytes(_TOKEN_BYTES), "little")
    fd = os.memfd_create("hybridcomp")
    try:
        os.ftruncate(fd, nbytes)
        arena = Arena(ArenaHandle(os.getpid(), fd, token, nbytes), fd)
    except OSError:
        os.close(fd)
        raise
    arena.memory[:_TOKEN_BYTES] = np.frombuffer(token.to_bytes(_TOKEN_BYTES, "little"), np.uint8)
    return arena


def open_arena(handle: ArenaHandle) -> Arena:
    """Map another process's arena.

    Raises:
        OSError: the arena cannot be opened: it is another user's, or in another process namespace.
    """
    fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    try:
        if os.fstat(fd).st_size != handle.nbytes or os.pread(fd, _TOKEN_BYTES, 0) != handle.token.to_bytes(
            _TOKEN_BYTES, "little"
        ):
            raise OSError(f"process {handle.pid} has something else there")
        return Arena(handle, fd)
    finally:
        os.close(fd)


def address(data: ByteArray) -> int:
    """Return the address at which an array begins."""
    return int(native.kernels().address(data))

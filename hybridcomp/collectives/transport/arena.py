"""Manage memory that the processes of a host share: the engine encodes messages into it and reads them in place.

An arena is one file in memory, without a name, far larger than the part that will be used: pages exist once they have
been written. Other processes of the same user open it as ``/proc/PID/fd/FD``, so that nothing is left behind when a
process is killed. Nothing here needs MPI.
"""

from __future__ import annotations

import functools
import mmap
import os
import resource
import secrets
from typing import NamedTuple

import numpy as np

from hybridcomp import native, variables
from hybridcomp.arrays import ByteArray

_MOST = 1 << 40
_PAGE = mmap.PAGESIZE
_TOKEN_BYTES = 8
FIRST_BYTES = 128  # of an arena before its blocks: the token's line and the bell's


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
        self.memory: ByteArray = np.frombuffer(mapped, np.uint8)
        self.start = int(native.kernels().address(self.memory))


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
    except Exception:
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


@functools.cache
def arena_at(handle: ArenaHandle) -> Arena | None:
    """Map another process's arena, once; return None where that fails."""
    try:
        return open_arena(handle)
    except (OSError, ValueError):
        return None


def shares_memory() -> bool:
    """Tell whether ranks of a host may share memory: not if the environment forbids it.

    Raises:
        ConfigError: ``HYBRIDCOMP_SHARED_MEMORY`` is neither 0 nor 1.
    """
    return variables.SHARED_MEMORY.read()

"""Share messages between the ranks of one host by sending descriptors of them.

MPI carries between them a *descriptor* of 32 bytes: the arena, the offset in it, and the length. The reader decodes
the message in place. Descriptors and messages may be mixed: a descriptor's first bytes are not those of a message.
Readers trust a descriptor that its block is there and is held for them: a process that can write to an arena of this
user could as well change this process.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Mapping

import numpy as np
from mpi4py import MPI

from hybridcomp import native, variables
from hybridcomp.arrays import ByteArray
from hybridcomp.collectives.transport.arena import Arena, ArenaHandle, ArenaPool, address, open_arena
from hybridcomp.errors import WireError

_DESCRIPTOR = struct.Struct("<IIQQQ")
_MAGIC = 0x01455948  # b"HYE\x01"


class SharedMemoryPeers:
    """Other ranks of this host in a communicator, and their arenas.

    Attributes:
        ranks: numbers of these ranks in the communicator.
        pool: pool whose buffers they can read.
    """

    def __init__(self, pool: ArenaPool, arenas: dict[int, Arena]) -> None:
        """Map ranks to their arenas."""
        self.pool = pool
        self.ranks = frozenset(arenas)
        everyone: list[Arena] = [pool.arena, *arenas.values()]
        self._arenas = {arena.handle.token: arena for arena in everyone}
        self._spans = [(a.start, a.start + a.handle.nbytes, a) for a in everyone]

    def publish(self, message: ByteArray, readers: int) -> ByteArray | None:
        """Return a descriptor of a message for ``readers`` ranks, which each :meth:`release` it; None if the message
        is not in shared memory.

        Args:
            message: a buffer of the pool from its beginning on, or a message that :meth:`read` gave and that is not yet
                released.
            readers: number of ranks that read it.
        """
        at = address(message)
        for start, end, arena in self._spans:
            if start <= at < end:
                offset = at - start
                native.kernels().lease_add(arena.lease(offset), readers)
                descriptor = np.empty(_DESCRIPTOR.size, np.uint8)
                _DESCRIPTOR.pack_into(descriptor.data, 0, _MAGIC, 0, arena.handle.token, offset, message.size)
                return descriptor
        return None

    def read(self, buffer: ByteArray) -> ByteArray | None:
        """Return the message that the descriptor in ``buffer`` names; None if there is no descriptor.

        Raises:
            WireError: the descriptor names no possible message.
        """
        magic, _, token, offset, nbytes = _DESCRIPTOR.unpack_from(buffer.data, 0)
        if magic != _MAGIC:
            return None
        arena = self._arenas.get(token)
        if arena is None:
            raise WireError(
                f"a descriptor of a message in an arena that this rank does not know ({token:#x})"
            )
        return arena.block(offset, nbytes)

    def release(self, messages: Iterable[ByteArray]) -> None:
        """Release messages that :meth:`read` returned, and that this rank reads no longer."""
        for message in messages:
            at = address(message)
            for start, end, arena in self._spans:
                if start <= at < end:
                    native.kernels().lease_add(arena.lease(at - start), -1)
                    break


@functools.cache
def own_pool() -> ArenaPool | None:
    """Make this process's arena; return None where the system has none."""
    try:
        return ArenaPool()
    except (OSError, AttributeError, ValueError):
        return None


@functools.cache
def _arena_at(handle: ArenaHandle) -> Arena | None:
    """Map another process's arena, once; return None where that fails."""
    try:
        return open_arena(handle)
    except (OSError, ValueError):
        return None


def connect_peers(comm: MPI.Comm, node: MPI.Comm) -> dict[int, Arena] | None:
    """Map the arenas for messages of the ranks of this host: see :func:`map_arenas`. Collective."""
    pool = own_pool() if shares_memory() else None
    return map_arenas(comm, node, None if pool is None else pool.arena.handle)


def peers_of(arenas: Mapping[int, Arena]) -> SharedMemoryPeers | None:
    """Return the ranks that share memory with this one, by their arenas; None if there are none."""
    pool = own_pool() if arenas else None
    return None if pool is None else SharedMemoryPeers(pool, dict(arenas))


def shares_memory() -> bool:
    """Tell whether ranks of a host may share memory: not if the environment forbids it.

    Raises:
        ConfigError: ``HYBRIDCOMP_SHARED_MEMORY`` is neither 0 nor 1.
    """
    return variables.SHARED_MEMORY.read()


def map_arenas(comm: MPI.Comm, node: MPI.Comm, handle: ArenaHandle | None) -> dict[int, Arena] | None:
    """Map the arenas of the ranks of this host. Collective.

    Args:
        comm: communicator of the ranks.
        node: communicator of its ranks on this host.
        handle: descriptor of this process's arena; None if it has none.

    Returns:
        The arenas of the other ranks of this host, by their ranks in ``comm``. None unless each rank of this host can
        see the arenas of all others.
    """
    if node.size == 1:
        return {}
    mine = np.zeros(5, np.uint64)
    if handle is not None:
        mine[:] = (comm.Get_rank(), *handle)
    handles = np.empty((node.size, mine.size), np.uint64)
    node.Allgather(mine, handles)
    found: dict[int, Arena] = {}
    for place, (rank, pid, fd, token, nbytes) in enumerate(handles.tolist()):
        arena = _arena_at(ArenaHandle(pid, fd, token, nbytes)) if token and place != node.rank else None
        if arena is not None:
            found[rank] = arena
    good = handle is not None and len(found) == node.size - 1
    verdict = np.array([good], np.uint8)
    node.Allreduce(MPI.IN_PLACE, verdict, MPI.MIN)
    return found if verdict[0] else None

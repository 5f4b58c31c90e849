"""Make the process's compiled engine, and join the ranks of a communicator in it.

Ranks of this host are joined by shared memory, the others by the MPI that mpi4py uses.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from hybridcomp.collectives.transport.arena import (
    FIRST_BYTES,
    Arena,
    ArenaHandle,
    arena_at,
    make_arena,
    shares_memory,
)
from hybridcomp.errors import NativeUnavailableError
from hybridcomp.native import kernels
from hybridcomp.pmi.library import address

_FUNCTIONS = (
    "MPI_Isend",
    "MPI_Irecv",
    "MPI_Testsome",
    "MPI_Get_count",
    "MPI_Cancel",
    "MPI_Test_cancelled",
    "MPI_Status_set_elements",
)
_PATTERN = 0x5A17C3E1


@functools.cache
def native_engine() -> Any:
    """Make the process's engine, once; return the module that holds it."""
    module = kernels()
    module.make_engine(
        [address(name) for name in _FUNCTIONS],
        MPI._handleof(MPI.BYTE),
        MPI._sizeof(MPI.Request),
        MPI._sizeof(MPI.Status),
        _error_offset(),
    )
    atexit.register(module.engine_stop)
    return module


def _error_offset() -> int:
    """Find the offset of the error in a status, of which the standard sets the name only."""
    status = MPI.Status()
    status.Set_error(_PATTERN)
    raw = ctypes.string_at(MPI._addressof(status), MPI._sizeof(MPI.Status))
    return raw.index(_PATTERN.to_bytes(4, "little"))


@functools.cache
def _made_arena() -> Arena | None:
    """Make this process's arena; return None where the system has none."""
    try:
        arena = make_arena()
    except (OSError, AttributeError, ValueError):
        return None
    native_engine().engine_use_arena(arena.start, arena.handle.nbytes, FIRST_BYTES)
    return arena


def own_arena() -> Arena | None:
    """Return this process's arena, made at the first call.

    None where the system has none, the environment forbids it, or there are no kernels.
    """
    try:
        return _made_arena() if shares_memory() else None
    except NativeUnavailableError:
        return None


def join_for_messages(comm: MPI.Comm, away: Sequence[bool]) -> Any:
    """Make the engine's group for single messages between ranks that have had one from here before.

    Args:
        comm: communicator of the ranks; it carries the caller's own messages, too, and MPI matches all of them.
        away: for each rank, whether it is on another host.
    """
    group = native_engine().engine_group(MPI._handleof(comm), comm.Get_rank(), comm.Get_size(), True)
    group.use_hosts(away)
    return group


def connect_engine(comm: MPI.Comm, node: MPI.Comm) -> dict[int, Arena] | None:
    """Map the arenas of the ranks of this host. Collective.

    Args:
        comm: communicator of the ranks.
        node: communicator of its ranks on this host.

    Returns:
        The arenas of the other ranks of this host, by their ranks in ``comm``. None unless each rank of this host can
        see the arenas of all others.
    """
    own = own_arena()
    handle = None if own is None else own.handle
    if node.size == 1:
        return {}
    mine = np.zeros(5, np.uint64)
    if handle is not None:
        mine[:] = (comm.Get_rank(), *handle)
    handles = np.empty((node.size, mine.size), np.uint64)
    node.Allgather(mine, handles)
    found: dict[int, Arena] = {}
    for place, (rank, pid, fd, token, nbytes) in enumerate(handles.tolist()):
        if handle is None or not token or place == node.rank:
            continue
        arena = arena_at(ArenaHandle(pid, fd, token, nbytes))
        if arena is not None:
            found[rank] = arena
    good = handle is not None and len(found) == node.size - 1
    verdict = np.array([good], np.uint8)
    node.Allreduce(MPI.IN_PLACE, verdict, MPI.MIN)
    return found if verdict[0] else None


def open_group(rank: int, size: int, neighbours: int) -> tuple[Any, int]:
    """Make the engine's group of a communicator that is not there yet.

    Args:
        rank: number of this rank in it.
        size: number of its ranks.
        neighbours: number of the other ranks of this host.

    Returns:
        The compiled module's ``EngineGroup``, for :func:`join`, and the place in this process's arena of the rings from
        which it reads what the neighbours send; -1 where it has no neighbours or they share no memory.
    """
    # Before the first group of any kind: messages of operations in flight must not change their place.
    arena = own_arena()
    group = native_engine().engine_group(0, rank, size, False)
    return group, -1 if arena is None or not neighbours else group.take_rings(neighbours)


def join(
    group: Any, comm: MPI.Comm, away: Sequence[bool], arenas: Mapping[int, Arena], rings: Sequence[int]
) -> None:
    """Have a group send on its communicator, and by shared memory to the ranks of this host.

    Args:
        group: group that :func:`open_group` made.
        comm: communicator of the ranks; nothing else sends on it but notices, whose tag is their own.
        away: for each rank, whether it is on another host.
        arenas: arenas of the other ranks of this host, by rank.
        rings: for each rank of ``comm``, the place of its rings.
    """
    group.use_communicator(MPI._handleof(comm))
    group.use_hosts(away)
    rank, ring_bytes = comm.Get_rank(), native_engine().ENGINE_RING_BYTES
    here = sorted([rank, *arenas])
    own = here.index(rank)
    for place, other in enumerate(here):
        if other == rank:
            continue
        # A rank's rings are in the order of its neighbours, which leaves itself out.
        theirs = rings[other] + (own - (own > place)) * ring_bytes
        mine = rings[rank] + (place - (place > own)) * ring_bytes
        arena = arenas[other]
        group.add_neighbour(other, arena.start, arena.handle.nbytes, theirs, mine)

"""Join the ranks of a communicator in the engine: ranks of this host by shared memory, the others by MPI."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpi4py import MPI

from hybridcomp import variables
from hybridcomp.collectives.engine.native import native_engine
from hybridcomp.collectives.transport.arena import Arena, make_arena
from hybridcomp.collectives.transport.shared_memory import map_arenas, shares_memory

_FIRST = 128  # bytes of an arena before its blocks: the token's line and the bell's


def may_use_devices() -> bool:
    """Tell whether arrays of this process may lie in a GPU's memory.

    Raises:
        ConfigError: ``HYBRIDCOMP_DEVICES`` is neither 0 nor 1.
    """
    given = variables.DEVICES.read()
    if given is None:
        return any(map(Path.exists, map(Path, ("/dev/nvidiactl", "/dev/dxg"))))
    return given


@functools.cache
def _own_arena() -> Arena | None:
    """Make this process's arena for the engine's messages; return None where the system has none."""
    try:
        arena = make_arena()
    except (OSError, AttributeError, ValueError):
        return None
    native_engine().engine_use_arena(arena.start, arena.handle.nbytes, _FIRST)
    return arena


def join_for_messages(comm: MPI.Comm) -> Any:
    """Make the engine's group for single messages between ranks that have had one from here before.

    Args:
        comm: communicator of the ranks; it carries the caller's own messages, too, and MPI matches all of them.
    """
    return native_engine().engine_group(MPI._handleof(comm), comm.Get_rank(), comm.Get_size(), True)


def connect_engine(comm: MPI.Comm, node: MPI.Comm) -> dict[int, Arena] | None:
    """Map the arenas for the engine's messages of the ranks of this host: see :func:`.map_arenas`. Collective."""
    arena = _own_arena() if shares_memory() else None
    return map_arenas(comm, node, None if arena is None else arena.handle)


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
    arena = _own_arena() if shares_memory() else None
    group = native_engine().engine_group(0, rank, size, False)
    return group, -1 if arena is None or not neighbours else group.take_rings(neighbours)


def join(group: Any, comm: MPI.Comm, arenas: Mapping[int, Arena], rings: Sequence[int]) -> None:
    """Have a group send on its communicator, and by shared memory to the ranks of this host.

    Args:
        group: group that :func:`open_group` made.
        comm: communicator of the ranks; nothing else sends on it but notices, whose tag is their own.
        arenas: arenas for the engine's messages of the other ranks of this host, by rank.
        rings: for each rank of ``comm``, the place of its rings.
    """
    group.use_communicator(MPI._handleof(comm))
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

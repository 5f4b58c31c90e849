"""Join the ranks of a communicator in the engine: ranks of this host by shared memory, the others by MPI."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
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


def join(comm: MPI.Comm, node: MPI.Comm) -> Any:
    """Make the engine's group of a communicator. Collective.

    Args:
        comm: communicator of the ranks; nothing else sends on it.
        node: communicator of its ranks on this host.

    Returns:
        The compiled module's ``EngineGroup``.
    """
    module = native_engine()
    # Before the first group of any kind: messages of operations in flight must not change their place.
    arena = _own_arena() if shares_memory() else None
    group = module.engine_group(MPI._handleof(comm), comm.Get_rank(), comm.Get_size(), False)
    if node.size == 1:
        return group
    rings = -1 if arena is None else group.take_rings(node.size - 1)
    found = map_arenas(comm, node, None if arena is None else arena.handle)
    offsets = np.empty(node.size, np.int64)
    node.Allgather(np.array([rings], np.int64), offsets)
    for place, neighbour in enumerate(found or ()):
        if neighbour is None:
            continue
        # A rank's rings are in the order of its neighbours, which leaves itself out.
        theirs = int(offsets[place]) + (node.rank - (node.rank > place)) * module.ENGINE_RING_BYTES
        mine = rings + (place - (place > node.rank)) * module.ENGINE_RING_BYTES
        rank, other = neighbour
        group.add_neighbour(rank, other.start, other.handle.nbytes, theirs, mine)
    return group

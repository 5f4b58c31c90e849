"""List the operations in flight, for ``hybridcomp top``; take no lock that an operation holds for long."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mpi4py import MPI

from hybridcomp.top.snapshot import InFlight

if TYPE_CHECKING:
    from hybridcomp.collectives.execution.request import Request

_ASKED_AFTER = 0.1  # seconds: a younger operation is not asked which ranks it waits for
_MOST_ASKED = 8


def in_flight(requests: Iterable[Request], ranks: Sequence[int]) -> list[InFlight]:
    """Return the entries of ``hybridcomp top`` for operations of one communicator.

    Args:
        requests: requests of the operations.
        ranks: rank in the job of each rank of the communicator; negative for one of another job.
    """
    now, wall = time.monotonic(), time.time()
    found: list[InFlight] = []
    for request in sorted(requests, key=lambda one: one.began):
        name = request.name
        if name is None:
            continue
        op, number, axis, *_ = name
        awaits: set[int] = set()
        if now - request.began > _ASKED_AFTER and len(found) < _MOST_ASKED:
            awaits = request.awaits()
        named = sorted(ranks[peer] for peer in awaits if 0 <= peer < len(ranks) and ranks[peer] >= 0)
        common = request.notices is not None
        since = wall - (now - request.began)
        found.append(InFlight(op, axis, f"{request.communicator:x}", number * common, since, tuple(named)))
    return found


def world_ranks(comm: MPI.Comm) -> Sequence[int]:
    """Return the ranks in the job of a communicator's ranks; negative for those of other jobs."""
    own, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    try:
        return own.Translate_ranks(None, world)
    finally:
        own.Free()
        world.Free()

"""Wait for the other ranks of ``hybridcomp doctor``, and compare values with them, without keeping a core from them."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from hybridcomp.errors import CollectiveTimeoutError

TIMEOUT = 120.0  # seconds
_SLEEP, _LONG_SLEEP = 50e-6, 5e-3


def wait(requests: Sequence[MPI.Request], comm: MPI.Comm, what: str, *, idle: bool = True) -> None:
    """Wait for requests without keeping a core from the ranks that compute or send.

    Args:
        requests: requests to wait for.
        comm: communicator, for this rank's number in an error.
        what: activity, for an error's text.
        idle: sleep between looks; otherwise only give up the time slice, as a rank that is being timed must.

    Raises:
        CollectiveTimeoutError: the requests are not done in two minutes.
    """
    begin = time.monotonic()
    while not MPI.Request.Testall(list(requests)):
        waited = time.monotonic() - begin
        if idle:
            time.sleep(min(max(waited / 16, _SLEEP), _LONG_SLEEP))
        else:
            os.sched_yield()
        if waited > TIMEOUT:
            raise CollectiveTimeoutError(f"{what}: rank {comm.rank} has waited for {TIMEOUT:g} s")


def agreed(comm: MPI.Comm, good: bool) -> bool:
    """Tell whether ``good`` is true on all ranks; collective."""
    return all(gathered(comm, [float(good)])[0])


def shared(comm: MPI.Comm, code: int) -> int:
    """Return rank 0's exit code on all ranks; collective."""
    value = np.array([code], np.int64)
    wait([comm.Ibcast(value)], comm, "waiting for rank 0")
    return int(value[0])


def gathered(comm: MPI.Comm, values: list[float]) -> list[list[float]]:
    """Gather each value of every rank; collective."""
    mine = np.array(values)
    everyone = np.empty((comm.size, mine.size))
    wait([comm.Iallgather(mine, everyone)], comm, "comparing measurements")
    columns: list[list[float]] = everyone.T.tolist()
    return columns


def middle(comm: MPI.Comm, values: list[float]) -> list[float]:
    """Return the median of each value over the ranks where it is not 0; collective."""
    middles = (statistics.median([v for v in column if v]) for column in gathered(comm, values))
    return [float(f"{value:.4g}") for value in middles]  # more digits would mean nothing


def rest(comm: MPI.Comm) -> None:
    """Wait for all ranks, asleep."""
    wait([comm.Ibarrier()], comm, "waiting for the other ranks")

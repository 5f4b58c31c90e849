"""Run a barrier that names the ranks that do not come."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from hybridcomp.errors import CollectiveTimeoutError

if TYPE_CHECKING:
    from hybridcomp.collectives import Communicator

_TAG = 32_001


def monitored_barrier(comm: Communicator, seconds: float, wait_all_ranks: bool) -> None:
    """Wait for all ranks: each tells rank 0 that it is here, and is told when all are.

    Args:
        comm: communicator of the ranks.
        seconds: longest wait, in seconds.
        wait_all_ranks: whether to name all missing ranks, not only the first.

    Raises:
        CollectiveTimeoutError: on every rank that came; on rank 0 it names those that did not.
    """
    here = f"monitored_barrier on axis {comm.axis!r}"
    if seconds <= 0:
        raise CollectiveTimeoutError(
            f"{here}: Rank {comm.rank} timed out in monitoredBarrier after {seconds * 1000:g} ms"
        )
    deadline = time.monotonic() + seconds
    rank, token = comm.rank, torch.zeros(1, dtype=torch.uint8)
    if rank:
        comm.Isend(token, 0, _TAG)
        answer = comm.Irecv(token, 0, _TAG)
        try:
            answer.wait(seconds)
        except CollectiveTimeoutError as error:
            answer.cancel()
            comm.session.spoilt = True
            raise CollectiveTimeoutError(
                f"{here}: Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank 0: it did not answer within the timeout of {seconds:g} s"
            ) from error
        return
    arrivals = {q: comm.Irecv(token.clone(), q, _TAG) for q in range(1, comm.size)}
    missing = []
    for q, request in arrivals.items():
        try:
            request.wait(max(0.0, deadline - time.monotonic()))
        except CollectiveTimeoutError:
            request.cancel()
            missing.append(q)
            if not wait_all_ranks:
                break
    if missing:
        comm.session.spoilt = True  # they may come yet
        for request in arrivals.values():
            if not request.done:
                request.cancel()
        who = f"Rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        raise CollectiveTimeoutError(
            f"{here}: {who} failed to pass monitoredBarrier in {seconds * 1000:g} ms"
        )
    for request in [comm.Isend(token, q, _TAG) for q in arrivals]:
        request.wait(seconds)

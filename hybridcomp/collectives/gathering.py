"""Gather the figures by which ranks decide about codecs, beside the operations that are under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from hybridcomp.collectives.execution.mpi_collectives import native
from hybridcomp.collectives.execution.steps import Steps
from hybridcomp.collectives.figures import Figures, check_figures

if TYPE_CHECKING:
    from hybridcomp.collectives.session import Session


def gather(comm: Session, values: Figures, *, compare: bool = False) -> Callable[[], Figures]:
    """Start to gather each rank's values; collective over a communicator.

    Args:
        comm: communicator of the ranks.
        values: float64 [n], with the same n on all ranks.
        compare: whether ranks tell each other their ``n`` before: groups that decide together may have sent other
            messages, against what they were asked to.

    Returns:
        Function that waits for the values of all ranks and returns them: float64 [ranks, n].
    """
    send = np.ascontiguousarray(values, np.float64)
    received = np.empty((comm.size, send.size), np.float64)
    count, counts = np.array([send.size], np.int64), np.empty(comm.size, np.int64)

    def steps() -> Steps:
        queue = comm._transport.post_queue
        if not compare:
            with queue.take().held() as ticket:
                yield from native(lambda: comm.mpi.Iallgather(send, received), ticket)
            return
        with queue.take().held() as first, queue.take().held() as second:
            yield from native(lambda: comm.mpi.Iallgather(count, counts), first)
            check_figures(counts, f"on axis {comm.axis!r}")
            yield from native(lambda: comm.mpi.Iallgather(send, received), second)

    noted, comm.on_start = comm.on_start, None  # this is not one of the caller's operations
    try:
        request = comm._start(steps(), comm._plain_call("figures", 0, 0), counted=False)
    finally:
        comm.on_start = noted

    def wait() -> Figures:
        request.wait()
        return received

    return wait

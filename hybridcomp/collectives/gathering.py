"""Gather the figures by which ranks decide about codecs, beside the operations that are under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from hybridcomp.collectives.execution.mpi_collectives import native
from hybridcomp.collectives.execution.steps import Steps
from hybridcomp.collectives.figures import Figures, check_figures
from hybridcomp.collectives.stats import Call
from hybridcomp.collectives.transport.mpi import MpiTransport


class Gathers(Protocol):
    """Communicator that gathers figures: see :class:`~hybridcomp.collectives.session.Session`."""

    mpi: MPI.Intracomm
    transport: MpiTransport
    on_start: Callable[[Call], None] | None

    @property
    def size(self) -> int:
        """Return the number of ranks."""

    @property
    def axis(self) -> str:
        """Return the mesh axis that they span."""

    def new_plain_call(self, op: str, raw: int, plain: int) -> Call:
        """Make the statistics of an operation that no policy compresses."""

    def start_steps(self, steps: Steps, call: Call, *, counted: bool) -> Any:
        """Start an operation."""


def gather(comm: Gathers, values: Figures, *, compare: bool = False) -> Callable[[], Figures]:
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
        queue = comm.transport.post_queue
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
        request = comm.start_steps(steps(), comm.new_plain_call("figures", 0, 0), counted=False)
    finally:
        comm.on_start = noted

    def wait() -> Figures:
        request.wait()
        return received

    return wait

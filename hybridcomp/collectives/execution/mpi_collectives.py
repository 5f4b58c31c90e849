"""Run MPI's own operations for uncompressed messages, with the casts that MPI's reductions need.

MPI matches collectives in the order in which they are posted: each takes a ticket, since some wait for a device
    before they post.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt
from mpi4py import MPI

from hybridcomp.arrays import DType, Flat, narrow, widen
from hybridcomp.collectives.buffers import typed
from hybridcomp.collectives.execution.post_queue import PostTicket
from hybridcomp.collectives.execution.steps import Pending, Ready, Steps
from hybridcomp.collectives.memory import same_memory

AVG = "avg"
Array = npt.NDArray[Any]


def reduction_of(op: MPI.Op | str) -> str:
    """Return the engine's name of a reduction: ``"sum"``, ``"avg"``, or ``""`` for all others."""
    return "avg" if op == AVG else "sum" if op == MPI.SUM else ""


_HALF = (DType.FLOAT16, DType.BFLOAT16)


def native(
    post: Callable[[], MPI.Request],
    ticket: PostTicket,
    events: Sequence[Ready] = (),
    peer: int = -1,
    status: MPI.Status | None = None,
) -> Steps:
    """Start one of MPI's own non-blocking operations, after ``events``, and wait for it.

    Args:
        post: function that starts the operation.
        ticket: ticket of this operation.
        events: events to wait for first.
        peer: rank at the other end; -1 for all ranks.
        status: status to fill.
    """
    request = yield from ticket.post(post, events)
    sends = peer != -1 and status is None
    yield Pending([request], [peer], None if status is None else [status], sends=sends)


def reduce_native(
    post: Callable[[Any, Any], MPI.Request],
    send: Flat,
    recv: Flat | None,
    divide_by: int,
    ticket: PostTicket,
    events: Sequence[Ready] = (),
) -> Steps:
    """Run one of MPI's reductions; float16 and bfloat16, which MPI lacks, are reduced in float32.

    Args:
        post: function that starts the operation on a send buffer (``MPI.IN_PLACE`` where ``recv`` holds the data) and
            a receive buffer, both as mpi4py specifications.
        send: values of this rank.
        recv: buffer of the result; None where this rank gets none.
        divide_by: number of ranks for an average; else 1.
        ticket: ticket of this operation.
        events: events to wait for first, of buffers on a device; only for dtypes that MPI reduces, not for averages.
    """
    dtype = send.dtype.accumulator
    half = send.dtype in _HALF
    given = widen(send.data, send.dtype) if half else send.data
    target = given if recv is None else widen(recv.data, recv.dtype) if half else recv.data
    in_place = recv is not None and same_memory(given, target)
    source = MPI.IN_PLACE if in_place else typed(given, dtype)
    yield from native(lambda: post(source, typed(target, dtype)), ticket, events)
    if recv is not None and (half or divide_by != 1):
        recv.data[:] = narrow(_divided(target, divide_by), recv.dtype)


def reduces_directly(dtype: DType, divide_by: int) -> bool:
    """Tell whether :func:`reduce_native` leaves the buffers to MPI alone."""
    return dtype not in _HALF and divide_by == 1


def _divided(values: Array, by: int) -> Array:
    if by == 1:
        return values
    # Parts of complex numbers by themselves: a complex quotient of an infinity is NaN.
    parts = values.view(values.real.dtype)
    quotients: Array = parts / parts.dtype.type(by)
    return quotients.view(values.dtype)

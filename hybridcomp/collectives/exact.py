"""MPI's own operations, for what is not compressed; and the casts that MPI's reductions need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from hybridcomp.arrays import DType, Flat
from hybridcomp.collectives.buffers import same_memory, typed
from hybridcomp.collectives.carry import Array, narrow, widen
from hybridcomp.collectives.engine import Pending, Steps

AVG = "avg"

_HALF = (DType.FLOAT16, DType.BFLOAT16)


def native(post: Callable[[], MPI.Request]) -> Steps:
    """Start one of MPI's own non-blocking operations and wait for it."""
    yield Pending([post()], [-1])


def reduce_native(
    post: Callable[[Any, Any], MPI.Request], send: Flat, recv: Flat | None, divide_by: int
) -> Steps:
    """Run one of MPI's reductions; float16 and bfloat16, which MPI lacks, are reduced in float32.

    Args:
        post: starts the operation on a send buffer (``MPI.IN_PLACE`` where ``recv`` holds the data) and a
            receive buffer, both as mpi4py specifications.
        send: this rank's values.
        recv: the result; None where this rank gets none.
        divide_by: for an average, the number of ranks; else 1.
    """
    dtype = send.dtype.accumulator
    half = send.dtype in _HALF
    given = widen(send.data, send.dtype) if half else send.data
    target = given if recv is None else widen(recv.data, recv.dtype) if half else recv.data
    in_place = recv is not None and same_memory(given, target)
    yield Pending([post(MPI.IN_PLACE if in_place else typed(given, dtype), typed(target, dtype))], [-1])
    if recv is not None and (half or divide_by != 1):
        recv.data[:] = narrow(_divided(target, divide_by), recv.dtype)


def _divided(values: Array, by: int) -> Array:
    return values if by == 1 else values / values.dtype.type(by)

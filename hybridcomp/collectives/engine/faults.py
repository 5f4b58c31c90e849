"""Make exceptions of the engine's error codes."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np

from hybridcomp.arrays import DType
from hybridcomp.collectives.data_path.coding import NONE, Coder
from hybridcomp.collectives.execution.steps import sender
from hybridcomp.errors import MismatchError, WireError


class Fault(IntEnum):
    """Reasons why an execution failed; ``Fault`` of kernels/engine/execution.hpp has the same numbers."""

    MESSAGE = 1
    LENGTH = 2
    MPI = 3
    CODEC = 4
    MEMORY = 5
    GIVEN_UP = 6


def error_of(failure: tuple[Any, ...], coder: Coder) -> Exception:
    """Return the exception for a failed run.

    Args:
        failure: result of ``EngineRun.failure``.
        coder: codec, transport and statistics of the operation.
    """
    fault, step, peer, code, count, dtype, nbytes, message = failure
    what = f"{coder.call.op} on axis {coder.call.axis!r}: rank {coder.transport.rank}"
    if fault == Fault.MESSAGE:
        sizes = not DType(dtype).is_float  # the message holds sizes of messages, which no codec has encoded
        opener = coder.alike(codec=NONE, dtype=DType(dtype)) if sizes else coder
        try:
            opener.open(np.frombuffer(message, np.uint8), count, peer, DType(dtype))
        except WireError as error:
            return (
                WireError(f"{what} got damaged sizes of messages from {sender(peer)}: {error}")
                if sizes
                else error
            )
        except MismatchError as error:
            return error
        return WireError(f"{what} cannot decode what {sender(peer)} sent")
    if fault == Fault.LENGTH:
        kind = DType(dtype)
        return MismatchError(
            f"{what} expects {count} {kind.label} ({count * kind.itemsize} bytes), {sender(peer)} sent {nbytes} bytes"
        )
    if fault == Fault.MPI:
        from mpi4py import MPI  # noqa: PLC0415  (initialises it)

        refused = MPI.Exception(code)
        if refused.Get_error_class() == MPI.ERR_TRUNCATE:
            return MismatchError(f"{what}: {sender(peer)} sent more than this rank has room for ({refused})")
        return refused
    if fault == Fault.MEMORY:
        return MemoryError(f"{what} has no memory for its messages")
    if fault == Fault.GIVEN_UP:
        return RuntimeError(f"{what} gave the operation up")
    return RuntimeError(f"{what}: codec {coder.codec.spec!r} failed in step {step} of its schedule")

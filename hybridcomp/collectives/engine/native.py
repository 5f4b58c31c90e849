"""Make the process's compiled engine, once, with the functions of the MPI that mpi4py uses."""

from __future__ import annotations

import atexit
import ctypes
import functools
from typing import Any

from mpi4py import MPI

from hybridcomp.native import kernels
from hybridcomp.pmi.library import address

_FUNCTIONS = (
    "MPI_Isend",
    "MPI_Irecv",
    "MPI_Testsome",
    "MPI_Get_count",
    "MPI_Cancel",
    "MPI_Test_cancelled",
    "MPI_Status_set_elements",
)
_PATTERN = 0x5A17C3E1


@functools.cache
def native_engine() -> Any:
    """Make the engine; return the module that holds it."""
    module = kernels()
    module.make_engine(
        [address(name) for name in _FUNCTIONS],
        MPI._handleof(MPI.BYTE),
        MPI._sizeof(MPI.Request),
        MPI._sizeof(MPI.Status),
        _error_offset(),
    )
    atexit.register(module.engine_stop)
    return module


def _error_offset() -> int:
    """Find the offset of the error in a status, of which the standard sets the name only."""
    status = MPI.Status()
    status.Set_error(_PATTERN)
    raw = ctypes.string_at(MPI._addressof(status), MPI._sizeof(MPI.Status))
    return raw.index(_PATTERN.to_bytes(4, "little"))

"""Name MPI's basic datatypes, and the types of elements that messages carry, by each other."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from mpi4py import MPI

from hybridcomp.arrays import DType

BY_HANDLE: dict[int, DType] = {
    datatype.handle: dtype
    for dtype, datatypes in {
        DType.FLOAT32: [MPI.FLOAT],
        DType.FLOAT64: [MPI.DOUBLE],
        DType.INT8: [MPI.CHAR, MPI.SIGNED_CHAR, MPI.INT8_T],
        DType.UINT8: [MPI.BYTE, MPI.UNSIGNED_CHAR, MPI.UINT8_T],
        DType.INT16: [MPI.SHORT, MPI.INT16_T],
        DType.UINT16: [MPI.UNSIGNED_SHORT, MPI.UINT16_T],
        DType.INT32: [MPI.INT, MPI.INT32_T],
        DType.UINT32: [MPI.UNSIGNED, MPI.UINT32_T],
        DType.INT64: [MPI.LONG, MPI.LONG_LONG, MPI.INT64_T],
        DType.UINT64: [MPI.UNSIGNED_LONG, MPI.UNSIGNED_LONG_LONG, MPI.UINT64_T],
        DType.BOOL: [MPI.C_BOOL],
        DType.COMPLEX64: [MPI.C_FLOAT_COMPLEX],
        DType.COMPLEX128: [MPI.C_DOUBLE_COMPLEX],
    }.items()
    for datatype in datatypes
}

FLOAT16 = MPI.DATATYPE_NULL  # MPICH has 16-bit floats of its own
with suppress(ValueError, KeyError, MPI.Exception):
    FLOAT16 = MPI.Datatype.fromcode("e")
    BY_HANDLE.setdefault(FLOAT16.handle, DType.FLOAT16)

BY_DTYPE: dict[Any, DType] = {dtype.storage: dtype for dtype in DType if dtype is not DType.BFLOAT16}

DATATYPES: dict[DType, MPI.Datatype] = {
    DType.FLOAT32: MPI.FLOAT,
    DType.FLOAT64: MPI.DOUBLE,
    DType.UINT8: MPI.UINT8_T,
    DType.INT8: MPI.INT8_T,
    DType.INT16: MPI.INT16_T,
    DType.INT32: MPI.INT32_T,
    DType.INT64: MPI.INT64_T,
    DType.BOOL: MPI.C_BOOL,
    DType.UINT16: MPI.UINT16_T,
    DType.UINT32: MPI.UINT32_T,
    DType.UINT64: MPI.UINT64_T,
    DType.COMPLEX64: MPI.C_FLOAT_COMPLEX,
    DType.COMPLEX128: MPI.C_DOUBLE_COMPLEX,
}
if FLOAT16 != MPI.DATATYPE_NULL:
    DATATYPES[DType.FLOAT16] = FLOAT16


class ForeignBufferError(TypeError):
    """Raised for a buffer of a type that only MPI understands: all ranks alike pass it to MPI, uncompressed."""

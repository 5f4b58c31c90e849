"""What callers give as buffers: arrays, tensors and mpi4py's buffer specifications."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from hybridcomp.arrays import DType, Flat, byte_view, flatten, is_torch

_BY_DATATYPE: dict[str, DType] = {
    "MPI_FLOAT": DType.FLOAT32,
    "MPI_DOUBLE": DType.FLOAT64,
    "MPI_BYTE": DType.UINT8,
    "MPI_CHAR": DType.INT8,
    "MPI_SIGNED_CHAR": DType.INT8,
    "MPI_UNSIGNED_CHAR": DType.UINT8,
    "MPI_INT8_T": DType.INT8,
    "MPI_UINT8_T": DType.UINT8,
    "MPI_INT16_T": DType.INT16,
    "MPI_UINT16_T": DType.UINT16,
    "MPI_SHORT": DType.INT16,
    "MPI_UNSIGNED_SHORT": DType.UINT16,
    "MPI_INT": DType.INT32,
    "MPI_UNSIGNED": DType.UINT32,
    "MPI_INT32_T": DType.INT32,
    "MPI_UINT32_T": DType.UINT32,
    "MPI_LONG": DType.INT64,
    "MPI_UNSIGNED_LONG": DType.UINT64,
    "MPI_LONG_LONG": DType.INT64,
    "MPI_INT64_T": DType.INT64,
    "MPI_UINT64_T": DType.UINT64,
    "MPI_C_BOOL": DType.BOOL,
    "MPI_C_FLOAT_COMPLEX": DType.COMPLEX64,
    "MPI_C_DOUBLE_COMPLEX": DType.COMPLEX128,
}

_DATATYPES: dict[DType, MPI.Datatype] = {
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


def typed(data: np.ndarray[Any, Any], dtype: DType) -> list[Any]:
    """An mpi4py specification of an array with its datatype named: NumPy's own fails for unaligned arrays."""
    return [byte_view(data), _DATATYPES[dtype]]


def is_in_place(spec: Any) -> bool:
    """Whether a send buffer is ``MPI.IN_PLACE``."""
    return spec is MPI.IN_PLACE or (isinstance(spec, int) and spec == MPI.IN_PLACE)


def parse(spec: Any, *, writable: bool = False) -> Flat:
    """View a buffer specification as flat elements.

    Args:
        spec: an array, a CPU tensor, or ``[data, datatype]``, ``[data, count]``, ``[data, count, datatype]``,
            ``[data, (count, displ), datatype]`` with one of MPI's basic datatypes, or its typecode.
        writable: it receives data.

    Raises:
        TypeError: no such form, or a derived datatype (pack it into an array first).
        CodecMismatchError: unsupported dtype; or ``writable`` and it is read-only or not contiguous.
    """
    if isinstance(spec, list | tuple):
        return _parse_list(list(spec), writable)
    if (
        not is_torch(spec)
        and not isinstance(spec, np.ndarray)
        and not hasattr(spec, "__cuda_array_interface__")
    ):
        spec = _from_buffer(spec, writable)
    return flatten(spec, writable=writable)


def _from_buffer(data: Any, writable: bool) -> np.ndarray[Any, Any]:
    try:
        view = memoryview(data)
    except TypeError:
        raise TypeError(
            f"a buffer must be an array, a CPU tensor or an mpi4py buffer specification, not {type(data).__name__}"
        ) from None
    if writable and view.readonly:
        raise TypeError(f"this operation writes to its buffer, and {type(data).__name__} is read-only")
    return np.asarray(view)


def _parse_list(spec: list[Any], writable: bool) -> Flat:
    data, *rest = spec
    datatype = rest.pop() if rest and isinstance(rest[-1], MPI.Datatype | str) else None
    extent = rest.pop(0) if rest else None
    if rest:
        raise TypeError(
            f"a buffer specification is [data, count or (count, displ), datatype], not {len(spec)} items"
        )
    flat = parse(data, writable=writable)
    dtype = flat.dtype if datatype is None else _dtype(datatype)
    if dtype.itemsize != flat.dtype.itemsize or (
        dtype is not flat.dtype and flat.dtype is not DType.BFLOAT16
    ):
        if flat.nbytes % dtype.itemsize:
            raise TypeError(f"{flat.nbytes} bytes are not a whole number of {dtype.label}")
        flat = Flat(
            flat.data.view(np.uint8).view(dtype.storage), dtype, flat.shape, flat.shares, flat.is_torch
        )
    if extent is None:
        return flat
    count, displ = extent if isinstance(extent, list | tuple) else (extent, 0)
    if displ < 0 or count < 0 or displ + count > flat.size:
        raise TypeError(f"elements {displ} to {displ + count} are not within a buffer of {flat.size}")
    return Flat(flat.data[displ : displ + count], flat.dtype, (count,), flat.shares, flat.is_torch)


def _dtype(datatype: MPI.Datatype | str) -> DType:
    if isinstance(datatype, str):
        return DType[np.dtype(datatype).name.upper()]
    found = _BY_DATATYPE.get(datatype.Get_name())
    if found is None:
        raise TypeError(
            f"datatype {datatype.Get_name() or 'of your own'} is not one of MPI's basic ones; pack it into an array"
        )
    return found


def overlap(a: Flat, b: Flat) -> bool:
    """Whether two buffers have memory in common."""
    return bool(np.may_share_memory(a.data, b.data, max_work=0))


def same_memory(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    """Whether two contiguous arrays begin at the same address and are equally long."""
    return a.ctypes.data == b.ctypes.data and a.nbytes == b.nbytes

"""What callers give as buffers: arrays, tensors and mpi4py's buffer specifications; and how MPI is given them."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from hybridcomp.arrays import DType, Flat, byte_view, flatten, is_torch
from hybridcomp.device import DeviceArray, Queue

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


def typed(data: Any, dtype: DType) -> list[Any]:
    """An mpi4py specification of an array with its datatype named: NumPy's own fails for unaligned arrays."""
    return [_bytes(data), _DATATYPES[dtype]]


def raw(flat: Flat) -> list[Any]:
    """An mpi4py specification of an array's bytes."""
    return [_bytes(flat.data), MPI.BYTE]


def _bytes(data: Any) -> Any:
    if isinstance(data, DeviceArray):  # its address is all that MPI asks for
        return MPI.buffer.fromaddress(data.ptr, data.nbytes)
    return byte_view(data)


def is_in_place(spec: Any) -> bool:
    """Whether a send buffer is ``MPI.IN_PLACE``."""
    return spec is MPI.IN_PLACE or (isinstance(spec, int) and spec == MPI.IN_PLACE)


def parse(spec: Any, *, writable: bool = False) -> Flat:
    """View a buffer specification as flat elements.

    Args:
        spec: an array or tensor, of the machine's memory or a device's, or ``[data, datatype]``, ``[data, count]``,
            ``[data, count, datatype]``, ``[data, (count, displ), datatype]`` with one of MPI's basic datatypes, or its
            typecode.
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
    return flatten(spec, writable=writable, device=True)


def _from_buffer(data: Any, writable: bool) -> np.ndarray[Any, Any]:
    try:
        view = memoryview(data)
    except TypeError:
        raise TypeError(
            f"a buffer must be an array, a tensor or an mpi4py buffer specification, not {type(data).__name__}"
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


def together(*flats: Flat | None) -> list[DeviceArray]:
    """The buffers of one call that are on a device: all of them, or none.

    Raises:
        TypeError: one is on a device and another is elsewhere.
    """
    given = [flat.data for flat in flats if flat is not None]
    device = [data for data in given if isinstance(data, DeviceArray)]
    if device and len(device) < len(given):
        raise TypeError(
            "one buffer is on a device and the other in host memory: give both in the same memory"
        )
    if any(data.runtime is not device[0].runtime for data in device):
        names = " and ".join(f"device {data.runtime.ordinal}" for data in device)
        raise TypeError(f"the buffers are on {names}: give both on the same")
    return device


def overlap(a: Flat, b: Flat) -> bool:
    """Whether two buffers of one memory have bytes in common."""
    if isinstance(a.data, DeviceArray):
        ends = (a.data.ptr + a.nbytes, b.data.ptr + b.nbytes)
        return bool(a.nbytes and b.nbytes and a.data.ptr < ends[1] and b.data.ptr < ends[0])
    return bool(np.may_share_memory(a.data, b.data, max_work=0))


def same_memory(a: Any, b: Any) -> bool:
    """Whether two contiguous arrays begin at the same address and are equally long."""
    if isinstance(a, DeviceArray):
        return bool(a.ptr == b.ptr and a.nbytes == b.nbytes)
    return bool(a.ctypes.data == b.ctypes.data and a.nbytes == b.nbytes)


def copied(flat: Flat) -> Flat:
    """A copy of a buffer, in the order of its owner's stream if it is on a device."""
    data = flat.data
    if isinstance(data, DeviceArray):
        queue = Queue(data.runtime, data.runtime.current_stream(data.owner))
        copy = queue.array(data.size, data.dtype)
        queue.copy(copy, data)
        return flat._replace(data=copy, shares=False)
    return flat._replace(data=data.copy(), shares=False)

"""Parse the buffers that callers pass (arrays, tensors, mpi4py's buffer specifications), and write them for MPI."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from hybridcomp.arrays import DType, Flat, byte_view, flatten, is_torch
from hybridcomp.device import DeviceArray
from hybridcomp.errors import CodecMismatchError

_BY_HANDLE: dict[int, DType] = {
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


def datatype_of(*specs: Any) -> MPI.Datatype | None:
    """Return the datatype of the first of some buffer specifications that has one; None if none has."""
    for spec in specs:
        data, datatype = spec, None
        if isinstance(spec, list | tuple) and spec:
            data, datatype = spec[0], spec[-1]
        if isinstance(datatype, MPI.Datatype):
            return datatype
        if not isinstance(datatype, str):
            datatype = getattr(getattr(data, "dtype", None), "char", None)
        if datatype is not None:
            try:
                return MPI.Datatype.fromcode(datatype)
            except ValueError:
                continue
    return None


def typed(data: Any, dtype: DType) -> list[Any]:
    """Return an mpi4py specification of an array with its datatype named: NumPy's own fails for unaligned arrays."""
    return [_bytes(data), _DATATYPES[dtype]]


def datatype(dtype: DType) -> MPI.Datatype | None:
    """Return MPI's datatype of elements; None for float16 and bfloat16, which it lacks."""
    return _DATATYPES.get(dtype)


def raw(flat: Flat) -> list[Any]:
    """Return an mpi4py specification of an array's bytes."""
    return [_bytes(flat.data), MPI.BYTE]


def _bytes(data: Any) -> Any:
    if isinstance(data, DeviceArray):  # MPI needs its address alone
        return MPI.buffer.fromaddress(data.ptr, data.nbytes)
    return byte_view(data)


class ForeignBufferError(TypeError):
    """Raised for a buffer specification that only MPI understands: it is passed to MPI, uncompressed."""


def is_in_place(spec: Any) -> bool:
    """Tell whether a buffer is ``MPI.IN_PLACE``, which mpi4py also writes as None."""
    return spec is None or spec is MPI.IN_PLACE or (isinstance(spec, int) and spec == MPI.IN_PLACE)


def parse(spec: Any, *, writable: bool = False, blocks: int = 1) -> Flat:
    """View a buffer specification as flat elements.

    Args:
        spec: an array or tensor, in the host's memory or a device's, or ``[data, datatype]``, ``[data, count]``,
            ``[data, (count, displ)]`` and ``[data, count, displ]``, the last three with or without a datatype at the
            end: one of MPI's basic datatypes, or its typecode.
        writable: whether the buffer receives data.
        blocks: number of blocks in the buffer, of which a count counts one, as in an all-gather.

    Raises:
        ForeignBufferError: ``spec`` has no such form, a derived datatype, or an element type that no message carries,
            or is ``writable`` and read-only or not contiguous.
        ValueError: the count goes beyond the data.
    """
    try:
        if isinstance(spec, list | tuple):
            return _parse_list(list(spec), writable, blocks)
        return _view(spec, writable)
    except CodecMismatchError as error:
        raise ForeignBufferError(str(error)) from None


def _view(data: Any, writable: bool) -> Flat:
    if not (is_torch(data) or isinstance(data, np.ndarray)):
        if not hasattr(data, "__cuda_array_interface__"):
            data = _from_buffer(data, writable)
        elif not (hasattr(data, "__hybridcomp_runtime__") or hasattr(data, "device")):
            raise ForeignBufferError(
                f"{type(data).__name__} is none of the device arrays that are known here"
            )
    return flatten(data, writable=writable, device=True)


def _from_buffer(data: Any, writable: bool) -> np.ndarray[Any, Any]:
    try:
        array = np.asarray(memoryview(data))
    except (TypeError, ValueError):  # no buffer, or in a format that NumPy lacks
        raise ForeignBufferError(
            f"a buffer must be an array, a tensor or an mpi4py buffer specification, not {type(data).__name__}"
        ) from None
    if writable and not array.flags.writeable:
        raise ForeignBufferError(
            f"this operation writes to its buffer, and {type(data).__name__} is read-only"
        )
    return array


def unpack(spec: list[Any]) -> tuple[Any, Any, Any, MPI.Datatype | str | None]:
    """Return a specification's data, counts, displacements and datatype; None for parts that it leaves out.

    Raises:
        ForeignBufferError: the list is no specification.
    """
    if not spec:
        raise ForeignBufferError("an empty list is no buffer specification")
    data, *rest = spec
    datatype = rest.pop() if rest and isinstance(rest[-1], MPI.Datatype | str) else None
    if len(rest) == 1 and isinstance(rest[0], tuple) and len(rest[0]) == 2:
        rest = list(rest[0])
    if len(rest) > 2:
        raise ForeignBufferError(f"a buffer specification has 1 to 4 items, not {len(spec)}")
    counts, displs = [*rest, None, None][:2]
    return data, counts, displs, datatype


def retyped(data: Any, datatype: MPI.Datatype | str | None, *, writable: bool) -> Flat:
    """View a buffer as elements of a datatype; None for the buffer's own."""
    flat = _view(data, writable)
    dtype = flat.dtype if datatype is None else _dtype(datatype)
    if dtype is flat.dtype or (flat.dtype is DType.BFLOAT16 and dtype.itemsize == flat.dtype.itemsize):
        return flat
    if flat.nbytes % dtype.itemsize or isinstance(flat.data, DeviceArray):
        raise ForeignBufferError(f"{flat.nbytes} bytes cannot be taken for {dtype.label}")
    data = flat.data.view(np.uint8).view(dtype.storage)
    return Flat(data, dtype, (data.size,), flat.shares, flat.is_torch)


def _parse_list(spec: list[Any], writable: bool, blocks: int) -> Flat:
    data, count, displ, datatype = unpack(spec)
    flat = retyped(data, datatype, writable=writable)
    if count is None and displ is None:
        return flat
    if not all(x is None or hasattr(x, "__index__") for x in (count, displ)):
        raise ForeignBufferError("a count and a displacement are integers")
    start = 0 if displ is None else int(displ)
    n = flat.size - start if count is None else int(count) * blocks
    if start < 0 or n < 0 or start + n > flat.size:
        raise ValueError(f"elements {start} to {start + n} are not within a buffer of {flat.size}")
    return part(flat, start, n)


def part(flat: Flat, start: int, n: int) -> Flat:
    """Return ``n`` elements of a buffer from ``start``."""
    return Flat(flat.data[start : start + n], flat.dtype, (n,), flat.shares, flat.is_torch)


def _dtype(datatype: MPI.Datatype | str) -> DType:
    if isinstance(datatype, str):
        try:
            datatype = MPI.Datatype.fromcode(datatype)
        except ValueError as error:
            raise ForeignBufferError(str(error)) from None
    dtype = _BY_HANDLE.get(datatype.handle)
    if dtype is None:
        raise ForeignBufferError("the datatype is not one of MPI's basic ones that a message can carry")
    return dtype


def same_dtype(send: Flat, recv: Flat) -> Flat:
    """Return ``send`` if it has the dtype of ``recv``.

    Raises:
        ValueError: the dtypes differ.
    """
    if send.dtype is not recv.dtype:
        raise ValueError(f"send buffer is {send.dtype.label}, receive buffer {recv.dtype.label}")
    return send


def like(send: Flat, recv: Flat) -> Flat:
    """Return ``send`` if it has the dtype and the count of ``recv``.

    Raises:
        ValueError: the dtypes or the counts differ.
    """
    if send.size != recv.size:
        raise ValueError(f"send buffer has {send.size} elements, recv buffer {recv.size}")
    return same_dtype(send, recv)

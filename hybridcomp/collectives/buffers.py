"""Parse the buffers that callers pass (arrays, tensors, mpi4py's buffer specifications), and write them for MPI."""

from __future__ import annotations

import functools
import operator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from hybridcomp.arrays import ByteArray, DType, Flat, as_dtype, byte_view, flatten, is_torch
from hybridcomp.collectives.datatypes import BY_DTYPE, BY_HANDLE, DATATYPES, ForeignBufferError
from hybridcomp.collectives.packing import pack
from hybridcomp.device import DeviceArray
from hybridcomp.errors import CodecMismatchError
from hybridcomp.native import kernels

# DLPack's numbers of devices whose memory the host reads: CPU, pinned for CUDA and for ROCm.
_HOST = (1, 3, 11)


def datatype_of(*specs: Any) -> MPI.Datatype | None:
    """Return the datatype of the first of some buffers that has one; None if none has."""
    for spec in specs:
        try:
            data, _, _, datatype = Spec.of(spec)
        except (TypeError, ValueError):
            continue
        if isinstance(datatype, MPI.Datatype):
            return datatype
        if not isinstance(datatype, str):
            datatype = _typecode(data)
        if datatype is not None:
            try:
                return MPI.Datatype.fromcode(datatype)
            except ValueError:
                continue
    return None


def _typecode(data: Any) -> str | None:
    """Return the typecode of the elements of an array or another buffer; None if it does not tell."""
    dtype = getattr(data, "dtype", None)
    if isinstance(dtype, np.dtype):
        return str(dtype.char)
    if data is None or data is MPI.IN_PLACE or data is MPI.BOTTOM:  # the two would be buffers of bytes
        return None
    with suppress(TypeError, ValueError, BufferError):
        return memoryview(data).format
    if hasattr(data, "__cuda_array_interface__"):
        return str(np.dtype(data.__cuda_array_interface__["typestr"]).char)
    if _on_host(data):
        with suppress(RuntimeError, BufferError):
            return str(np.from_dlpack(data).dtype.char)
    return None


def _on_host(data: Any) -> bool:
    """Tell whether an object has DLPack, and its memory is the host's."""
    return hasattr(data, "__dlpack_device__") and data.__dlpack_device__()[0] in _HOST


def typed(data: Any, dtype: DType) -> list[Any]:
    """Return an mpi4py specification of an array with its datatype named: NumPy's own fails for unaligned arrays."""
    return [_bytes(data), DATATYPES[dtype]]


def datatype(dtype: DType) -> MPI.Datatype | None:
    """Return MPI's datatype of elements; None for bfloat16, which it lacks, and float16 where MPI lacks it."""
    return DATATYPES.get(dtype)


def raw(flat: Flat) -> list[Any]:
    """Return an mpi4py specification of an array's bytes."""
    return [_bytes(flat.data), MPI.BYTE]


def elements(flat: Flat) -> list[Any]:
    """Return an mpi4py specification of an array's elements; of their bytes where MPI has no such elements."""
    return [_bytes(flat.data), DATATYPES.get(flat.dtype, MPI.BYTE)]


def units(dtype: DType, n: int) -> tuple[int, int]:
    """Return the count with which MPI moves ``n`` elements, and the handle of its datatype."""
    found = DATATYPES.get(dtype)
    return (n * dtype.itemsize, MPI.BYTE.handle) if found is None else (n, found.handle)


def _bytes(data: Any) -> Any:
    if isinstance(data, DeviceArray):  # MPI needs its address alone
        return MPI.buffer.fromaddress(data.ptr, data.nbytes)
    return byte_view(data)


def is_in_place(spec: Any) -> bool:
    """Tell whether a buffer is ``MPI.IN_PLACE``, which mpi4py also writes as None."""
    return spec is None or spec is MPI.IN_PLACE or (isinstance(spec, int) and spec == MPI.IN_PLACE)


class Spec(NamedTuple):
    """Parts of a buffer as mpi4py's callers give it; None for those that are left out.

    Attributes:
        data: object that has the memory.
        counts: number of elements, or one for each rank.
        displs: first element, or one for each rank.
        datatype: MPI's datatype, or its typecode.
    """

    data: Any
    counts: Any = None
    displs: Any = None
    datatype: MPI.Datatype | str | None = None

    @classmethod
    def of(cls, spec: Any, pairs: Any = (tuple, list)) -> Spec:
        """Return the parts of an array, or of a list or tuple of 2 to 4 items, as mpi4py reads them.

        Args:
            spec: the array or list.
            pairs: classes of what stands for a count and a displacement in the place of a count.

        Raises:
            ValueError: the list has another number of items.
        """
        if not isinstance(spec, list | tuple):
            return cls(spec)
        if len(spec) == 2:
            data, count = spec
            if isinstance(count, MPI.Datatype | str):
                return cls(data, None, None, count)
            return cls(data, *_pair(count, pairs))
        if len(spec) == 3:
            data, count, third = spec
            if third is None or isinstance(third, MPI.Datatype | str):
                return cls(data, *_pair(count, pairs), third)
            return cls(data, count, third)  # which mpi4py takes with a datatype alone
        if len(spec) == 4:
            return cls(*spec)
        raise ValueError("message: expecting 2 to 4 items")


def _pair(given: Any, pairs: Any) -> tuple[Any, Any]:
    if not isinstance(given, pairs):
        return given, None
    first, second = given
    return first, second


def parse(spec: Any, *, writable: bool = False, blocks: int = 1) -> Flat:
    """View a buffer as flat elements, in the order of its memory, which is what mpi4py moves.

    Args:
        spec: what mpi4py takes: an array, tensor or buffer, in the host's memory or a device's, or a list of it with a
            count, a displacement and a datatype or typecode. Elements of a derived datatype of one basic type are
            packed (:mod:`~hybridcomp.collectives.packing`).
        writable: whether the buffer receives data.
        blocks: number of blocks in the buffer, of which a count counts one, as in an all-gather.

    Raises:
        ForeignBufferError: the elements are of a type that no message carries, or of several.
        BufferError, KeyError, TypeError, ValueError: mpi4py's, for what it does not take.
        ValueError: the count goes beyond the data.
    """
    if type(spec) is np.ndarray or is_torch(spec):
        return _view(spec, writable)
    parts = Spec.of(spec)
    flat = retyped(parts.data, parts.datatype, writable=writable)
    if flat is None:
        assert isinstance(parts.datatype, MPI.Datatype)
        return pack(parts.data, parts.counts, parts.displs, parts.datatype, writable=writable, blocks=blocks)
    if parts.counts is None and parts.displs is None:
        return flat
    start = 0 if parts.displs is None else operator.index(parts.displs)
    n = flat.size - start if parts.counts is None else operator.index(parts.counts) * blocks
    if start < 0 or n < 0 or start + n > flat.size:
        raise ValueError(f"elements {start} to {start + n} are not within a buffer of {flat.size}")
    return part(flat, start, n)


def in_memory(spec: Any, blocks: int = 1) -> Flat:
    """View a buffer of so many blocks whose elements lie in its memory as an operation takes them.

    Raises:
        ForeignBufferError: they are packed.
    """
    flat = parse(spec, blocks=blocks)
    if not flat.shares:
        raise ForeignBufferError("the elements are packed")
    return flat


def check(spec: Any, *, writable: bool) -> None:
    """Raise mpi4py's error for a buffer that it does not take."""
    (MPI.COMM_SELF.Recv_init if writable else MPI.COMM_SELF.Send_init)(spec, 0).Free()


def _view(data: Any, writable: bool) -> Flat:
    """View a buffer as elements of its own type."""
    if is_torch(data):
        return _of_torch(data, writable)
    if hasattr(data, "__cuda_array_interface__"):
        return _of_device(data, writable)
    array = data if type(data) is np.ndarray else _from_buffer(data, writable)
    flags = array.flags
    if not (flags.c_contiguous or flags.f_contiguous) or (writable and not flags.writeable):
        check(data, writable=writable)
    dtype = BY_DTYPE.get(array.dtype)
    if dtype is None:
        dtype = _other_dtype(array, data, writable)
    elements = array.reshape(-1) if flags.c_contiguous else array.T.reshape(-1)
    if elements.dtype is not dtype.storage:
        elements = elements.view(dtype.storage)
    return Flat(elements, dtype, array.shape, True, False)


def _of_torch(data: Any, writable: bool) -> Flat:
    try:
        return flatten(data, writable=writable, device=True)
    except CodecMismatchError as error:
        if writable and not data.is_contiguous():
            raise BufferError(str(error)) from None
        raise ForeignBufferError(str(error)) from None


def _of_device(data: Any, writable: bool) -> Flat:
    if not (hasattr(data, "__hybridcomp_runtime__") or hasattr(data, "device")):
        raise ForeignBufferError(f"{type(data).__name__} is none of the device arrays that are known here")
    try:
        return flatten(data, writable=writable, device=True)
    except CodecMismatchError as error:
        raise ForeignBufferError(str(error)) from None


def _other_dtype(array: np.ndarray[Any, Any], data: Any, writable: bool) -> DType:
    """Return the type of an array whose dtype is none of NumPy's own numbers; raise mpi4py's error if it has none."""
    try:
        return as_dtype(array.dtype)
    except CodecMismatchError as error:
        check(data, writable=writable)  # mpi4py takes long doubles
        raise ForeignBufferError(str(error)) from None


def _from_buffer(data: Any, writable: bool) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(memoryview(data))
    except (TypeError, ValueError, BufferError):  # no buffer, or in a format that NumPy lacks
        check(data, writable=writable)
    if _on_host(data):
        try:
            array = np.from_dlpack(data)
        except (RuntimeError, BufferError) as error:  # elements of which mpi4py knows the size
            raise ForeignBufferError(str(error)) from None
        if array.flags.writeable or not writable:
            return array
        return _at(array.ctypes.data, array.nbytes, data).view(
            array.dtype
        )  # NumPy takes any such array as read-only
    raise ForeignBufferError(f"NumPy does not know the elements of {type(data).__name__}")


def _at(address: int, nbytes: int, owner: Any) -> ByteArray:
    return np.ndarray((nbytes,), np.uint8, kernels().Span(address, nbytes, owner))


def retyped(data: Any, datatype: MPI.Datatype | str | None, *, writable: bool) -> Flat | None:
    """View a buffer as elements of a basic datatype, or of its own; return None for a derived one.

    Raises:
        ForeignBufferError: no message carries the type.
        BufferError, KeyError, TypeError, ValueError: mpi4py's, for what it does not take.
    """
    if datatype is None:
        return _view(data, writable)
    if isinstance(datatype, str):
        datatype = lookup(datatype)
    if not isinstance(datatype, MPI.Datatype) or datatype == MPI.DATATYPE_NULL:
        check([data, 0, datatype], writable=writable)
        raise ForeignBufferError("the datatype is null")
    dtype = BY_HANDLE.get(datatype.handle)
    if dtype is not None:
        return _elements(data, datatype, dtype, writable)
    if datatype.is_predefined:
        raise ForeignBufferError("the datatype is not one of MPI's basic ones that a message can carry")
    return None


def _elements(data: Any, datatype: MPI.Datatype, dtype: DType, writable: bool) -> Flat:
    """View a buffer's memory as elements of a basic datatype."""
    if is_torch(data) or hasattr(data, "__cuda_array_interface__"):
        flat = _view(data, writable)
        if dtype.itemsize == flat.dtype.itemsize:
            same = flat.dtype is dtype or flat.dtype is DType.BFLOAT16
            return flat if same else flat._replace(dtype=dtype, data=flat.data.view(dtype.storage))
        if flat.nbytes % dtype.itemsize or isinstance(flat.data, DeviceArray):
            raise ForeignBufferError(f"{flat.nbytes} bytes cannot be taken for {dtype.label}")
        data = flat.data
    if data is None or data is MPI.BOTTOM:
        values: Any = np.empty(0, dtype.storage)
        return Flat(values, dtype, (0,), True, False)
    held: Any = data
    if type(data) is memoryview:
        with suppress(TypeError, ValueError):  # a format that NumPy lacks
            held = np.asarray(data)
    if type(held) is np.ndarray:
        flags = held.flags
        if not (flags.c_contiguous or flags.f_contiguous) or (writable and not flags.writeable):
            check([data, 0, datatype], writable=writable)
        address, nbytes = held.ctypes.data, held.nbytes
    else:
        held = MPI.buffer.frombuffer(data, readonly=not writable)
        address, nbytes = held.address, held.nbytes
    n = nbytes // dtype.itemsize
    if nbytes % dtype.itemsize:
        check([data, datatype], writable=writable)  # for a count that is not given
    elements = _at(address, n * dtype.itemsize, held).view(dtype.storage)
    return Flat(elements, dtype, (n,), True, False)


@functools.cache
def lookup(typecode: str) -> MPI.Datatype:
    """Return the datatype of a typecode.

    Raises:
        KeyError: mpi4py's, for a typecode that it does not know.
    """
    check([b"", 0, typecode], writable=False)
    return MPI.Datatype.fromcode(typecode)


def part(flat: Flat, start: int, n: int) -> Flat:
    """Return ``n`` elements of a buffer from ``start``."""
    return Flat(flat.data[start : start + n], flat.dtype, (n,), flat.shares, flat.is_torch)


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

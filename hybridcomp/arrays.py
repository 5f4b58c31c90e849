"""View NumPy arrays, torch tensors and buffers alike: flat storage and a wire dtype.

Codecs and collectives work on a :class:`Flat`: a one-dimensional C-contiguous NumPy array over the
caller's memory and a :class:`DType`. bfloat16, which NumPy lacks, is stored as uint16. torch is never
imported here; a tensor is recognised by its class and only if its owner has already loaded torch.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hybridcomp.errors import CodecMismatchError, CudaUnavailableError
from hybridcomp.native import kernels

ByteArray = npt.NDArray[np.uint8]


class DType(enum.IntEnum):
    """The element types, by their code in a message's header.

    Attributes:
        storage: NumPy dtype that holds the elements (uint16 for bfloat16).
        itemsize: bytes of one element.
        component_bytes: bytes of one number: half of an element for complex types.
        is_float: whether lossy codecs accept the type: the four real floating-point types.
        accumulator: type that sums are kept in: float64 for float64, float32 for the other floats.
        label: usual spelling: ``float32``.
    """

    storage: np.dtype[Any]
    itemsize: int
    component_bytes: int
    is_float: bool
    accumulator: DType
    label: str

    FLOAT32 = 1
    FLOAT64 = 2
    FLOAT16 = 3
    BFLOAT16 = 4
    UINT8 = 5
    INT8 = 6
    INT16 = 7
    INT32 = 8
    INT64 = 9
    BOOL = 10
    UINT16 = 11
    UINT32 = 12
    UINT64 = 13
    COMPLEX64 = 14
    COMPLEX128 = 15


# Plain attributes, set once: an encode of a small array spends most of its time here otherwise.
for _d in DType:
    _d.label = _d.name.lower()
    _d.storage = np.dtype("uint16" if _d is DType.BFLOAT16 else _d.label)
    _d.itemsize = _d.storage.itemsize
    _d.component_bytes = _d.itemsize // (2 if _d in (DType.COMPLEX64, DType.COMPLEX128) else 1)
    _d.is_float = _d <= DType.BFLOAT16
    _d.accumulator = _d
    if _d.is_float and _d is not DType.FLOAT64:
        _d.accumulator = DType.FLOAT32

_BY_NUMPY: dict[Any, DType] = {d.storage: d for d in DType if d is not DType.BFLOAT16}
_BY_NAME: dict[str, DType] = {d.label: d for d in DType}

DTypeLike = DType | str | npt.DTypeLike


def as_dtype(dtype: Any) -> DType:
    """Return the :class:`DType` for a DType, a name, a NumPy dtype or a torch dtype.

    Raises:
        CodecMismatchError: no message can carry the type.
    """
    if isinstance(dtype, DType):
        return dtype
    found = _BY_NUMPY.get(dtype) if isinstance(dtype, np.dtype) else None
    if found is not None:
        return found
    name = str(dtype).removeprefix("torch.")
    if name in _BY_NAME:
        return _BY_NAME[name]
    try:
        key = np.dtype(dtype)
    except TypeError:
        key = np.dtype("O")
    if key.name in _BY_NAME and key.isnative:  # includes ml_dtypes' bfloat16
        return _BY_NAME[key.name]
    allowed = ", ".join(_BY_NAME)
    raise CodecMismatchError(f"dtype {dtype} cannot be carried in a message; allowed: {allowed}")


class Flat(NamedTuple):
    """A caller's array as flat storage.

    Attributes:
        data: one-dimensional C-contiguous array of ``dtype.storage``: NumPy's, or a
            :class:`~hybridcomp.device.DeviceArray`.
        dtype: the element type.
        shape: the caller's shape.
        shares: whether ``data`` is the caller's memory (False: a contiguous copy).
        is_torch: whether the caller gave a torch tensor.
        store: function that writes an array such as ``data``, or its beginning, to the caller's memory, where ``data``
            is a copy of what receives; else None.
    """

    data: Any
    dtype: DType
    shape: tuple[int, ...]
    shares: bool
    is_torch: bool
    store: Callable[[Any], None] | None = None

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return int(self.data.size)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all elements."""
        return int(self.data.nbytes)


def is_torch(x: object) -> bool:
    """Tell whether ``x`` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def on_device(x: object) -> bool:
    """Tell whether ``x`` is an array or tensor in the memory of a device."""
    if is_torch(x):
        return bool(x.device.type == "cuda")  # type: ignore[attr-defined]
    return hasattr(x, "__cuda_array_interface__")


def flatten(x: Any, *, writable: bool = False, device: bool = False) -> Flat:
    """View ``x`` as a :class:`Flat`; copies only when ``x`` is not contiguous.

    Args:
        x: NumPy array (or anything ``np.asarray`` takes), or torch CPU tensor; any shape.
        writable: require that writing to the result writes to ``x``.
        device: take CuPy arrays and torch CUDA tensors too.

    Raises:
        CodecMismatchError: unsupported dtype, or ``writable`` and ``x`` is read-only or not contiguous.
        CudaUnavailableError: ``x`` is on a device, and ``device`` is False or the device does not work here.
    """
    if type(x) is np.ndarray and x.ndim == 1:  # the usual case, without asking further
        kind = _BY_NUMPY.get(x.dtype)
        flags = x.flags
        if kind is not None and flags.c_contiguous and (not writable or flags.writeable):
            return Flat(x, kind, x.shape, True, False)
    tensor = is_torch(x)
    if device and (x.device.type == "cuda" if tensor else hasattr(x, "__cuda_array_interface__")):
        return _flatten_device(x, writable)
    if tensor:
        return _flatten_torch(x, writable)
    if hasattr(x, "__cuda_array_interface__"):
        raise CudaUnavailableError(
            "this is a CUDA array, where only arrays of the machine's memory are taken"
        )
    array = np.asarray(x)
    dtype = as_dtype(array.dtype)
    flags = array.flags
    if writable and not (flags.writeable and flags.c_contiguous and array is x):
        raise CodecMismatchError("the output must be a writable, C-contiguous array")
    shares = flags.c_contiguous
    contiguous = array if shares else np.ascontiguousarray(array)
    return Flat(contiguous.reshape(-1).view(dtype.storage), dtype, array.shape, shares, False)


def _flatten_torch(x: Any, writable: bool) -> Flat:
    if x.device.type != "cpu":
        raise CudaUnavailableError(
            f"tensor on {x.device}, where only tensors of the machine's memory are taken"
        )
    dtype = as_dtype(x.dtype)
    shares = x.is_contiguous() and not x.is_conj() and not x.is_neg()
    if writable and not shares:
        raise CodecMismatchError("the output must be a contiguous tensor")
    own = x if shares else x.detach().resolve_conj().resolve_neg().contiguous()
    return Flat(tensor_view(own, (own.numel(),), dtype.storage), dtype, tuple(x.shape), shares, True)


def tensor_view(tensor: Any, shape: tuple[int, ...], storage: np.dtype[Any]) -> npt.NDArray[Any]:
    """View a contiguous torch tensor in the machine's memory as a NumPy array of ``shape`` and ``storage``.

    The tensor stays as it is: ``Tensor.numpy()`` marks its storage, which torch then refuses to resize for ever.
    """
    span = kernels().Span(tensor.data_ptr(), tensor.nbytes, tensor)
    return np.ndarray(shape, storage, span)


def _flatten_device(x: Any, writable: bool) -> Flat:
    from hybridcomp import cuda, device  # noqa: PLC0415  (only who has device arrays pays for it)

    dtype = as_dtype(x.dtype)
    if is_torch(x):
        shares = x.is_contiguous() and not x.is_conj() and not x.is_neg()
        own = x.detach() if shares else x.detach().resolve_conj().resolve_neg().contiguous()
        runtime: device.Runtime = cuda.runtime_of(x.device.index)
        ptr, size = own.data_ptr(), own.numel()
    else:
        flags = x.flags
        shares = bool(flags.c_contiguous)
        own = x if shares else x.copy(order="C")
        found = getattr(x, "__hybridcomp_runtime__", None)
        runtime = found if found is not None else cuda.runtime_of(x.device.id)
        ptr, size = own.__cuda_array_interface__["data"][0], int(own.size)
    if writable and not shares:
        raise CodecMismatchError("the output must be contiguous")
    return Flat(
        device.DeviceArray(runtime, ptr, size, dtype.storage, own), dtype, tuple(x.shape), shares, is_torch(x)
    )


def byte_view(array: npt.NDArray[Any]) -> ByteArray:
    """Return the bytes of a C-contiguous array, without a copy."""
    return array.reshape(-1).view(np.uint8)


def widen(data: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    """Return a copy of values in their accumulator's dtype (float32; float64 for float64)."""
    return _converted(data, dtype, dtype.accumulator)


def narrow(acc: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    """Return an accumulator's values rounded to nearest even in ``dtype``'s storage; NaN stays NaN."""
    return acc if dtype.accumulator is dtype else _converted(acc, dtype.accumulator, dtype)


def _converted(data: npt.NDArray[Any], dtype: DType, into: DType) -> npt.NDArray[Any]:
    out = np.empty(data.shape, into.storage)
    kernels().convert(data, dtype, out, into, False)
    return out


def like(data: npt.NDArray[Any], source: Flat) -> Any:
    """Return ``data`` (uint8 or plain numeric storage) in the library that ``source`` came from."""
    if source.is_torch:
        return sys.modules["torch"].from_numpy(data)
    return data


def empty_like_dtype(n: int, dtype: DType, *, torch_out: bool) -> Any:
    """Return a new uninitialised array of ``n`` elements that a caller may keep: torch tensor or NumPy array.

    bfloat16 without torch comes as ``ml_dtypes.bfloat16`` when that is installed, else as its uint16 bits.
    """
    if torch_out:
        torch = sys.modules["torch"]
        return torch.empty(n, dtype=getattr(torch, dtype.label))
    if dtype is DType.BFLOAT16:
        try:
            import ml_dtypes  # noqa: PLC0415  (optional: only who has such arrays has it)
        except ImportError:
            return np.empty(n, np.uint16)
        return np.empty(n, ml_dtypes.bfloat16)
    return np.empty(n, dtype.storage)

"""A rank's buffer: its elements' types, the memory in which they lie, and the object that holds it."""

from __future__ import annotations

import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mpi4py import MPI
from mpi4py.util import dtlib

OPEN_MPI = "Open MPI" in MPI.Get_library_version()
GUARD = 64  # bytes on both sides of an array, which nothing may touch
FILL = 0xA5  # what receive memory holds before

_STRUCTS = {
    "packed": np.dtype([("a", "i4"), ("b", "f8")]),
    "aligned": np.dtype([("a", "i1"), ("b", "f8")], align=True),
}
# Names of types of elements. Those that mpi4py does not map to MPI's have their type said in every message.
_MAPPED = ["f4", "f8", "i4", "u1", "i8", "c8", "b1", "i1", "i2", "u2", "u4", "u8", "c16", "g", "G", "f2"]
MAPPED = [name for name in _MAPPED if np.dtype(name).char in MPI._typedict]
UNMAPPED = [">f4", ">i8", *_STRUCTS]
SUMMED = [name for name in MAPPED if name not in ("b1", "G", "f2")]
LOSSY = {
    "f4": 1,
    "f8": 1,
    "c8": 2,
    "c16": 2,
    "f2": 1,
}  # what a lossy policy may round, and the parts of an element
ARRAY_CODES = "bBhHiIlLqQfd"


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the NumPy type of a name above."""
    return _STRUCTS[name] if name in _STRUCTS else np.dtype(name)


_made: dict[Any, MPI.Datatype] = {}


def base_type(name: str) -> MPI.Datatype:
    """Return MPI's type of one element."""
    if name in _STRUCTS:
        if name not in _made:
            _made[name] = dtlib.from_numpy_dtype(_STRUCTS[name]).Commit()
        return _made[name]
    found: MPI.Datatype = MPI._typedict[np.dtype(name).newbyteorder("=").char]
    return found


@dataclass(frozen=True)
class Type:
    """A datatype: elements at ``offsets`` of each entry, which is ``extent`` elements long."""

    kind: str
    offsets: tuple[int, ...]
    extent: int

    def __str__(self) -> str:
        return (
            self.kind if self.kind == "basic" else f"{self.kind}{list(self.offsets)} of extent {self.extent}"
        )

    def mpi(self, name: str) -> MPI.Datatype:
        """Return the committed type, made once for all calls."""
        key = (self, name)
        if self.kind == "basic":
            return base_type(name)
        if key not in _made:
            size = dtype_of(name).itemsize
            made = self._create(base_type(name), size)
            _made[key] = made.Create_resized(0, self.extent * size).Commit()
        return _made[key]

    def _create(self, base: MPI.Datatype, size: int) -> MPI.Datatype:
        t = len(self.offsets)
        match self.kind:
            case "contiguous":
                return base.Create_contiguous(t)
            case "vector":
                return base.Create_vector(t, 1, 2)
            case "hvector":
                return base.Create_hvector(t, 1, 3 * size)
            case "subarray":
                return base.Create_subarray([t, 3], [t, 1], [0, 1])
            case "Fortran subarray":
                return base.Create_subarray([3, t], [1, t], [1, 0], order=MPI.ORDER_F)
            case "indexed":
                return base.Create_indexed([1] * t, list(self.offsets))
            case "backwards":
                return base.Create_indexed_block(1, list(self.offsets))
            case "struct":
                return MPI.Datatype.Create_struct([1] * t, [o * size for o in self.offsets], [base] * t)
        raise ValueError(self.kind)


def types_of(t: int) -> list[Type]:
    """Return the types with ``t`` elements an entry; the plainest is the first."""
    steps = range(t)
    return [
        Type("basic", (0,), 1) if t == 1 else Type("contiguous", tuple(steps), t),
        Type("vector", tuple(2 * i for i in steps), 2 * t - 1),
        Type("subarray", tuple(3 * i + 1 for i in steps), 3 * t),
        Type("Fortran subarray", tuple(3 * i + 1 for i in steps), 3 * t),
        Type("indexed", tuple(i + i * (i + 1) // 2 for i in steps), t + t * (t + 1) // 2),
        Type("backwards", tuple(reversed(steps)), t),
        Type("struct", tuple(2 * i + 1 for i in steps), 2 * t + 1),
        Type("hvector", tuple(3 * i for i in steps), 3 * t - 2),
    ]


class Dlpack:
    """An array of another library, which has DLPack and no buffer interface."""

    def __init__(self, held: np.ndarray) -> None:
        self._held = held

    def __dlpack__(self, **how: Any) -> Any:
        return self._held.__dlpack__(**how)

    def __dlpack_device__(self) -> Any:
        return self._held.__dlpack_device__()


@dataclass
class Memory:
    """Elements, and all bytes around them.

    Attributes:
        storage: all bytes, with those that must stay as they are.
        view: the elements, in the order in which they lie.
        order: of the array that is given.
        holder: kind of the object that is given.
    """

    storage: np.ndarray
    view: np.ndarray
    order: str
    holder: str
    kept: list[Any] = field(default_factory=list)

    @property
    def offset(self) -> int:
        """Bytes before the first element."""
        return self.view.ctypes.data - self.storage.ctypes.data if self.view.size else 0

    def given(self) -> Any:
        """Return the object for the message; those that cannot be written hold what is there now."""
        match self.holder:
            case "bytes":
                return self.view.tobytes()
            case "bytearray" | "array.array":
                return self.kept[0]
        array_ = shaped(self.view, self.order)
        if self.holder == "memoryview":
            return memoryview(array_)
        return Dlpack(array_) if self.holder == "dlpack" else array_


def orders(length: int, *, says_type: bool) -> list[str]:
    """Return the orders in which an array of so many elements may lie that mpi4py takes.

    Args:
        length: number of elements.
        says_type: whether the message says its type; mpi4py has none for the format of arrays that are not aligned.
    """
    first = ["C", "0-d"] if length == 1 else ["C"]
    return [*first, "C 2-D", "F 2-D", "transposed", "F 3-D", *(["unaligned"] if says_type else [])]


def holders(name: str, order: str, *, says_type: bool, send: bool) -> list[str]:
    """Return the kinds of objects that can hold such elements.

    Args:
        name: type of the elements.
        order: of the array.
        says_type: whether the message says its type.
        send: whether the buffer is only read.
    """
    found = ["array", *(["read-only array"] if send else []), "memoryview"]
    if order == "C":
        if says_type or name == "u1":
            found += ["bytearray", *(["bytes"] if send else [])]
        if dtype_of(name).char in ARRAY_CODES and name[0] != ">":
            found.append("array.array")
    if name in MAPPED and name not in ("g", "G") and order != "unaligned":
        found.append("dlpack")
    return found


def allocate(length: int, dtype: np.dtype[Any], order: str, holder: str) -> Memory:
    """Return memory of ``length`` elements, full of ``FILL``."""
    size = length * dtype.itemsize
    if holder in ("bytearray", "array.array"):
        held: Any = bytearray([FILL]) * size
        if holder == "array.array":
            held = array.array(dtype.char, bytes(held))
        storage = np.frombuffer(held, np.uint8) if size else np.empty(0, np.uint8)
        return Memory(storage, storage.view(dtype), order, holder, [held])
    factor = 2 if order == "strided" else 1
    shift = 1 if order == "unaligned" else 0
    storage = np.full(factor * size + 2 * GUARD + shift, FILL, np.uint8)
    flat = np.ndarray((factor * length,), dtype, buffer=storage, offset=GUARD + shift)
    return Memory(storage, flat, order, holder)


def shaped(flat: np.ndarray, order: str) -> np.ndarray:
    """Return elements as an array of one of the orders."""
    length = flat.size
    rows = next((f for f in (2, 3, 5, 7) if length % f == 0), 1)
    match order:
        case "C 2-D":
            return flat.reshape(rows, length // rows)
        case "F 2-D":
            return flat.reshape((rows, length // rows), order="F")
        case "transposed":
            return flat.reshape(length // rows, rows).T
        case "F 3-D":
            return flat.reshape((rows, 1, length // rows), order="F")
        case "0-d":
            return flat.reshape(())
        case "strided":
            return flat[::2]
        case "reversed":
            return flat[::-1]
    return flat


def integers(values: Sequence[int], index: int) -> Any:
    """Return integers in one of the kinds of sequences that mpi4py takes."""
    match index % 8:
        case 1:
            return np.array(values, np.int64)
        case 2:
            return np.array(values, np.int32)
        case 3:
            return tuple(values)
        case 4:
            return np.array(values, np.uint16 if max(values, default=0) < 1 << 16 else np.uint64)
        case 5:
            return [np.int32(v) for v in values]
        case 6:
            return array.array("l", values)
        case 7:
            return np.array([values, values], np.int64).T[:, 0]
    return list(values)


def integer(value: int, index: int) -> Any:
    """Return an integer in one of the kinds that mpi4py takes."""
    return [int, np.int32, np.int64, np.array][index % 4](value)

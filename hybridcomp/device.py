"""Define the memory and kernels of a device, apart from the library that provides them.

A :class:`Runtime` launches kernels and copies memory: CuPy's on a GPU (:mod:`hybridcomp.cuda`), or in tests the
emulation's, which runs the same kernels on the CPU. A :class:`DeviceArray` is typed memory of a device without any
arithmetic: codecs hand its address to kernels. A :class:`Queue` is a stream of a runtime with what one encode or
decode needs on it. Nothing here waits for the device unless its description says so.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Hashable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

ALIGNMENT = 16  # bytes to which messages are aligned, for the widest loads


class Event(Protocol):
    """Point of a stream's work."""

    def done(self) -> bool:
        """Tell whether the device has reached the point; does not wait."""

    def wait(self) -> None:
        """Wait until the device has reached the point."""


class Runtime(abc.ABC):
    """Device: kernels, memory, streams. A stream is an integer, as CUDA's handles are; 0 is the default one.

    Attributes:
        name: name of the device, for people.
        multiprocessors: number of multiprocessors; grids that fill the device have a multiple of it in blocks.
        ordinal: the device's number.
    """

    name: str
    multiprocessors: int
    ordinal: int

    @abc.abstractmethod
    def launch(
        self, module: str, kernel: str, blocks: int, threads: int, args: list[int], shared: int, stream: int
    ) -> None:
        """Start a kernel of a module of :file:`kernels/cuda/modules.txt`. ``args`` are addresses and integers."""

    @abc.abstractmethod
    def prepare(self, module: str) -> None:
        """Compile or load a module, so that no later launch has to."""

    @abc.abstractmethod
    def allocate(self, nbytes: int, stream: int) -> tuple[int, object]:
        """Allocate memory in a stream's order: return its address (a multiple of 256), and the object that frees it."""

    @abc.abstractmethod
    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Start to copy between any two addresses, of the device or of pinned host memory."""

    @abc.abstractmethod
    def fill(self, to: int, byte: int, nbytes: int, stream: int) -> None:
        """Start to set bytes."""

    @abc.abstractmethod
    def matmul(
        self, a: int, b: int, out: int, rows: int, inner: int, cols: int, transposed: bool, stream: int
    ) -> None:
        """Start a product of float32 matrices in C order, with float32 inside and in any order of its sums.

        Args:
            a: address of a (rows, inner) matrix; if ``transposed``, of an (inner, rows) one whose transpose is meant.
            b: address of an (inner, cols) matrix.
            out: address of a (rows, cols) matrix, which is written.
        """

    @abc.abstractmethod
    def synchronize(self, stream: int) -> None:
        """Wait until all work of a stream is done."""

    @abc.abstractmethod
    def record(self, stream: int) -> Event:
        """Return an event after the work that the stream has now."""

    @abc.abstractmethod
    def follow(self, stream: int, event: Event) -> None:
        """Order all later work of a stream after an event. The host does not wait."""

    @abc.abstractmethod
    def new_stream(self) -> tuple[int, object]:
        """Make a stream: return it, and an object that destroys it when that object is freed."""

    @abc.abstractmethod
    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Allocate host memory that the device can copy to and from by itself."""

    @abc.abstractmethod
    def current_stream(self, owner: Any) -> int:
        """Return the stream that the caller's library (``owner``'s: CuPy, torch) is using now, in this thread."""

    @abc.abstractmethod
    def new_array(self, n: int, dtype: Any, like: Any) -> Any:
        """Return a new array of a :class:`hybridcomp.arrays.DType` from the library of ``like``, for a caller
        to keep.
        """


class DeviceArray:
    """One-dimensional contiguous memory of a device.

    Attributes:
        runtime: device that has the memory.
        ptr: address of the first element.
        size: elements.
        dtype: NumPy dtype of an element as stored (uint16 for bfloat16).
        owner: object that keeps the memory alive.
    """

    __slots__ = ("dtype", "owner", "ptr", "runtime", "size")

    def __init__(self, runtime: Runtime, ptr: int, size: int, dtype: npt.DTypeLike, owner: object) -> None:
        self.runtime = runtime
        self.ptr = ptr
        self.size = size
        self.dtype = np.dtype(dtype)
        self.owner = owner

    @property
    def nbytes(self) -> int:
        """Return the bytes of all elements."""
        return self.size * self.dtype.itemsize

    @property
    def shape(self) -> tuple[int]:
        """Return the shape, as NumPy does."""
        return (self.size,)

    def __getitem__(self, span: slice) -> DeviceArray:
        start, stop, step = span.indices(self.size)
        if step != 1:
            raise ValueError("a slice of device memory must be contiguous")
        at = self.ptr + start * self.dtype.itemsize
        return DeviceArray(self.runtime, at, max(0, stop - start), self.dtype, self.owner)

    def view(self, dtype: npt.DTypeLike) -> DeviceArray:
        """Return the same bytes as elements of another type."""
        kind = np.dtype(dtype)
        if self.nbytes % kind.itemsize:
            raise ValueError(f"{self.nbytes} bytes are not a whole number of {kind}")
        return DeviceArray(self.runtime, self.ptr, self.nbytes // kind.itemsize, kind, self.owner)


Argument = int | DeviceArray | None


class Queue:
    """Work on one stream of a device.

    Attributes:
        runtime: the device.
        stream: stream that orders all work of the queue.
    """

    def __init__(self, runtime: Runtime, stream: int) -> None:
        self.runtime = runtime
        self.stream = stream
        self._status: DeviceArray | None = None

    @property
    def order(self) -> Hashable:
        """Return a key that queues share whose work follows one another."""
        return self.stream

    def fork(self, kind: str) -> Queue:
        """Return a queue whose work follows this one's up to now; this one's later work follows it.

        Args:
            kind: kind of the fork; forks of one kind need not follow each other, those of another kind do.
        """
        return self

    def after(self, other: Queue) -> None:
        """Have later work of this queue follow what another one of the same stream has now."""

    def start(self) -> None:
        """Start the work that has been put on the queue, where it is only recorded."""

    @property
    def status(self) -> DeviceArray:
        """Return one uint32: 0, or the Status of the first fault that a kernel of this queue found."""
        if self._status is None:
            self._status = self.zeros(4).view(np.uint32)
        return self._status

    def launch(
        self,
        module: str,
        kernel: str,
        blocks: int,
        threads: int,
        *args: Argument,
        shared: int = 0,
        held: object = None,
    ) -> None:
        """Start a kernel.

        Args:
            module: name in :file:`kernels/cuda/modules.txt`.
            kernel: name of the kernel.
            blocks: blocks of the grid; 0 starts nothing.
            threads: threads of a block; a multiple of 32.
            args: integers as they are, arrays by their addresses, None as a null pointer.
            shared: bytes of dynamic shared memory.
            held: arrays that the kernel finds by addresses in the device's memory, which live until it is started.
        """
        if blocks:
            values = [0 if a is None else a.ptr if isinstance(a, DeviceArray) else int(a) for a in args]
            self.runtime.launch(module, kernel, blocks, threads, values, shared, self.stream)

    def blocks(self, items: int, per_block: int, waves: int = 8) -> int:
        """Return the blocks of a grid whose threads stride over ``items``: at most ``waves`` per multiprocessor."""
        return min(-(-items // per_block), self.runtime.multiprocessors * waves)

    def empty(self, nbytes: int) -> DeviceArray:
        """Allocate uninitialised bytes to work in, at an address divisible by 256."""
        ptr, owner = self.runtime.allocate(max(nbytes, 1), self.stream)
        return DeviceArray(self.runtime, ptr, nbytes, np.uint8, owner)

    def array(self, n: int, dtype: npt.DTypeLike) -> DeviceArray:
        """Allocate ``n`` elements to work in."""
        kind = np.dtype(dtype)
        return self.empty(n * kind.itemsize).view(kind)

    def zeros(self, nbytes: int) -> DeviceArray:
        """Allocate bytes to work in, all zero."""
        array = self.empty(nbytes)
        self.fill(array)
        return array

    def fill(self, array: DeviceArray, byte: int = 0) -> None:
        """Start to set all bytes of an array."""
        self.runtime.fill(array.ptr, byte, array.nbytes, self.stream)

    def zero_words(self, n: int) -> DeviceArray:
        """Return new words of 4 bytes, all zero."""
        return self.zeros(4 * n).view(np.uint32)

    def shown(self, nbytes: int) -> DeviceArray:
        """Allocate bytes that kernels write for the host to read, beside others of the kind where these are many."""
        return self.empty(nbytes)

    def counters(self) -> DeviceArray:
        """Return two words for the blocks of a kernel to share: zero before each launch, and after it."""
        key = (id(self.runtime), self.stream)
        found = _counters.get(key)
        if found is None:
            found = _counters[key] = self.zero_words(2)
        return found

    def uploaded(self, source: npt.NDArray[np.uint8]) -> DeviceArray:
        """Return pinned bytes in the device's memory, to which they are being copied."""
        array = self.empty(source.size)
        self.upload(array, source)
        return array

    def upload(self, to: DeviceArray, source: npt.NDArray[np.uint8]) -> None:
        """Start to copy pinned bytes to the beginning of ``to``; they must stay as they are until that is done."""
        if source.size:
            self.runtime.copy(to.ptr, source.ctypes.data, source.size, self.stream)

    def copy(self, to: DeviceArray, source: DeviceArray) -> None:
        """Start to copy all bytes of ``source`` to the beginning of ``to``."""
        if source.nbytes:
            self.runtime.copy(to.ptr, source.ptr, source.nbytes, self.stream)

    def matmul(
        self,
        a: DeviceArray,
        b: DeviceArray,
        out: DeviceArray,
        shape: tuple[int, int, int],
        *,
        transposed: bool = False,
    ) -> None:
        """Start a product of float32 matrices; ``shape`` is (rows, inner, cols): see :meth:`Runtime.matmul`."""
        self.runtime.matmul(a.ptr, b.ptr, out.ptr, *shape, transposed, self.stream)

    def read(self, source: DeviceArray) -> npt.NDArray[Any]:
        """Return the elements of ``source`` in host memory; waits for the stream."""
        if not source.nbytes:
            return np.empty(0, source.dtype)
        staged = _pinned(self.runtime, source.nbytes)
        self.runtime.copy(staged.ctypes.data, source.ptr, source.nbytes, self.stream)
        self.runtime.synchronize(self.stream)
        return staged.copy().view(source.dtype)

    def write(self, to: DeviceArray, values: npt.NDArray[Any]) -> None:
        """Copy host elements to the beginning of ``to``. Waits for the stream: the staging buffer is used again."""
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        if data.size:
            staged = _pinned(self.runtime, data.size)
            staged[:] = data
            self.runtime.copy(to.ptr, staged.ctypes.data, data.size, self.stream)
            self.runtime.synchronize(self.stream)


_counters: dict[tuple[int, int], DeviceArray] = {}
_local = threading.local()


def _pinned(runtime: Runtime, nbytes: int) -> npt.NDArray[np.uint8]:
    """Return a staging buffer of this thread."""
    buffers = _local.__dict__.setdefault("pinned", {})
    buffer = buffers.get(id(runtime))
    if buffer is None or buffer.size < nbytes:
        buffer = buffers[id(runtime)] = runtime.pinned(1 << max(12, (nbytes - 1).bit_length()))
    part: npt.NDArray[np.uint8] = buffer[:nbytes]
    return part

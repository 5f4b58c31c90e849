"""A device that is the CPU: the package's own code launches the real kernels, which the emulation runs.

Streams are lazy: what is put on one runs when somebody waits for it, or asks an event whether it is done. So code
that forgets to wait reads memory that nothing was written to yet.
"""

from __future__ import annotations

import bisect
import copy
import functools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridcomp import cuda
from hybridcomp.arrays import DType, as_dtype
from hybridcomp.device import Event, Runtime
from tests.emulation.emulator import Emulator

_PATTERN = 0xC5  # in memory that nothing was written to
_turn = threading.RLock()


class _Stream:
    """Queue of work that waits to be run."""

    def __init__(self) -> None:
        self.work: deque[Callable[[], None]] = deque()
        self.put = 0
        self.run = 0

    def add(self, step: Callable[[], None]) -> None:
        self.work.append(step)
        self.put += 1

    def until(self, number: int) -> None:
        """Run all work up to the ``number``-th ever put here."""
        with _turn:  # two threads that wait would else run two steps at once
            while self.run < number:
                self.run += 1
                self.work.popleft()()


class EmulatedEvent:
    """A point of a stream."""

    def __init__(self, stream: _Stream) -> None:
        self.stream, self.number, self.looks = stream, stream.put, 0

    def done(self) -> bool:
        """Return False at the first look, as a busy device would."""
        self.looks += 1
        if self.looks > 1:
            self.wait()
        return self.stream.run >= self.number

    def wait(self) -> None:
        self.stream.until(self.number)


class EmulatedRuntime(Runtime):
    """The emulation as a device."""

    def __init__(self, flavour: str, multiprocessors: int = 2) -> None:
        self.name = f"emulation ({flavour})"
        self.multiprocessors = multiprocessors
        self.ordinal = 0
        self.emulator = Emulator(flavour)
        self.launches: list[str] = []
        self.pinned_memory: list[tuple[int, int]] = []  # address and bytes, by address
        self._streams: dict[int, _Stream] = {0: _Stream()}

    def launch(
        self, module: str, kernel: str, blocks: int, threads: int, args: list[int], shared: int, stream: int
    ) -> None:
        self.launches.append(kernel)
        self._put(stream, lambda: self.emulator.launch(module, kernel, blocks, threads, args, shared))

    def prepare(self, module: str) -> None:
        cuda.modules()[module]  # there is one; it is built when it is first launched

    def allocate(self, nbytes: int, stream: int) -> tuple[int, object]:
        memory = _Memory(self, nbytes, stream)
        return memory.ptr, memory

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        def run() -> None:
            self.emulator.view(to, nbytes)[:] = self.emulator.view(source, nbytes)

        self._put(stream, run)

    def fill(self, to: int, byte: int, nbytes: int, stream: int) -> None:
        def run() -> None:
            self.emulator.view(to, nbytes)[:] = byte

        self._put(stream, run)

    def matmul(
        self, a: int, b: int, out: int, rows: int, inner: int, cols: int, transposed: bool, stream: int
    ) -> None:
        def run() -> None:
            left = self._matrix(a, inner, rows).T if transposed else self._matrix(a, rows, inner)
            with np.errstate(invalid="ignore", over="ignore"):
                self._matrix(out, rows, cols)[...] = left @ self._matrix(b, inner, cols)

        self._put(stream, run)

    def _matrix(self, ptr: int, rows: int, cols: int) -> npt.NDArray[np.float32]:
        return self.emulator.view(ptr, rows * cols * 4).view(np.float32).reshape(rows, cols)

    def synchronize(self, stream: int) -> None:
        self._streams[stream].until(self._streams[stream].put)

    def record(self, stream: int) -> Event:
        return EmulatedEvent(self._streams[stream])

    def follow(self, stream: int, event: Event) -> None:
        self._put(stream, event.wait)

    def new_stream(self) -> tuple[int, object]:
        number = max(self._streams) + 1
        self._streams[number] = _Stream()
        return number, object()

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        view = self.emulator.view(self.emulator.alloc(nbytes), nbytes)  # for good: tests are short
        bisect.insort(self.pinned_memory, (view.ctypes.data, nbytes))
        view[:] = _PATTERN
        return view

    def current_stream(self, owner: Any) -> int:
        return 0

    def new_array(self, n: int, dtype: Any, like: Any) -> EmulatedArray:
        return self.array(np.full(n * dtype.itemsize, _PATTERN, np.uint8).view(dtype.storage), dtype)

    def array(
        self, values: npt.NDArray[Any], dtype: DType | None = None, *, offset: int = 0
    ) -> EmulatedArray:
        """Return a device array with these values, in memory of its own; ``offset`` bytes off an aligned address."""
        kind = dtype or as_dtype(values.dtype)
        memory = _Memory(self, values.nbytes + offset, 0)
        view = self.emulator.view(memory.ptr, values.nbytes + offset)[offset:]
        view[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        return EmulatedArray(self, view.view(kind.storage).reshape(values.shape), kind, memory)

    def _put(self, stream: int, step: Callable[[], None]) -> None:
        self._streams[stream].add(step)


class _Memory:
    """Memory that a device array keeps alive, freed in its stream's order: work put there before may still use it."""

    def __init__(self, runtime: EmulatedRuntime, nbytes: int, stream: int) -> None:
        self.ptr = runtime.emulator.alloc(max(nbytes, 1))
        runtime.emulator.view(self.ptr, max(nbytes, 1))[:] = _PATTERN
        free = functools.partial(runtime.emulator.free, self.ptr)
        weakref.finalize(self, runtime._put, stream, free).atexit = False


class EmulatedArray:
    """Stand-in for CuPy's array."""

    def __init__(self, runtime: EmulatedRuntime, view: npt.NDArray[Any], dtype: DType, owner: object) -> None:
        self.__hybridcomp_runtime__ = self._runtime = runtime
        self._view, self._dtype, self._owner = view, dtype, owner
        self.dtype = dtype.label

    @property
    def shape(self) -> tuple[int, ...]:
        return self._view.shape

    @property
    def size(self) -> int:
        return self._view.size

    @property
    def flags(self) -> Any:
        return self._view.flags

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self._view.__array_interface__, "version": 3}

    def copy(self, order: str = "C") -> EmulatedArray:
        self._runtime.synchronize(0)
        return self._runtime.array(np.ascontiguousarray(self._view), self._dtype)

    def __getitem__(self, key: Any) -> EmulatedArray:
        part = copy.copy(self)
        part._view = self._view[key]
        return part

    def get(self) -> npt.NDArray[Any]:
        """Return a copy in host memory, after all work of the default stream."""
        self._runtime.synchronize(0)
        return self._view.copy()


@functools.cache
def emulated() -> EmulatedRuntime:
    """Return the tests' device, of the flavour that HC_EMULATION_FLAVOUR names (``race``)."""
    return EmulatedRuntime(os.environ.get("HC_EMULATION_FLAVOUR", "race"))

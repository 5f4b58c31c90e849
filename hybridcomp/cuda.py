"""Run kernels on a GPU through CuPy: a :class:`~hybridcomp.device.Runtime` for those of :file:`kernels/cuda`.

A module of kernels comes from the fatbin that CMake built, if there is one, or is compiled by NVRTC when it is first
needed and kept on disk. :func:`prepare_in_turn` lets one process of each host compile and the others
load.
Importing this module imports no CuPy.
"""

from __future__ import annotations

import fcntl
import functools
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridcomp import nvrtc
from hybridcomp.device import Event, Runtime
from hybridcomp.errors import CudaUnavailableError

MIN_CAPABILITY = (7, 5)
MIN_CUPY = (13, 4)
_USUAL_SHARED = 48 * 1024  # bytes of shared memory that a kernel may use without asking
_ONE_AND_ZERO = np.array([1, 0], np.float32)
# Keep sums and products as written, and subnormal numbers, so that results have the CPU's bits.
OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false")
# Parts of the two standard headers that the kernels include and NVRTC lacks.
_STANDARD = {
    "cstdint": "namespace std { typedef signed char int8_t; typedef short int16_t; typedef int int32_t; "
    "typedef long long int64_t; typedef unsigned char uint8_t; typedef unsigned short uint16_t; "
    "typedef unsigned int uint32_t; typedef unsigned long long uint64_t; typedef unsigned long long uintptr_t; }\n"
    "#define INT32_MIN (-2147483647 - 1)\n",
    "cstddef": "namespace std { typedef decltype(sizeof(0)) size_t; }\n",
}
_INCLUDE = re.compile(r'^\s*#\s*include\s+(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)


def available() -> bool:
    """Tell whether there is a GPU that the kernels run on, and CuPy."""
    try:
        runtime_of(0)
    except CudaUnavailableError:
        return False
    return True


# -- sources ---------------------------------------------------------------------------------------------------


@functools.cache
def kernel_folder() -> Path:
    """Return the folder of the kernels' sources: beside the package's files, or in the source tree around them.

    Raises:
        CudaUnavailableError: this installation has no such folder.
    """
    package = Path(__file__).parent
    for folder in (package / "kernels", package.parent / "kernels"):
        if (folder / "cuda" / "modules.txt").is_file():
            return folder
    raise CudaUnavailableError(
        f"the CUDA kernels' sources are missing: no kernels/cuda in or beside {package}"
    )


@functools.cache
def modules() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return the modules of kernels by name: source file and options."""
    found = {}
    for line in (kernel_folder() / "cuda" / "modules.txt").read_text().splitlines():
        words = line.partition("#")[0].split()
        if words:
            found[words[0]] = (words[1], tuple(words[2:]))
    return found


def source_of(module: str) -> str:
    """Return a module's source with all its includes pasted in: one text, which is also the cache's key."""
    folder, done = kernel_folder(), set[str]()

    def paste(name: str) -> str:
        for candidate in (
            folder / "cuda" / name,
            folder / "include" / name,
            folder / "include" / "hybridcomp" / name,
        ):
            if candidate.is_file():
                break
        else:
            raise CudaUnavailableError(
                f"kernels/cuda includes {name!r}, which is in neither folder of kernels"
            )
        if str(candidate) in done:
            return ""
        done.add(str(candidate))
        text = candidate.read_text().replace("#pragma once", "")
        return _INCLUDE.sub(include, text)

    def include(match: re.Match[str]) -> str:
        own, standard = match.groups()
        if own is not None:
            return paste(own)
        if standard in done:
            return ""
        done.add(standard)
        return _STANDARD[standard]

    return paste(modules()[module][0])


# -- CuPy ------------------------------------------------------------------------------------------------------


@functools.cache
def _cupy() -> Any:
    """Return the CuPy module; raise a CudaUnavailableError that names what is missing."""
    try:
        import cupy  # noqa: PLC0415  (only who has device arrays pays for it)
    except ImportError as error:
        raise CudaUnavailableError(
            f"CuPy is not installed ({error}); pip install cupy-cuda12x or cupy-cuda13x"
        ) from error
    found = tuple(int(part) for part in re.findall(r"\d+", cupy.__version__)[:2])
    if found < MIN_CUPY:
        raise CudaUnavailableError(
            f"CuPy {cupy.__version__} is too old; at least {'.'.join(map(str, MIN_CUPY))}"
        )
    return cupy


@functools.cache
def runtime_of(ordinal: int) -> CupyRuntime:
    """Return the GPU of a number (as CUDA_VISIBLE_DEVICES leaves them).

    Raises:
        CudaUnavailableError: no CuPy, no driver, no such device, or one that is too old.
    """
    cupy = _cupy()
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise CudaUnavailableError(f"the CUDA driver is missing or finds no device: {error}") from error
    if not 0 <= ordinal < count:
        raise CudaUnavailableError(f"there is no CUDA device {ordinal}; this machine has {count}")
    properties = cupy.cuda.runtime.getDeviceProperties(ordinal)
    capability = (int(properties["major"]), int(properties["minor"]))
    if capability < MIN_CAPABILITY:
        raise CudaUnavailableError(
            f"CUDA device {ordinal} has compute capability {capability[0]}.{capability[1]}; "
            f"the kernels need {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} (Turing, 2018) or newer"
        )
    return CupyRuntime(
        cupy, ordinal, properties["name"].decode(), int(properties["multiProcessorCount"]), capability
    )


class _CupyEvent:
    """CuPy event on its device."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.done)

    def wait(self) -> None:
        self.event.synchronize()


class _Handle:
    """Stream in the form of CUDA's protocol for Python."""

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream


class CupyRuntime(Runtime):
    """GPU, through CuPy."""

    def __init__(
        self, cupy: Any, ordinal: int, name: str, multiprocessors: int, capability: tuple[int, int]
    ) -> None:
        self._cupy = cupy
        self._capability = 10 * capability[0] + capability[1]
        self.ordinal = ordinal
        self.name = name
        self.multiprocessors = multiprocessors
        self._device = cupy.cuda.Device(ordinal)
        self._kernels: dict[tuple[str, str], Any] = {}
        self._modules: dict[str, Any] = {}
        self._streams: dict[int, Any] = {}
        self._lock = threading.Lock()

    def launch(
        self, module: str, kernel: str, blocks: int, threads: int, args: list[int], shared: int, stream: int
    ) -> None:
        # A kernel takes from each value as many bytes as its parameter has: the low ones come first.
        values = tuple([np.uint64(a & 0xFFFFFFFFFFFFFFFF) for a in args])
        with self._device, self._stream(stream):
            function = self._kernels.get((module, kernel)) or self._find(module, kernel)
            if shared > _USUAL_SHARED:
                function.max_dynamic_shared_size_bytes = shared
            function((blocks,), (threads,), values, shared_mem=shared)

    def prepare(self, module: str) -> None:
        with self._device:
            self._load(module).compile()

    def _find(self, module: str, kernel: str) -> Any:
        function = self._load(module).get_function(kernel)
        self._kernels[module, kernel] = function
        return function

    def _load(self, module: str) -> Any:
        with self._lock:
            if module not in self._modules:
                path = kernel_folder() / "fatbin" / f"{module}.fatbin"
                if not path.is_file():
                    options = OPTIONS + modules()[module][1]
                    library = self._cupy.cuda.nvrtc
                    path = nvrtc.compiled(library, module, source_of(module), options, self._capability)
                self._modules[module] = self._cupy.RawModule(path=str(path))
            return self._modules[module]

    def _stream(self, stream: int) -> Any:
        """Return a CuPy object for a stream, which does not own it."""
        found = self._streams.get(stream)
        if found is None:
            kind = self._cupy.cuda.Stream
            if stream == 0:
                found = kind.null
            elif hasattr(kind, "from_external"):  # CuPy 14
                found = kind.from_external(_Handle(stream))
            else:
                found = self._cupy.cuda.ExternalStream(stream)
            self._streams[stream] = found
        return found

    def allocate(self, nbytes: int, stream: int) -> tuple[int, object]:
        with self._device, self._stream(stream):
            memory = self._cupy.cuda.alloc(nbytes)
        return int(memory.ptr), memory

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        runtime = self._cupy.cuda.runtime
        with self._device:
            runtime.memcpyAsync(to, source, nbytes, runtime.memcpyDefault, stream)

    def fill(self, to: int, byte: int, nbytes: int, stream: int) -> None:
        with self._device:
            self._cupy.cuda.runtime.memsetAsync(to, byte, nbytes, stream)

    def matmul(
        self, a: int, b: int, out: int, rows: int, inner: int, cols: int, transposed: bool, stream: int
    ) -> None:
        if rows == 0 or cols == 0:
            return
        try:
            blas = self._cupy.cuda.cublas
        except ImportError as error:  # CuPy loads cuBLAS when it is first asked for
            raise CudaUnavailableError(f"cuBLAS, which multiplies matrices, is missing: {error}") from error
        one, zero = _ONE_AND_ZERO[:1].ctypes.data, _ONE_AND_ZERO[1:].ctypes.data
        with self._device, self._stream(stream):
            handle = self._cupy.cuda.device.get_cublas_handle()
            mode = blas.getMathMode(handle)
            blas.setMathMode(
                handle, blas.CUBLAS_DEFAULT_MATH
            )  # no TF32, whatever setting the user's own products have
            try:
                # cuBLAS has matrices in Fortran's order, where ours are transposed: b^T a^T is the result's transpose.
                op_a = blas.CUBLAS_OP_T if transposed else blas.CUBLAS_OP_N
                line_a = rows if transposed else inner
                blas.sgemm(
                    *(handle, blas.CUBLAS_OP_N, op_a, cols, rows, inner),
                    *(one, b, cols, a, line_a, zero, out, cols),
                )
            finally:
                blas.setMathMode(handle, mode)

    def synchronize(self, stream: int) -> None:
        with self._device:
            self._cupy.cuda.runtime.streamSynchronize(stream)

    def record(self, stream: int) -> Event:
        with self._device:
            event = self._cupy.cuda.Event(disable_timing=True)
            event.record(self._stream(stream))
        return _CupyEvent(event)

    def follow(self, stream: int, event: Event) -> None:
        assert isinstance(event, _CupyEvent)
        with self._device:
            self._stream(stream).wait_event(event.event)

    def new_stream(self) -> tuple[int, object]:
        with self._device:
            stream = self._cupy.cuda.Stream(non_blocking=True)
        return int(stream.ptr), stream

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        with self._device:
            memory = self._cupy.cuda.alloc_pinned_memory(nbytes)
        return np.frombuffer(memory, np.uint8, nbytes)

    def current_stream(self, owner: Any) -> int:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(owner, torch.Tensor):
            return int(torch.cuda.current_stream(self.ordinal).cuda_stream)
        with self._device:
            return int(self._cupy.cuda.get_current_stream().ptr)

    def new_array(self, n: int, dtype: Any, like: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(like, torch.Tensor):
            return torch.empty(n, dtype=getattr(torch, dtype.label), device=like.device)
        with self._device:
            return self._cupy.empty(n, dtype.storage)


_prepared: set[tuple[int, str]] = set()


def prepare_in_turn(names: Iterable[str], runtime: Runtime) -> None:
    """Load modules, compiling them once on each host: one process does, and the others wait and load its files.

    They take turns by a lock in the host's file system, not by a collective: operations of two ranks among many come
    here too, and not all ranks compress the same message first.

    Args:
        names: names of the modules.
        runtime: this process's device.
    """
    missing = [name for name in names if (id(runtime), name) not in _prepared]
    if not missing:
        return
    path = Path(tempfile.gettempdir()) / f"hybridcomp-kernels-{os.getuid()}.lock"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        for name in missing:
            runtime.prepare(name)
            _prepared.add((id(runtime), name))
    finally:
        os.close(handle)

"""Stand-in for CuPy: as much as the package uses, with its names and signatures, over the emulation."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from hybridcomp import cuda
from tests.emulation.runtime import EmulatedArray, EmulatedEvent, EmulatedRuntime


class NVRTC:
    """Stand-in for the compiler, whose machine code is what it was given."""

    class NVRTCError(RuntimeError):
        """Error of the compiler."""

    def __init__(self) -> None:
        self.compiled: list[str] = []  # names of programs

    def getVersion(self) -> tuple[int, int]:
        return 13, 0

    def getSupportedArchs(self) -> tuple[int, ...]:
        return 75, 80, 90

    def createProgram(self, src: str, name: str, headers: object, include_names: object) -> dict[str, Any]:
        assert not headers
        assert not include_names
        return {"source": src, "name": name}

    def compileProgram(self, program: dict[str, Any], options: tuple[str, ...]) -> None:
        if "#error" in program["source"]:
            raise self.NVRTCError("NVRTC_ERROR_COMPILATION (6)")
        assert "#include" not in program["source"]
        self.compiled.append(program["name"])
        program["options"] = options

    def getProgramLog(self, program: dict[str, Any]) -> str:
        return f"{program['name']}(1): error"

    def getCUBIN(self, program: dict[str, Any]) -> bytes:
        return json.dumps(program).encode()

    def getPTX(self, program: dict[str, Any]) -> str:
        return json.dumps(program)

    def destroyProgram(self, program: dict[str, Any]) -> None:
        program.clear()


class CUDARuntimeError(RuntimeError):
    """CuPy's error of CUDA's runtime."""


def make(device: EmulatedRuntime, *, version: str = "14.2.0", capability: tuple[int, int] = (9, 0)) -> Any:
    """Return a module named cupy with one device."""
    entered: list[str] = []  # current devices and streams

    class Context:
        def __enter__(self) -> Any:
            entered.append(repr(self))
            return self

        def __exit__(self, *exc: object) -> None:
            assert entered.pop() == repr(self)

    class Device(Context):
        def __init__(self, ordinal: int) -> None:
            self.id = ordinal

        def __repr__(self) -> str:
            return f"device {self.id}"

    class Stream(Context):
        null: Stream

        def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
            self.ptr = 0 if null else device.new_stream()[0]

        @classmethod
        def from_external(cls, obj: Any) -> Stream:
            version, ptr = obj.__cuda_stream__()
            assert version == 0
            made = cls(null=True)
            made.ptr = ptr
            return made

        def wait_event(self, event: Event) -> None:
            device.follow(self.ptr, event.inner)

        def __repr__(self) -> str:
            return f"stream {self.ptr}"

    Stream.null = Stream(null=True)

    class Event:
        inner: EmulatedEvent

        def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
            pass

        def record(self, stream: Stream) -> None:
            self.inner = device.record(stream.ptr)  # type: ignore[assignment]

        @property
        def done(self) -> bool:
            return self.inner.done()

        def synchronize(self) -> None:
            self.inner.wait()

    def current() -> int:
        streams = [name for name in entered if name.startswith("stream")]
        return int(streams[-1].split()[1]) if streams else 0

    class RawKernel:
        max_dynamic_shared_size_bytes = 48 << 10

        def __init__(self, module: str, name: str) -> None:
            self.module, self.name = module, name

        def __call__(
            self, grid: tuple[int], block: tuple[int], args: tuple[Any, ...], *, shared_mem: int = 0
        ) -> None:
            assert "device 0" in entered
            assert shared_mem <= self.max_dynamic_shared_size_bytes
            assert all(type(a) is np.uint64 for a in args)
            device.launch(
                self.module, self.name, *grid, *block, [int(a) for a in args], shared_mem, current()
            )

    class RawModule:
        def __init__(self, *, path: str) -> None:
            code = json.loads(Path(path).read_text(encoding="utf-8"))
            same = [
                name
                for name, (_, own) in cuda.modules().items()
                if cuda.source_of(name) == code["source"]
                and [*cuda.OPTIONS, *own, f"--gpu-architecture=sm_{10 * capability[0] + capability[1]}"]
                == code["options"]
            ]
            (self.module,) = same

        def compile(self) -> None:
            pass

        def get_function(self, name: str) -> RawKernel:
            return RawKernel(self.module, name)

    def alloc(nbytes: int) -> Any:
        ptr, owner = device.allocate(nbytes, current())
        return SimpleNamespace(ptr=ptr, owner=owner)

    def empty(n: int, dtype: Any) -> EmulatedArray:
        made = device.array(np.empty(n, dtype))
        del made.__hybridcomp_runtime__  # CuPy's arrays have none
        made.device = SimpleNamespace(id=0)
        return made

    math_modes = [99]  # modes of cuBLAS, the user's own first

    def set_math_mode(handle: int, mode: int) -> None:
        math_modes.append(mode)

    def sgemm(
        handle: int,
        transa: int,
        transb: int,
        m: int,
        n: int,
        k: int,
        alpha: int,
        a: int,
        lda: int,
        b: int,
        ldb: int,
        beta: int,
        c: int,
        ldc: int,
    ) -> None:
        """Compute C (m x n) = op(A) op(B) in Fortran's order."""
        assert math_modes[-1] == 0
        assert "device 0" in entered
        assert (ctypes.c_float.from_address(alpha).value, ctypes.c_float.from_address(beta).value) == (1, 0)

        def matrix(ptr: int, lines: int, columns: int, stride: int) -> np.ndarray:
            assert stride >= lines
            return (
                device.emulator.view(ptr, 4 * stride * columns)
                .view(np.float32)
                .reshape(columns, stride)
                .T[:lines]
            )

        def run() -> None:
            left = matrix(a, k, m, lda).T if transa else matrix(a, m, k, lda)
            right = matrix(b, n, k, ldb).T if transb else matrix(b, k, n, ldb)
            matrix(c, m, n, ldc)[...] = left @ right

        device._put(current(), run)

    cublas = SimpleNamespace(
        CUBLAS_OP_N=0,
        CUBLAS_OP_T=1,
        CUBLAS_DEFAULT_MATH=0,
        getMathMode=lambda handle: math_modes[-1],
        setMathMode=set_math_mode,
        sgemm=sgemm,
    )
    runtime = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        getDeviceCount=lambda: 1,
        getDeviceProperties=lambda ordinal: {
            "name": b"fake",
            "major": capability[0],
            "minor": capability[1],
            "multiProcessorCount": 2,
        },
        memcpyDefault=4,
        memcpyAsync=lambda dst, src, size, kind, stream: device.copy(dst, src, size, stream),
        memsetAsync=device.fill,
        streamSynchronize=device.synchronize,
    )
    names = SimpleNamespace(
        nvrtc=NVRTC(),
        runtime=runtime,
        Device=Device,
        Stream=Stream,
        Event=Event,
        alloc=alloc,
        cublas=cublas,
        device=SimpleNamespace(get_cublas_handle=lambda: 1),
        alloc_pinned_memory=lambda nbytes: memoryview(device.pinned(nbytes)),
        get_current_stream=lambda: SimpleNamespace(ptr=current()),
    )
    return SimpleNamespace(__version__=version, cuda=names, RawModule=RawModule, empty=empty)

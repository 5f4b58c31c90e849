"""Build the CUDA kernels for the CPU, run them there, and raise what they do wrong.

>>> emulator = Emulator("race")
>>> src, dst = emulator.alloc(4096), emulator.alloc(4096)
>>> emulator.view(src, 4096)[:] = 7
>>> emulator.launch("module", "copy_words", grid=4, block=256, args=[src, dst, 1024])

``race`` finds races, accesses out of bounds and reads of shared memory that nobody wrote, and runs in any process;
``checked`` has AddressSanitizer and UndefinedBehaviorSanitizer, and needs a process that was started with
:func:`checked_environment`. Both find divergent barriers and warp collectives. ``HC_EMULATION_SEED`` (0: ascending,
1: descending, else random) chooses the order of blocks and threads, ``HC_EMULATION_CHECKS=0`` makes ``race`` fast.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

FLAVOURS = ("race", "checked")
_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[1]
_LISTS = (_ROOT / "kernels" / "cuda" / "modules.txt", _HERE / "modules.txt")
_BUILD = _ROOT / "build" / "emulation"
_loaded: list[str] = []  # flavours: two runtimes of one name must not meet in a process
_lock = threading.RLock()  # the runtime knows one launch, and one list of buffers


class EmulationError(RuntimeError):
    """A kernel did what it must not do, or could not be built or launched."""


class Emulator:
    """The kernels of one flavour, built and loaded when they are first launched."""

    def __init__(self, flavour: str = "race", lists: Sequence[Path] = _LISTS) -> None:
        if flavour not in FLAVOURS:
            raise ValueError(f"flavour is one of {FLAVOURS}, not {flavour!r}")
        if flavour == "checked" and "asan" not in Path("/proc/self/maps").read_text():
            raise EmulationError("the checked flavour needs a process started with checked_environment()")
        if any(other != flavour for other in _loaded):
            raise EmulationError(f"this process already emulates in flavour {_loaded[0]!r}")
        _loaded.append(flavour)
        self.flavour = flavour
        self.seed = int(os.environ.get("HC_EMULATION_SEED", "0"))
        self._lists = [path for path in lists if path.exists()]
        self._folder = _BUILD / flavour
        self._modules: dict[str, ctypes.CDLL] = {}
        self._kernels: dict[tuple[str, str], tuple[ctypes.c_void_p, int]] = {}
        build(flavour, "hc_emulation", self._lists)
        self._runtime = _declared(ctypes.CDLL(str(self._folder / "libhc_emulation.so")))
        self.checks(os.environ.get("HC_EMULATION_CHECKS", "1") != "0")

    def launch(
        self, module: str, kernel: str, grid: int, block: int, args: Sequence[int], shared: int = 0
    ) -> None:
        """Run a kernel to its end.

        Args:
            module: name in modules.txt.
            kernel: name in the source.
            grid: blocks.
            block: threads of each.
            args: pointers and integers; negative ones as two's complement.
            shared: bytes of dynamic shared memory.

        Raises:
            EmulationError: the kernel is faulty. Its buffers hold what it wrote until then.
        """
        words = (ctypes.c_uint64 * max(1, len(args)))(*(int(a) & (2**64 - 1) for a in args))
        with _lock:
            function, bound = self._kernel(module, kernel)
            name = f"{module}.{kernel}".encode()
            if bound and block > bound:
                raise EmulationError(f"{module}.{kernel}: {block} threads, but it is bounded to {bound}")
            message = self._runtime.hc_launch(
                function, grid, block, shared, words, len(args), self.seed & (2**64 - 1), name
            )
        if message is not None:
            raise EmulationError(_with_places(message.decode()))

    def alloc(self, nbytes: int) -> int:
        """Allocate a global buffer of exactly so many bytes, aligned to 256, of arbitrary contents."""
        with _lock:
            pointer = self._runtime.hc_malloc(nbytes)
        if not pointer:
            raise MemoryError(f"{nbytes} bytes for a global buffer")
        return int(pointer)

    def free(self, ptr: int) -> None:
        """Give a buffer of :meth:`alloc` back."""
        with _lock:
            self._runtime.hc_free(ptr)

    def register(self, ptr: int, nbytes: int, name: str = "") -> None:
        """Let kernels access memory that someone else owns."""
        with _lock:
            self._runtime.hc_register(ptr, nbytes, name.encode())

    def unregister(self, ptr: int) -> None:
        """Forget memory of :meth:`register`."""
        with _lock:
            self._runtime.hc_unregister(ptr)

    def view(self, ptr: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return the bytes at ``ptr``; not to be used after they are freed."""
        if nbytes == 0:
            return np.empty(0, np.uint8)
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(ptr))

    def checks(self, on: bool) -> None:
        """Set whether the race flavour watches the accesses; without it is several times faster."""
        self._runtime.hc_checks(int(on))

    def limit(self, steps: int) -> None:
        """Set after how many waits, atomics and watched accesses a block is taken for one that never ends."""
        self._runtime.hc_limit(steps)

    def _kernel(self, module: str, kernel: str) -> tuple[ctypes.c_void_p, int]:
        """Return a kernel's address, and the most threads that a block of it may have."""
        if (module, kernel) in self._kernels:
            return self._kernels[module, kernel]
        if module not in self._modules:
            build(self.flavour, f"hc_{module}", self._lists)
            self._modules[module] = ctypes.CDLL(str(self._folder / f"libhc_{module}.so"))
        library = self._modules[module]
        try:
            function = ctypes.cast(getattr(library, kernel), ctypes.c_void_p)
        except AttributeError:
            raise EmulationError(f"module {module} has no kernel {kernel}") from None
        bound = int(library.hc_launch_bound(function))
        self._kernels[module, kernel] = (function, bound)
        return self._kernels[module, kernel]


def build(flavour: str, target: str = "all", lists: Sequence[Path] = _LISTS) -> None:
    """Bring a library of a flavour up to date, or all of them. Other processes that want it wait meanwhile."""
    folder = _BUILD / flavour
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock"):
        found = ";".join(str(path) for path in lists if path.exists())
        configure = [_tool("cmake"), "-S", str(_HERE), "-B", str(folder), *_generator()]
        configure += [f"-DHC_FLAVOUR={flavour}", f"-DHC_MODULE_LISTS={found}"]
        configure += [f"-DCMAKE_CXX_COMPILER={compiler()}"]
        stamp = folder / "configured"
        if not stamp.exists() or stamp.read_text() != repr(configure):
            stamp.unlink(missing_ok=True)
            (folder / "CMakeCache.txt").unlink(missing_ok=True)
            shutil.rmtree(folder / "CMakeFiles", ignore_errors=True)
            _run(configure, f"configure the emulation ({flavour})")
            stamp.write_text(repr(configure))
        command = [
            _tool("cmake"),
            "--build",
            str(folder),
            "--target",
            target,
            "--parallel",
            str(os.cpu_count()),
        ]
        _run(command, f"build {target} ({flavour})")


def checked_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment that a process must be started with to load the checked flavour."""
    result = dict(os.environ if environment is None else environment)
    # libstdc++ too: AddressSanitizer wraps its functions only if it is there from the beginning.
    version = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    asan = f"libclang_rt.asan-{os.uname().machine}.so" if "clang" in version else "libasan.so"
    libraries = [_library(name) for name in (asan, "libstdc++.so")]
    result["LD_PRELOAD"] = ":".join([*libraries, *filter(None, [result.get("LD_PRELOAD")])])
    result["ASAN_OPTIONS"] = "detect_leaks=0:detect_stack_use_after_return=0"
    result["UBSAN_OPTIONS"] = "print_stacktrace=1"
    return result


def _declared(runtime: ctypes.CDLL) -> ctypes.CDLL:
    pointer, u32, u64, text = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_char_p
    words = ctypes.POINTER(u64)
    signatures = {
        "hc_launch": (text, [pointer, u32, u32, u32, words, u32, u64, text]),
        "hc_malloc": (pointer, [u64]),
        "hc_free": (None, [pointer]),
        "hc_register": (None, [pointer, u64, text]),
        "hc_unregister": (None, [pointer]),
        "hc_checks": (None, [ctypes.c_int]),
        "hc_limit": (None, [u64]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(runtime, name)
        function.restype, function.argtypes = result, arguments
    return runtime


def _with_places(message: str) -> str:
    """Put source lines for `[library+0x1234]`."""
    return re.sub(r"\[([^][]+)\+(0x[0-9a-f]+)\]", lambda match: _place(match[1], match[2]), message)


@functools.cache
def _place(library: str, offset: str) -> str:
    plain = f"[{Path(library).name}+{offset}]"
    tool = shutil.which("addr2line")
    if tool is None:
        return plain
    lines = subprocess.run([tool, "-i", "-e", library, offset], capture_output=True, text=True, check=False)
    places = [Path(line.split(" ")[0]) for line in lines.stdout.splitlines() if not line.startswith("??")]
    # Innermost first: leave out what CUDA itself is made of here.
    outside = [place for place in places if _HERE / "cuda" not in place.parents] or places
    return f"({' < '.join(place.name for place in outside)})" if outside else plain


def _find(name: str) -> str | None:
    """Return a build tool of the running Python's environment, else of the path."""
    return shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)


def _tool(name: str) -> str:
    found = _find(name)
    if found is None:
        raise EmulationError(f"emulation of CUDA kernels needs {name}: pip install {name}")
    return found


def _generator() -> list[str]:
    ninja = _find("ninja")
    if ninja is None and shutil.which("make"):
        return ["-G", "Unix Makefiles"]
    return ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja or _tool('ninja')}"]


def compiler() -> str:
    """Return the C++ compiler that kernels are built with: g++, or what ``CXX`` names."""
    name = os.environ.get("CXX", "g++")
    found = shutil.which(name)
    if found is None:
        raise EmulationError(f"emulation of CUDA kernels needs a C++ compiler; {name} was not found")
    return found


def _library(name: str) -> str:
    found = subprocess.run(
        [compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(found).is_absolute():
        raise EmulationError(f"{compiler()} has no {name}")
    return str(Path(found).resolve())


def _run(command: list[str], what: str) -> None:
    # The command runs without the sanitizers that this process may run under.
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise EmulationError(f"could not {what}:\n{done.stdout[-6000:]}{done.stderr[-6000:]}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    # python -m tests.emulation.emulator checked command...: run the command where that flavour can be loaded.
    # python -m tests.emulation.emulator build: all modules of both flavours, on all cores.
    if sys.argv[1] == "build":
        for each in FLAVOURS:
            build(each)
    else:
        os.execvpe(
            sys.argv[2], sys.argv[2:], checked_environment() if sys.argv[1] == "checked" else os.environ
        )

"""Compile every module of CUDA kernels with NVRTC, from the same text and options as on a GPU. Needs no GPU.

python .ci/check_nvrtc.py FOLDER    # where pip put nvidia-cuda-nvrtc (pip install --target FOLDER nvidia-cuda-nvrtc)
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

from hybridcomp import cuda

ARCHITECTURES = ("compute_75", "compute_90")
UNUSED = "--diag-suppress=177"  # allows functions of shared headers that a module does not call


def load(folder: Path) -> ctypes.CDLL:
    """Load NVRTC, with the library of built-in headers that it opens by its name."""
    found = sorted(folder.rglob("libnvrtc.so.*"))
    if not found:
        sys.exit(f"no libnvrtc.so under {folder}")
    for builtins in found[0].parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(found[0]))


def compile_module(nvrtc: ctypes.CDLL, module: str, architecture: str) -> str:
    """Compile a module; return NVRTC's log if it failed or warned, else nothing."""
    program = ctypes.c_void_p()
    source, name = cuda.source_of(module).encode(), f"{module}.cu".encode()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, name, 0, None, None)
    options = [*cuda.OPTIONS, *cuda.modules()[module][1], f"--gpu-architecture={architecture}", UNUSED]
    array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), array)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    text = log.value.decode().strip()
    return f"NVRTC failed ({failed}): {text}" if failed else text


def main() -> None:
    """Exit with 1 if a module does not compile, or not without a warning."""
    nvrtc = load(Path(sys.argv[1]))
    bad = False
    for module in cuda.modules():
        for architecture in ARCHITECTURES:
            log = compile_module(nvrtc, module, architecture)
            if log:
                print(f"{module} for {architecture}:\n{log[:4000]}")
                bad = True
    how = "with faults" if bad else "without a warning"
    print(f"NVRTC compiled {len(cuda.modules())} modules for {' and '.join(ARCHITECTURES)} {how}")
    sys.exit(bad)


main()

"""Compile CUDA kernels by NVRTC to files that CuPy loads, and keep the files on disk.

CuPy compiles, too, but always with ``-ftz=true``: subnormal float32 would become zero, and the bits would
not be the CPU's.
Importing this module imports no CuPy.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

from hybridcomp import variables
from hybridcomp.errors import CudaUnavailableError
from hybridcomp.files import write_bytes


def cache_folder() -> Path:
    """Return the folder of compiled kernels, made for this user alone; a temporary one if it cannot be written."""
    named = variables.CACHE_DIR.read()
    usual = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hybridcomp"
    folder = (Path(named) if named else usual) / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    except (OSError, RuntimeError):  # a home that is read-only, or no home
        pass
    return Path(tempfile.mkdtemp(prefix="hybridcomp-kernels-"))


def compiled(nvrtc: Any, name: str, source: str, options: tuple[str, ...], capability: int) -> Path:
    """Return the file of a module's machine code, compiling it if no earlier program left it.

    Args:
        nvrtc: ``cupy.cuda.nvrtc``.
        name: name of the module, for messages and the file.
        source: source of all its kernels, in one piece.
        options: options of NVRTC, without the architecture.
        capability: compute capability of the device, 90 for 9.0.

    Raises:
        CudaUnavailableError: NVRTC does not compile it, or the file cannot be written.
    """
    known = nvrtc.getSupportedArchs()
    # A device newer than NVRTC is given the newest intermediate code that NVRTC writes; its driver translates that.
    target = (
        f"sm_{capability}" if capability in known else f"compute_{max(a for a in known if a < capability)}"
    )
    options = (*options, f"--gpu-architecture={target}")
    key = hashlib.sha256("\0".join((str(nvrtc.getVersion()), *options, source)).encode()).hexdigest()
    path = cache_folder() / f"{name}-{key[:32]}.{'cubin' if target.startswith('sm') else 'ptx'}"
    if not path.is_file():
        # No process ever sees the file in part.
        write_bytes(path, _compile(nvrtc, name, source, options), error=CudaUnavailableError)
    return path


def _compile(nvrtc: Any, name: str, source: str, options: tuple[str, ...]) -> bytes:
    """Return the machine code, or the intermediate code where ``options`` ask for it."""
    program = nvrtc.createProgram(source, f"{name}.cu", (), ())
    try:
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise CudaUnavailableError(
                f"NVRTC does not compile the kernels {name!r}: {error}\n{log}"
            ) from error
        code = nvrtc.getPTX(program) if "=compute_" in options[-1] else nvrtc.getCUBIN(program)
        return code if isinstance(code, bytes) else str(code).encode()
    finally:
        nvrtc.destroyProgram(program)

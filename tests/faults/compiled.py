"""Compile the C of these tests."""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path


@functools.cache
def shared_library(source: Path) -> Path:
    """Compile a file into a shared library, once in this process; it is gone when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="hybridcomp-faults-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    target = folder / f"{source.stem}.so"
    command = ["cc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", str(target), str(source)]
    subprocess.run([*command, "-ldl"], check=True, timeout=60)
    return target

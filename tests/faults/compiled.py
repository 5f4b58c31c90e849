"""Compile the C of this folder."""

from __future__ import annotations

import functools
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


@functools.cache
def shared_library(name: str) -> Path:
    """Compile ``name.c`` into a shared library, once for all processes that have the same source."""
    source = HERE / f"{name}.c"
    folder = Path(tempfile.mkdtemp(prefix="hybridcomp-faults-"))
    target = folder / f"{name}.so"
    command = ["cc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", str(target), str(source)]
    subprocess.run([*command, "-ldl", "-lpthread"], check=True, capture_output=True, text=True, timeout=60)
    return target

"""Python that starts in hundredths of a second, for tests that start ranks of PyTorch.

To import PyTorch takes seconds of processor time, on every rank of every launch, and was most of what these tests took.
:func:`python` is an executable for Python's place: it has its program run by a fork of a process that has imported
PyTorch and numpy before, and nothing of hybridcomp or MPI. Environment, working folder, files, signals and exit status
are the caller's. There are two such processes, whose hashes have different seeds: of two neighbouring ranks, each has
another order of sets, as ranks have. It leaves to Python itself what it does not know: options, variables of Python, or
other settings of the libraries that are loaded. ``HYBRIDCOMP_TEST_COLD=1`` does so with everything.
"""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

_HERE = Path(__file__).parent
_SERVERS = 2


@functools.cache
def python() -> str:
    """Return an executable that does as ``sys.executable`` does; the processes behind it end with this one."""
    if os.environ.get("HYBRIDCOMP_TEST_COLD"):
        return sys.executable
    folder = Path(tempfile.mkdtemp(prefix="hybridcomp-warm-"))
    executable = folder / "python"
    # A shell in between would add variables of its own to the environment.
    executable.write_text(
        f"#!{sys.executable} -IS\n"
        f"import sys\n"
        f"sys.path.insert(0, {str(_HERE)!r})\n"
        f"import client\n"
        f"client.main({str(folder)!r}, sys.argv[1:])\n"
    )
    executable.chmod(0o700)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | {
        "OMP_NUM_THREADS": "1"
    }
    servers = []
    for number in range(_SERVERS):
        command = [sys.executable, "-I", str(_HERE / "server.py"), str(folder / str(number)), str(executable)]
        servers.append(
            subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # no terminal: what their programs write is buffered by blocks
                # A terminal's signals are not for it. Linux deals the cores out by sessions: had each server one of its
                # own, a rank that yields while it waits would not give way to ranks of the other.
                process_group=0,
            )
        )
    atexit.register(_end, servers)
    return str(executable)


def _end(servers: list[subprocess.Popen[bytes]]) -> None:
    for server in servers:
        server.communicate()  # it ends when its input does

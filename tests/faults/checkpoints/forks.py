"""Have jobs done by forks of a process that has loaded PyTorch: see ``saving.py``."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.preload import library

ROOT = Path(__file__).parents[3]
KILLED = 137
_ANSWER_SECONDS = 60.0


@dataclass(frozen=True)
class Done:
    """Result of a job.

    Attributes:
        status: exit status of its process, ``KILLED`` if a fault ended it.
        said: result of the job, None if there is none.
        output: text that it printed.
    """

    status: int
    said: Any
    output: str


@functools.cache
def _server() -> subprocess.Popen[str]:
    unlike = ("PMI", "HYBRIDCOMP", "LD_PRELOAD", "MASTER_")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(unlike)}
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.checkpoints.saving"],
        cwd=ROOT,
        env=clean | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "LD_PRELOAD": str(library())},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    atexit.register(server.communicate)  # it ends when its input does
    return server


def do(job: str, **arguments: Any) -> Done:
    """Have a job done."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps({"job": job, **arguments}) + "\n")
    server.stdin.flush()
    ready, _, _ = select.select([server.stdout], [], [], _ANSWER_SECONDS)
    if not ready:
        server.kill()
        raise AssertionError(f"no answer to {job} {arguments} within {_ANSWER_SECONDS} s")
    return Done(**json.loads(server.stdout.readline()))


def well(job: str, **arguments: Any) -> Any:
    """Have a job done that must succeed; return its result."""
    done = do(job, **arguments)
    assert done.status == 0, f"{job} {arguments} ended with {done.status}:\n{done.output}"
    return done.said

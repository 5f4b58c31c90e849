"""Small programs of torch.distributed, on several ranks or alone."""

import os
import subprocess
import textwrap

from tests.torch.harness import PATH
from tests.warm import python

HEAD = r"""
import os, socket, sys, torch, torch.distributed as dist
import hybridcomp, hybridcomp.torch as hct
from datetime import timedelta
torch.set_num_threads(1)
def say(x): os.write(1, f"{x}\n".encode())
"""


def program(body: str) -> list[str]:
    return ["-c", HEAD + textwrap.dedent(body)]


def alone(body: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "HYBRIDCOMP", "MASTER_"))}
    return subprocess.run(
        [python(), *program(body)],
        env={**clean, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return what ranks said that end without MPI_Finalize: the first may have the other one killed, and mpiexec
    then says so at length, on stdout."""
    assert done.returncode in (0, 9), done.stderr
    return done.stdout.split("=====")[0].split()

"""A rank that MPI does not come back to ends, and names the operation; one that is merely late lives."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridcomp.launcher import find_mpiexec
from tests.faults.compiled import shared_library
from tests.faults.stuck.stuck_ranks import TIMEOUT

pytestmark = pytest.mark.timeout(90)
ROOT = Path(__file__).parents[3]


def run(how: str) -> tuple[int, str]:
    """Run the ranks; return the launcher's code, and what was printed."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "HYBRIDCOMP"))}
    shim = shared_library(Path(__file__).with_name("stuck.c"))
    done = subprocess.run(
        [find_mpiexec(), "-n", "2", sys.executable, "-m", "tests.faults.stuck.stuck_ranks", how, str(shim)],
        cwd=ROOT,
        env=clean | {"HYBRIDCOMP_SHARED_MEMORY": "0", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("how", ["wait", "compressed", "plain"])
def test_it_ends(how: str) -> None:
    """A thread that waits; a call of compiled code; one that holds Python's lock."""
    began = time.monotonic()
    code, text = run(how)
    assert code != 0
    number = "number 3 " if how == "wait" else ""  # what compiled code has not counted yet
    assert f"hybridcomp: rank 0 of 2: all_reduce {number}on axis 'dp', rank 0 of 2 is " in text, text
    assert "s past its timeout, and MPI does not come back from a call" in text
    assert time.monotonic() - began < 25 + TIMEOUT  # rank 1 stays for longer


def test_what_is_late_lives() -> None:
    code, text = run("late")
    assert code == 3, text
    assert "all_reduce number 3 on axis 'dp', rank 0 of 2 did not end within the timeout of 1 s" in text
    assert "MPI does not come back" not in text

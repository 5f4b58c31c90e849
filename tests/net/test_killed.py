"""A rank is killed in mid-operation: no other hangs, and each that lives says who is silent."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hybridcomp.launcher import find_mpiexec
from tests.net.processes import living

pytestmark = pytest.mark.timeout(90)
ROOT = Path(__file__).parents[2]


def run(policy: str, said: Path, *keeper: str) -> int:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "HYBRIDCOMP"))}
    command = [sys.executable, "-m", "tests.net.rank_lost", "killed", policy, str(said)]
    return subprocess.run(
        [find_mpiexec(), "-n", "3", *keeper, *command],
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=60,
        check=False,
    ).returncode


def test_the_launcher_ends_the_job(tmp_path: Path) -> None:
    said = tmp_path / "said"
    said.mkdir()
    assert run("int8", said) != 0
    pids = [int((tmp_path / f"said.pid.{rank}").read_text()) for rank in range(3)]  # all had begun
    assert not living(pids)
    assert not [file.name for file in said.iterdir() if "completed" in file.read_text()]


@pytest.mark.parametrize("policy", ["int8", "none"])
def test_where_it_does_not_know_all_others_raise(policy: str, tmp_path: Path) -> None:
    run(policy, tmp_path, sys.executable, "-m", "tests.net.kept", str(tmp_path), "2")
    for rank in (0, 1):
        seconds, text = (tmp_path / str(rank)).read_text().split(maxsplit=1)
        assert re.match(
            rf"CollectiveTimeoutError all_reduce number 3 on axis 'dp', rank {rank} of 3 .*"
            r"not arrived: rank 2 \(silent\)",
            text,
        ), text
        assert float(seconds) < 20

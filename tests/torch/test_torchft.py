"""Replicas of torchft's on three ranks; and three that come and go."""

import importlib
import itertools
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.torch.harness import PATH, ROOT, case_names, check_case

torchft = pytest.importorskip("torchft", reason="its wheels are for x86-64 alone")
_LINE = re.compile(r"step (\d+) of (\d+) replicas: loss \S+, weights (\w{16})$", re.MULTILINE)
_SECONDS = 200.0


@pytest.mark.parametrize("case", case_names("torchft"))
def test_case(case: str) -> None:
    check_case("torchft", 3, case)


class Replica:
    """A process of the example, whose lines are read as they come."""

    def __init__(self, folder: Path, name: str, lighthouse: str) -> None:
        self.out = folder / f"{name}-{time.monotonic_ns()}"
        program = [
            sys.executable,
            str(ROOT / "examples" / "torchft_ddp.py"),
            "--steps",
            "1000000",
            "--name",
            name,
        ]
        env = {**os.environ, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", "TORCHFT_LIGHTHOUSE": lighthouse}
        with self.out.open("w") as out, self.out.with_suffix(".err").open("w") as error:
            self.process = subprocess.Popen(program, env=env, stdout=out, stderr=error)

    def commits(self) -> dict[int, tuple[int, str]]:
        """Return the number of replicas and the weights after each step that was committed."""
        found = _LINE.findall(self.out.read_text())
        return {int(step): (int(replicas), weights) for step, replicas, weights in found}

    def told(self) -> str:
        return self.out.with_suffix(".err").read_text()[-4000:]


def test_a_replica_is_killed_and_joins_again(tmp_path: Path) -> None:
    coordination: Any = importlib.import_module("torchft.coordination")
    lighthouse = coordination.LighthouseServer(
        bind="[::]:0", min_replicas=2, join_timeout_ms=2000, quorum_tick_ms=50, heartbeat_timeout_ms=2000
    )
    replicas = [Replica(tmp_path, name, lighthouse.address()) for name in "abc"]
    deadline = time.monotonic() + _SECONDS

    def until(met: Any) -> None:
        while not met():
            for one in replicas:
                assert one.process.poll() is None, one.told()
            assert time.monotonic() < deadline, [(one.told(), list(one.commits())[-1:]) for one in replicas]
            time.sleep(0.1)

    def among(count: int, one: Replica) -> int:
        return sum(replicas == count for replicas, _ in one.commits().values())

    try:
        until(lambda: among(3, replicas[2]) >= 10)
        killed = replicas.pop()
        killed.process.kill()
        killed.process.wait()
        alone = among(2, replicas[0])
        until(lambda: among(2, replicas[0]) >= alone + 10)
        replicas.append(Replica(tmp_path, "c", lighthouse.address()))
        until(lambda: among(3, replicas[2]) >= 10)
    finally:
        for one in replicas:
            one.process.kill()
            one.process.wait()
        lighthouse.shutdown()
    for one, other in itertools.combinations([*replicas, killed], 2):
        mine, theirs = one.commits(), other.commits()
        both = mine.keys() & theirs.keys()
        assert both or killed in (one, other)
        assert {step for step in both if mine[step] != theirs[step]} == set()

"""``hybridcomp train --elastic``: replicas that come, go, are refused, and wait for others in vain."""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridcomp_lab.train.interrupt import INTERRUPTED
from tests.train.harness import TINY, environment, metrics_so_far
from tests.warm import python

pytest.importorskip("torchft", reason="its wheels are for x86-64 alone")
_SECONDS = 200.0
ARGUMENTS = f"{TINY} --warmup-steps 2 --digest-every 1 --out run --timeout 30"


class Job:
    """Replicas at one lighthouse.

    Attributes:
        replicas: processes, by the name of each.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        coordination: Any = importlib.import_module("torchft.coordination")
        waits = {"join_timeout_ms": 2000, "quorum_tick_ms": 50, "heartbeat_timeout_ms": 2000}
        self._lighthouse = coordination.LighthouseServer(bind="[::]:0", min_replicas=1, **waits)
        self._deadline = time.monotonic() + _SECONDS
        self.replicas: dict[str, subprocess.Popen[bytes]] = {}

    def close(self) -> None:
        for process in self.replicas.values():
            process.kill()
            process.wait()
        self._lighthouse.shutdown()

    def start(self, name: str, arguments: str = "") -> subprocess.Popen[bytes]:
        command = [python(), "-m", "hybridcomp", "train", "--elastic", "--replica", name]
        env = environment(TORCHFT_LIGHTHOUSE=self._lighthouse.address())
        with (self._folder / f"{name}.log").open("ab") as log:
            self.replicas[name] = subprocess.Popen(
                [*command, *ARGUMENTS.split(), *arguments.split()],
                cwd=self._folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return self.replicas[name]

    def lines(self, name: str, kind: str = "train") -> list[dict[str, Any]]:
        return metrics_so_far(self._folder / "run" / name, kind)

    def told(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")[-3000:]

    def until(self, met: Callable[[], bool], *ends: str) -> None:
        """Wait; replicas that are not named must not end meanwhile."""
        while not met():
            for name, process in self.replicas.items():
                assert name in ends or process.poll() is None, self.told(name)
            assert time.monotonic() < self._deadline, {name: self.told(name) for name in self.replicas}
            time.sleep(0.05)

    def among(self, count: int, name: str) -> int:
        return sum(entry["replicas"] == count for entry in self.lines(name))

    def ended(self, name: str) -> tuple[int, str]:
        self.until(lambda: self.replicas[name].poll() is not None, name)
        return self.replicas.pop(name).wait(), self.told(name)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.close()


def test_replicas_come_and_go(job: Job) -> None:
    endless = "--steps 1000000 --min-replicas 2"
    for name in "ab":
        job.start(name, endless)
    job.until(lambda: job.among(2, "a") >= 5)
    wrong = job.start("c", f"{endless} --policy int4")
    code, told = job.ended("c")
    assert code == 1, told
    assert "MismatchError: the policy of rank" in told
    assert "(c" in told
    assert "int4:block=128 [" in told
    assert wrong.returncode == 1
    job.start("c", f"{endless} --seed 7")
    code, told = job.ended("c")
    assert code == 1, told
    assert "MismatchError: the seed of rank" in told
    job.start("c", endless)
    job.until(lambda: job.among(3, "c") >= 5)
    job.replicas["b"].kill()
    job.replicas.pop("b").wait()
    alone = job.among(2, "a")
    job.until(lambda: job.among(2, "a") >= alone + 5)
    job.start("b", endless)
    together = job.among(3, "b")
    job.until(lambda: job.among(3, "b") >= together + 5)
    job.replicas["c"].send_signal(signal.SIGUSR1)
    code, told = job.ended("c")
    assert code == INTERRUPTED, told
    assert "asked to stop (SIGUSR1) after step" in told
    alone = job.among(2, "a")
    job.until(lambda: job.among(2, "a") >= alone + 3)

    digests: dict[int, set[str]] = {}
    for name in "abc":
        for entry in job.lines(name):
            digests.setdefault(entry["step"], set()).add(entry["digest"])
    assert {step for step, found in digests.items() if len(found) > 1} == set()
    entries = job.lines("a")  # once: it goes on
    steps = [entry["step"] for entry in entries]
    assert steps == list(range(1, len(steps) + 1))  # each was committed once
    tokens = [entry["tokens"] for entry in entries]
    counts = [entry["replicas"] for entry in entries]
    added = [after - before for before, after in itertools.pairwise(tokens)]
    assert added == [128 * count for count in counts[1:]]
    losses = [entry["loss"] for entry in entries]
    assert losses[-1] < losses[0] - 0.3


def test_a_checkpoint_outlives_the_last_replica(job: Job, tmp_path: Path) -> None:
    """All are killed; who starts from the checkpoint repeats the steps after it bit for bit, without feedback."""
    both = "--lr 1e-3 --min-lr 1e-3 --policy none --min-replicas 2 --eval-batches 0 --checkpoint-every 4 --keep 1"
    for name in "ab":
        job.start(name, f"{both} --steps 1000000")
    folder = tmp_path / "run" / "checkpoints"
    job.until(lambda: any(folder.glob("step-*/checkpoint.json")) and len(job.lines("a")) >= 10)
    for name in "ab":
        process = job.replicas.pop(name)
        process.kill()
        process.wait()
    begin = max(int(kept.parent.name.removeprefix("step-")) for kept in folder.glob("step-*/checkpoint.json"))
    before = {name: {line["step"]: line for line in job.lines(name)} for name in "ab"}
    last = max(*before["a"], begin + 2) + 1
    for name in "ab":
        job.start(name, f"{both} --steps {last}")
    job.until(lambda: all(process.poll() is not None for process in job.replicas.values()), *"ab")
    for name in "ab":
        code, told = job.ended(name)
        assert code == 0, told
        assert f"resumed from run/checkpoints/step-{begin:08d}" in told
        lines = job.lines(name)
        assert [line["step"] for line in lines] == list(range(1, last + 1))
        assert [line["tokens"] for line in lines] == [256 * step for step in range(1, last + 1)]
        repeated = [line for line in lines if line["step"] > begin and line["step"] in before[name]]
        assert all(line["digest"] == before[name][line["step"]]["digest"] for line in repeated)
    (done,) = folder.glob("step-*/checkpoint.json")
    assert done.parent.name == f"step-{last:08d}"
    # It is the checkpoint of a run of one rank, too.
    command = [
        python(),
        "-m",
        "hybridcomp",
        "train",
        *TINY.split(),
        "--steps",
        str(last + 1),
        "--out",
        "other",
    ]
    alone = subprocess.run(
        [*command, "--resume", str(done.parent)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert alone.returncode == 0, alone.stderr
    assert f"resumed from {done.parent}" in alone.stdout
    assert [line["step"] for line in metrics_so_far(tmp_path / "other", "train")] == [last + 1]


def test_who_comes_when_all_is_done_begins_nothing(job: Job) -> None:
    job.start("a", "--steps 3")
    assert job.ended("a")[0] == 0
    (summary,) = job.lines("a", "summary")
    assert summary["steps"] == 3
    assert len(job.lines("a", "eval")) == 1
    job.start("b", "--steps 3")
    code, told = job.ended("b")
    assert (code, told) == (0, "run is done\n")


def test_too_few_replicas_are_named(job: Job) -> None:
    job.start("a", "--min-replicas 2 --quorum-timeout 3")
    code, told = job.ended("a")
    assert code == 2, told
    assert "no quorum of at least 2 replicas within 3 s at lighthouse http://" in told


@pytest.mark.parametrize("given", [True, False])
def test_no_lighthouse_is_named(tmp_path: Path, given: bool) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"http://localhost:{free.getsockname()[1]}"
    extra = ["--lighthouse", address, "--timeout", "2"] if given else []
    command = [python(), "-m", "hybridcomp", "train", "--elastic", *ARGUMENTS.split(), *extra]
    env = {k: v for k, v in environment().items() if k != "TORCHFT_LIGHTHOUSE"}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 2, done.stderr
    want = (
        f"lighthouse {address} does not answer within 2 s" if given else "elastic takes a lighthouse: start"
    )
    assert want in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == []

"""SIGUSR1: all ranks stop after one step, with a checkpoint, and a resumed run has the bits of an uninterrupted one."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridcomp_lab.train.interrupt import INTERRUPTED
from tests.train.harness import TINY, environment, metrics, train, under_mpiexec
from tests.train.same import losses, stored, unequal

COMMON = f"{TINY} --policy policy.toml --warmup-steps 2 --lr 1e-2"
POLICY = """
exclude = ["*norm*", "*embed*"]
min_bytes = 512
[dp]
all_reduce = { codec = "int4:block=32", feedback = "ef" }
send = "int8:block=32"
[pp]
codec = "int8:block=32"
"""
# Flags and steps of each run: enough that it does not end before it is seen that some are done.
RUNS = {
    "1f1b": ("--pp 2", 100),
    "2bw": ("--pp 2 --schedule 2bw --predict-weights", 100),
    "local": ("--pp 2 --schedule local --synthetic-labels", 100),
    "cdp-v1": ("--dp 2 --micro-batches 1 --schedule cdp-v1", 100),
    "one process": ("--dp 1", 300),
    "local_sgd": ("--dp 2 --sync local_sgd:every=150", 200),
}


def start(arguments: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        under_mpiexec(arguments),
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"{what} within 60 s"
        time.sleep(0.002)


def wait_for_steps(process: subprocess.Popen[str], run: Path, count: int) -> None:
    def done() -> bool:
        if (run / "metrics.jsonl").exists() and len(metrics(run, "train")) >= count:
            return True
        assert process.poll() is None, process.communicate()[1]
        return False

    until(done, f"{count} steps were not done")


def one_rank(launcher: int, rank: int) -> int:
    """Return the process of a rank under mpiexec, whose children are proxies, whose children are ranks."""

    def children(process: int) -> list[int]:
        return [int(p) for p in Path(f"/proc/{process}/task/{process}/children").read_text().split()]

    for process in (p for proxy in children(launcher) for p in children(proxy)):
        if f"PMI_RANK={rank}".encode() in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
            return process
    raise AssertionError(f"no process of {launcher} is rank {rank}")


def wait_for(what: str, process: int, there: Callable[[dict[str, str]], bool]) -> None:
    """Wait until the status of a process, as /proc has it, is so."""

    def is_there() -> bool:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        return there(dict(line.split(":", 1) for line in lines))

    until(is_there, f"{what} did not come")


def stopped(status: dict[str, str]) -> bool:
    return status["State"].split()[0] == "T"


def asked(status: dict[str, str]) -> bool:
    return int(status["ShdPnd"], 16) >> (signal.SIGUSR1 - 1) & 1 == 1


@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("schedule", RUNS)
def test_a_run_that_is_asked_to_stop_goes_on_bit_for_bit(schedule, tmp_path):
    (tmp_path / "policy.toml").write_text(POLICY)
    how, all_steps = RUNS[schedule]
    arguments = f"{COMMON} {how} --steps {all_steps} --checkpoint-every {all_steps}"
    whole = train(f"{arguments} --out whole", tmp_path)
    assert whole.returncode == 0, whole.stderr

    process = start(f"{arguments} --out cut", tmp_path)
    with process:
        try:
            wait_for_steps(process, tmp_path / "cut", 3)
            rank = process.pid
            if schedule != "one process":
                rank = one_rank(process.pid, 1 if schedule == "1f1b" else 0)
            os.kill(rank, signal.SIGSTOP)  # the run cannot end before the signal has come
            wait_for("SIGSTOP", rank, stopped)
            if schedule == "1f1b":
                os.kill(rank, signal.SIGUSR1)  # and nobody else
            else:
                process.send_signal(signal.SIGUSR1)  # mpiexec hands it on to all, one after the other
            wait_for("SIGUSR1", rank, asked)
            os.kill(rank, signal.SIGCONT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == INTERRUPTED, err
    assert "Traceback" not in err
    steps = len(metrics(tmp_path / "cut", "train"))
    assert 3 <= steps < (150 if schedule == "local_sgd" else all_steps)  # before replicas meet, too
    assert metrics(tmp_path / "cut", "summary") == []
    path = f"cut/checkpoints/step-{steps:08d}"
    assert f"asked to stop (SIGUSR1) after step {steps} of {all_steps}: to go on, --resume {path}" in out

    resumed = train(f"{arguments} --out cut --resume auto", tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert f"resumed from {path}" in resumed.stdout
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    a, b = (stored(tmp_path / run / f"checkpoints/step-{all_steps:08d}") for run in ("whole", "cut"))
    assert unequal(a, b) == []

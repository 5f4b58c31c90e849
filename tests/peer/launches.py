"""Run a list of tests on ranks, many in one launch, and go on with the rest after one that fails or hangs."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.torch.harness import PATH
from tests.warm import python

TEST_SECONDS = 60.0  # seconds that a test may take
_START_SECONDS = 90.0  # seconds more for the first: ranks import torch
_GRACE_SECONDS = 3.0  # seconds for other ranks to end once one has failed
_OURS = {
    "PYTHONPATH": PATH,
    "OMP_NUM_THREADS": "1",
    "HYBRIDCOMP_POLICY": "none",
    "HYBRIDCOMP_SUMMARY": "0",
}


@dataclass(frozen=True)
class Verdict:
    """Verdict on a test.

    Attributes:
        outcome: ``pass``, ``skip`` or ``fail``.
        why: reason of a skip, or what every rank said that failed.
        seconds: from its start to its end.
    """

    outcome: str
    why: str
    seconds: float


Tell = Callable[[str, Verdict], None]


def run(
    backend: str, tests: list[str], ranks: int = 4, tell: Tell | None = None, **env: str
) -> dict[str, Verdict]:
    """Run tests.

    Args:
        backend: backend of the process group.
        tests: names of the tests.
        ranks: number of ranks to start.
        tell: called with each test and its verdict as soon as it is known.
        env: more variables of the ranks' environment.

    Returns:
        Verdicts by test.
    """
    verdicts: dict[str, Verdict] = {}
    left = list(tests)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            launch = _Launch(backend, left, ranks, Path(folder), env)
            try:
                while (done := launch.next()) is not None:
                    verdicts[left.pop(0)] = done
                    if tell:
                        tell(list(verdicts)[-1], done)
                    if done.outcome == "fail":
                        break
            finally:
                launch.end()
    return verdicts


class _Launch:
    """Ranks that run tests one after another."""

    def __init__(self, backend: str, tests: list[str], ranks: int, folder: Path, env: dict[str, str]) -> None:
        self._tests, self._ranks, self._folder = list(tests), ranks, folder
        beside = Path(sys.executable).parent / "mpiexec"
        mpiexec = str(beside) if beside.exists() else "mpiexec"
        argv = [python(), "-m", "tests.peer.ranks", backend, str(folder), *tests]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "HYBRIDCOMP", "MASTER_"))}
        with open(folder / "output", "w", encoding="utf-8") as output:
            self._process = subprocess.Popen(
                [mpiexec, "-n", str(ranks), *argv],
                env={**clean, **_OURS, **env},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._began = time.monotonic()
        self._limit = TEST_SECONDS + _START_SECONDS

    def next(self) -> Verdict | None:
        """Wait for the next test's verdict; None after the last. None comes after one that failed."""
        if not self._tests:
            return None
        test = self._tests.pop(0)
        while True:
            ended = self._process.poll() is not None
            said = self._said(test)  # read after that: nothing is said later
            seconds = time.monotonic() - self._began
            everyone = len(said) == self._ranks
            if any(outcome == "fail" for outcome, _ in said.values()):
                if not everyone and not ended:
                    time.sleep(_GRACE_SECONDS)
                return Verdict("fail", self._failures(test, ""), seconds)
            if everyone:
                self._began, self._limit = time.monotonic(), TEST_SECONDS
                return Verdict(*max(said.values()), seconds)  # a skip, if any rank skipped
            if ended:
                return Verdict("fail", self._failures(test, "ended before the test did"), seconds)
            if seconds > self._limit:
                how = f"did not end within {self._limit:g} s"
                return Verdict("fail", self._failures(test, how), seconds)
            time.sleep(0.02)

    def end(self) -> None:
        """End all ranks."""
        for sign, patience in ((signal.SIGTERM, 5), (signal.SIGKILL, None)):
            if self._process.poll() is None:
                os.killpg(self._process.pid, sign)
            try:
                self._process.wait(patience)
                return
            except subprocess.TimeoutExpired:
                continue

    def _said(self, test: str) -> dict[int, tuple[str, str]]:
        """Return how the test went on each rank that has ended it: outcome, and why."""
        found = {}
        for rank in range(self._ranks):
            path = self._folder / f"rank-{rank}.jsonl"
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
            told = [json.loads(line) for line in lines if line.endswith("\n")]
            for name, outcome, why in told:
                if name == test:
                    found[rank] = (outcome, why)
        return found

    def _failures(self, test: str, how: str) -> str:
        said = self._said(test)
        text = "".join(f"rank {rank}: {why}\n" for rank, (outcome, why) in said.items() if outcome == "fail")
        if text:
            return text
        missing = [str(rank) for rank in range(self._ranks) if rank not in said]
        output = (self._folder / "output").read_text(encoding="utf-8", errors="replace")
        return f"rank {', '.join(missing)} {how}\n{output[-4000:]}"

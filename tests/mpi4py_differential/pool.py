"""Ranks that make the drawn calls, and the driver's side of it.

Each rank answers over a connection of its own, so that a rank that dies or hangs is known by its number. Ranks in doubt
are ended, and the next call starts new ones.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from tests.mpi4py_differential.calls import Draw
from tests.mpi4py_differential.memory import OPEN_MPI
from tests.mpi4py_differential.verdict import POLICIES

ROOT = Path(__file__).parents[2]
LATE = 16.0  # seconds after which a rank hangs: more than a timeout of ours and what follows it
STARTED = 60.0
MOST_ERRORS = 60  # of one rank alone, each on a communicator of its own, which keeps its contexts
# Open MPI wants to be asked where root runs it or ranks outnumber cores, and they spin unless told to sleep.
_OPTIONS = ["--allow-run-as-root", "--oversubscribe"] if OPEN_MPI else []
_SLEEPS = {"OMPI_MCA_mpi_yield_when_idle": "1", "OMPI_MCA_threads_pthreads_yield_strategy": "nanosleep"}


@dataclass(frozen=True)
class Finding:
    """A call that did something else than on plain mpi4py.

    Attributes:
        draw: its description.
        policy: of the communicator.
        kind: what went wrong.
        text: what each rank said.
    """

    draw: Draw
    policy: str
    kind: str
    text: str

    @property
    def title(self) -> str:
        """Call, policy and kind in a line."""
        words = [self.draw["call"], {"I": "non-blocking", "_init": "persistent"}.get(self.draw["mode"], "")]
        if self.draw["alone"] is not None:
            words.append("wrong on one rank")
        return " ".join(filter(None, [*words, f"under {self.policy}: {self.kind}"]))


class Pool:
    """Ranks of one launch at a time, started when first needed."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.starts = 0
        self.calls = 0
        self._errors = 0
        self._folder = tempfile.TemporaryDirectory(prefix="differential-")
        self._launch: subprocess.Popen[bytes] | None = None
        self._connections: list[Connection] = []
        self._pids: list[int] = []
        self._used = False

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._folder.cleanup()

    @property
    def _log(self) -> Path:
        return Path(self._folder.name) / f"{self.starts}.log"

    def _start(self) -> None:
        self.starts += 1
        address = str(Path(self._folder.name) / f"{self.starts}.socket")
        beside = Path(sys.executable).parent / "mpiexec"
        unlike = ("PMI", "HYBRIDCOMP", "MASTER_")
        clean = {k: v for k, v in os.environ.items() if not k.startswith(unlike)}
        with Listener(address, family="AF_UNIX", backlog=self.ranks) as listener, self._log.open("wb") as log:
            self._launch = subprocess.Popen(
                [
                    str(beside),
                    *_OPTIONS,
                    "-n",
                    str(self.ranks),
                    sys.executable,
                    "-m",
                    f"{__package__}.ranks",
                    address,
                ],
                env={
                    **clean,
                    **_SLEEPS,
                    "PYTHONPATH": str(ROOT),
                    "OMP_NUM_THREADS": "1",
                    "HYBRIDCOMP_SUMMARY": "0",
                },
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            listener._listener._socket.settimeout(STARTED)
            accepted = [listener.accept() for _ in range(self.ranks)]
        said = {}
        for connection in accepted:
            if not connection.poll(STARTED):
                raise RuntimeError(f"a rank did not start:\n{self._said()}")
            rank, pid = connection.recv()
            said[rank] = connection, pid
        self._connections = [said[rank][0] for rank in range(self.ranks)]
        self._pids = [said[rank][1] for rank in range(self.ranks)]

    def end(self) -> None:
        """End the ranks, those that hang too."""
        for connection in self._connections:
            connection.close()
        self._connections = []
        if self._launch is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            if not self._used:
                self._launch.wait(5)
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._launch.pid, signal.SIGKILL)
        self._launch.wait()
        self._launch, self._pids, self._used = None, [], False

    def _said(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def _ask(self, draw: Draw, policy: str) -> tuple[list[dict[str, Any] | None], str]:
        """Return each rank's answer, None where there is none, and why."""
        if self._launch is None:
            self._start()
        self.calls += 1
        answers: list[dict[str, Any] | None] = [None] * self.ranks
        gone: list[int] = []
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError):
                connection.send((draw, policy))
        left = dict(zip(self._connections, range(self.ranks), strict=True))
        limit = time.monotonic() + LATE
        while left and (rest := limit - time.monotonic()) > 0:
            if gone:
                rest = min(rest, 1.0)
            ready = wait(list(left), rest)
            if gone and not ready:
                break
            for connection in ready:
                rank = left.pop(connection)
                try:
                    answers[rank] = connection.recv()
                except (EOFError, ConnectionResetError):
                    gone.append(rank)
        if gone:
            time.sleep(0.2)
            return answers, f"ranks {gone} died; the launcher:\n{self._said()}"
        if left:
            for rank in left.values():
                os.kill(self._pids[rank], signal.SIGUSR1)
            time.sleep(1.0)
            return answers, f"ranks {sorted(left.values())} did not answer within {LATE:g} s\n{self._said()}"
        return answers, ""

    def check(self, draw: Draw, policies: list[str] | None = None) -> Finding | None:
        """Make a call on plain mpi4py and under each policy; return the first finding."""
        if draw["alone"] is not None:  # where others would wait on plain mpi4py
            found = (self._check(draw, policy) for policy in policies or POLICIES)
            return next(filter(None, found), None)
        answers, why = self._ask(draw, "plain")
        raised = [answer is not None and bool(answer["error"]) for answer in answers]
        if why or any(raised) != all(raised):
            said = "\n".join(f"rank {r}: {a and (a['text'], a['buffers'])}" for r, a in enumerate(answers))
            self.end()
            return Finding(draw, "plain", "plain mpi4py", f"{why}\n{said}")
        for policy in policies or list(POLICIES):
            if draw["values"] == "wild" and policy not in ("none", "exact"):
                continue
            differs = self._check(draw, policy)
            if differs is not None:
                return differs
        return None

    def _check(self, draw: Draw, policy: str) -> Finding | None:
        if draw["alone"] is not None:
            self._errors += 1
            if self._errors % MOST_ERRORS == 0:
                self.end()
        answers, why = self._ask(draw, policy)
        said = "\n".join(_line(rank, answer) for rank, answer in enumerate(answers))
        kinds = [answer["kind"] for answer in answers if answer and answer["kind"]]
        # An error of one rank is what others waited for.
        own = [k for k in kinds if "RemoteError" not in k and "TimeoutError" not in k]
        if why:
            self.end()
            kind = "a rank died" if "died" in why else "hangs"
            return Finding(draw, policy, "; ".join([kind, *sorted(set(own))]), f"{said}\n{why}")
        if kinds:
            if any("raises" in kind or "told" in kind for kind in kinds):
                self.end()  # other ranks may wait still
            return Finding(draw, policy, (own or kinds)[0], said)
        digests = {answer["digest"] for answer in answers if answer and answer["digest"]}
        if len(digests) > 1:
            return Finding(draw, policy, "ranks differ", said)
        return None


def _line(rank: int, answer: dict[str, Any] | None) -> str:
    if answer is None:
        return f"rank {rank}: no answer"
    buffers = "; ".join(answer["buffers"])
    return f"rank {rank}: {answer['kind'] or 'well'} {answer['text']} [{buffers}]"

"""The command: what it prints, what it refuses, and how it leaves the terminal."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from hybridcomp.cli import top_tables
from hybridcomp.cli.main import main
from hybridcomp.steps import NO_STEPS, StepTotals
from hybridcomp.top import watch as watch_module
from hybridcomp.top.read import Job, Rank
from hybridcomp.top.view import History, JobView, look
from tests.top import flying, group, keep, snapshot, totals

SECONDS = 30.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody answers here."""
    monkeypatch.setattr(watch_module, "_ANSWER_SECONDS", 0.1)
    monkeypatch.delenv("HYBRIDCOMP_TOP", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)  # workers of pytest have it


def top(folder: Path, *arguments: str) -> int:
    return main(["top", "--folder", str(folder), "--interval", "0.1", *arguments])


def test_no_job_is_one_line_that_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert top(tmp_path) == 2
    error = capsys.readouterr().err
    assert error.startswith("hybridcomp top: error: no job of yours runs here")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--interval", "0"], "0.1 to 3600 seconds, not 0"),
        (["--interval", "nan"], "not nan"),
        (["--folder", "/nowhere"], "no folder /nowhere"),
        (["nobody", "--folder", "."], "there is no job 'nobody', but 4711.0"),
    ],
)
def test_wrong_input_is_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    keep(tmp_path, snapshot(launcher="4711.0"))
    assert main(["top", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_only_job_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(tmp_path, snapshot())
    assert top(tmp_path) == 0
    printed = capsys.readouterr().out
    assert f"job {os.getpid()}, 1 of 2 ranks" in printed
    assert re.search(r"dp +10 +4 kB +1 kB +4 ", printed)
    assert "\x1b" not in printed
    assert not re.search(r" $", printed, re.M)


def test_json_has_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(tmp_path, snapshot(in_flight=(flying(time.time() - 5),)))
    assert top(tmp_path, "--json", str(os.getpid())) == 0
    view = json.loads(capsys.readouterr().out)
    assert view["axes"][0]["totals"]["wire_bytes"] == 1000
    assert view["operations"][0]["op"] == "all_reduce"
    assert (view["size"], view["elsewhere"]) == (2, 1)


def test_several_jobs_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(tmp_path, snapshot(launcher="1.0", groups=(), program="a.py"))
    keep(tmp_path, snapshot(1, launcher="2.0", groups=(), program="b.py"))
    assert top(tmp_path, "--json") == 0
    jobs = json.loads(capsys.readouterr().out)["jobs"]
    assert {(job["job"], job["program"], job["ranks"], job["size"]) for job in jobs} == {
        ("1.0", "a.py", 1, 2),
        ("2.0", "b.py", 1, 2),
    }
    assert top(tmp_path) == 0
    printed = capsys.readouterr().out
    assert "hybridcomp top" in printed
    assert "a.py" in printed
    assert top(tmp_path, "2.0") == 0
    assert "b.py" in capsys.readouterr().out


def test_where_an_optimizer_steps_figures_are_of_a_step_of_an_average_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = StepTotals(5, 4, 0, 2.0, 0.5)
    axes = (totals(plain_bytes=40_000, wire_bytes=10_000, between_bytes=4_000),)
    keep(tmp_path, snapshot(0, steps=steps, axes=axes))
    keep(tmp_path, snapshot(1, steps=steps, axes=axes, started=0))  # so it is another process
    assert top(tmp_path) == 0
    printed = capsys.readouterr().out
    assert "in a step, the mean of 5; lately one takes 500 ms, of which a rank waits 25%" in printed
    assert re.search(r"inside hosts +between hosts +ratio +encode ms +under way ms +decode ms", printed)
    # Ten calls of each rank in five steps.
    assert re.search(r"dp +2 +1.2 kB +800 B +4 +100 +800 +50$", printed, re.M)
    assert re.search(r"rank +pid +step ms +waited +sends", printed)
    assert re.search(r" 1 +\d+ +500 +25% ", printed)


def large(steps: StepTotals, between: int) -> JobView:
    """Return a job of large numbers and many ranks, in which much goes wrong."""
    now = time.time()
    axes = tuple(
        totals(
            f"axis{i}" * 9,
            123_456_789,
            plain_bytes=10**14,
            wire_bytes=10**13 + i,
            wire_seconds=98765.4,
            between_bytes=between,
        )
        for i in range(3)
    )
    before, after = [], []
    for rank in range(64):
        pid = 4_000_000 + rank
        says = snapshot(
            rank,
            pid=pid,
            size=128,
            at=now - 1,
            steps=steps,
            axes=tuple(replace(a, wire_bytes=0) for a in axes),
        )
        before.append(says)
        slow = flying(now - 100 - rank, awaits=(1,)) if rank % 2 else flying(now - 5, 0, (7,), op="recv")
        groups = (group(latest=1 if rank == 6 else 11, size=128),)
        after.append(
            replace(says, at=now, axes=axes, in_flight=(slow,), groups=groups, host=f"host{rank}" * 9)
        )
    history = History()
    for each in (before, after):
        ranks = tuple(Rank(Path("x"), says, True, says.rank == 5) for says in each)
        job = Job("1234567.0", ranks)
        history.add(job)
    return look(job, history)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("steps", [NO_STEPS, StepTotals(9, 8, 0, 98_765.4, 65_432.1)])
@pytest.mark.parametrize("between", [0, 10**12])
def test_it_fits_the_terminal(width: int, steps: StepTotals, between: int) -> None:
    console = Console(width=width, height=24, force_terminal=False)
    with console.capture() as printed:
        console.print(top_tables.job_tables(large(steps, between), width, 24))
    lines = printed.get().splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= width
    text = printed.get()
    assert not re.search(r"\d…", text)  # no figure is cut
    for said in ("ratio", "wire", "in flight", "has died", "rank 6 is slowest"):
        assert said in text
    assert ("uncompressed" in text) == ("on the wire" in text) == (not between)
    assert ("inside hosts" in text) == ("between hosts" in text) == bool(between)
    assert bool(re.search("step ms +waited", text)) == bool(steps.count)
    assert not re.search(
        r"\d %(?! of the time)", text
    )  # several operations at once have no share of the time
    unit = "ms" if steps.count else "s"
    assert (f"under way {unit}" in text) == ("host0" in text) == (width == 120)


IMPATIENT = """
import sys
from hybridcomp.cli.main import main
from hybridcomp.top import watch
watch._ANSWER_SECONDS = 0.1
sys.exit(main({}))
"""


class Terminal:
    """The command on a terminal of its own."""

    def __init__(self, folder: Path) -> None:
        self.child, self.file = pty.fork()
        if self.child == 0:
            os.environ["TERM"] = "xterm-256color"
            arguments = ["top", "--folder", str(folder), "--interval", "0.2"]
            os.execv(sys.executable, [sys.executable, "-c", IMPATIENT.format(arguments)])
        fcntl.ioctl(self.file, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(self.file)
        self.text = ""

    def read(self, wanted: str) -> None:
        deadline = time.monotonic() + SECONDS
        while wanted not in self.text:
            assert time.monotonic() < deadline, self.text
            if select.select([self.file], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self.file, 65536).decode()
                except OSError:  # it has ended
                    break
        assert wanted in self.text

    def end(self) -> int:
        self.read("\x1b[?1049l")  # the screen as it was
        after = termios.tcgetattr(self.file)
        assert after[3] & (termios.ICANON | termios.ECHO) == self.before[3] & (termios.ICANON | termios.ECHO)
        return os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])


@pytest.mark.parametrize("how", ["q", "\x03", "the job ends"])
def test_it_leaves_the_terminal_as_it_was(how: str, tmp_path: Path) -> None:
    path = keep(tmp_path, snapshot(program="\x1b]0;evil\x07train.py"))
    terminal = Terminal(tmp_path)
    try:
        terminal.read("no rank keeps the others waiting")
        assert not termios.tcgetattr(terminal.file)[3] & termios.ECHO
        if how == "the job ends":
            path.unlink()
        else:
            os.write(terminal.file, how.encode())
        assert terminal.end() == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(terminal.child, signal.SIGKILL)
        os.close(terminal.file)
    assert "\x1b]0;evil" not in terminal.text

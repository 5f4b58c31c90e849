"""Run ``hybridcomp top``: show a running job in the terminal, as it goes on."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import select
import signal
import sys
import termios
import time
import tty
from contextlib import suppress
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live

from hybridcomp import style, variables
from hybridcomp.cli.terminate import end_on_signals
from hybridcomp.cli.top_tables import about, job_list, job_tables
from hybridcomp.errors import ConfigError
from hybridcomp.top.read import Job
from hybridcomp.top.view import History, JobView, look
from hybridcomp.top.watch import Watcher

EXAMPLES = f"""examples:
  hybridcomp top                     # the only job, or a list of them; q ends it
  hybridcomp top 81234 --once        # one table, of the job of process 81234
  hybridcomp top --once --json | jq .slowest

Every program that makes a communicator, a process group or a hook of hybridcomp can be looked at, without having been
started in any special way; {variables.TOP}=0 keeps it from that. Only ranks of this machine are shown, of this user's.
With {variables.TOP}=FOLDER, on a disk that the hosts share, those of all hosts are: give it as --folder, too.

The figures by axis are an average rank's, of a step where an optimizer of PyTorch steps. Operations in encode, wire and
decode are how many there were at once since the last refresh, a rank's "waited" the share of a step for which its
thread slept. docs/observing.md explains the rest.
"""
_LEAST_INTERVAL, _MOST_INTERVAL = 0.1, 3600.0
TICK = 0.25  # seconds between looks at keys
_NO_TERMINAL_WIDTH = 120


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``hybridcomp top``."""
    result = argparse.ArgumentParser(
        prog="hybridcomp top",
        description="Show what a running job sends on each axis, and which rank keeps the others waiting.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("job", nargs="?", metavar="JOB", help="its name in the list, or a process id of it")
    result.add_argument("--once", action="store_true", help="print one table; so it is without a terminal")
    result.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    result.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between refreshes")
    result.add_argument("--folder", metavar="FOLDER", help=f"where the job's {variables.TOP} is that")
    return result


def main(argv: list[str]) -> int:
    """Run ``hybridcomp top ARGV`` and return the exit code.

    Raises:
        ConfigError: there is no such job, or wrong arguments.
    """
    arguments = parser().parse_args(argv)
    interval: float = arguments.interval
    if not _LEAST_INTERVAL <= interval <= _MOST_INTERVAL:
        raise ConfigError(
            f"--interval is {_LEAST_INTERVAL:g} to {_MOST_INTERVAL:g} seconds, not {interval:g}"
        )
    watcher = Watcher(arguments.folder)
    jobs = watcher.answers()
    found = _named(jobs, arguments.job)
    console = style.console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _NO_TERMINAL_WIDTH
    if found is None:
        if arguments.json:
            style.say(json.dumps({"jobs": [about(job) for job in jobs]}))
        else:
            _print(console, job_list(jobs))
        return 0
    if arguments.once or arguments.json or not console.is_terminal:
        view = _once(watcher, found, interval)
        if arguments.json:
            style.say(json.dumps(_plain(view)))
        else:
            _print(console, job_tables(view, console.width, None))
        return 0
    return _live(watcher, found, interval, console)


def _named(jobs: list[Job], name: str | None) -> Job | None:
    """Return the job with a name, or the only one; None if there are several."""
    if not jobs:
        raise ConfigError(
            "no job of yours runs here that can be shown: start a program that makes a communicator of hybridcomp, "
            f"or give the folder of its {variables.TOP} as --folder"
        )
    if name is None:
        return jobs[0] if len(jobs) == 1 else None
    for job in jobs:
        if job.is_called(name):
            return job
    raise ConfigError(f"there is no job {name!r}, but {', '.join(job.name for job in jobs)}")


def _once(watcher: Watcher, job: Job, interval: float) -> JobView:
    """Return the view of a job over an interval."""
    history = History()
    history.add(job)
    ends = time.monotonic() + interval
    while time.monotonic() < ends:
        time.sleep(min(TICK, interval))
        watcher.go_on()
    job = watcher.answer(job)
    history.add(job)
    return look(job, history)


def _live(watcher: Watcher, job: Job, interval: float, console: Console) -> int:
    """Show a job until it ends, or its user has seen enough."""
    end_on_signals()
    # SIGINT is ignored where a script's background process started this one, and yet the key that ends a live view.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    history = History()
    history.add(job)
    view = look(job, history)
    now: Job | None = job
    with (
        suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False) as live,
        Keys() as keys,
    ):
        while now is not None:
            history.add(now)
            view = look(now, history)
            live.update(job_tables(view, console.width, console.height), refresh=True)
            ends = time.monotonic() + interval
            while time.monotonic() < ends:
                if keys.ends(min(TICK, interval)):
                    return 0
                watcher.go_on()
            now = watcher.same(now)
    if now is None:
        _print(console, job_tables(view, console.width, None))
        console.print(f"job {view.name} has ended")
    return 0


class Keys:
    """Keys that the user presses, if there is a keyboard: read as they are pressed, and not shown."""

    def __init__(self) -> None:
        self._file = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else -1
        self._before: list[Any] = []

    def __enter__(self) -> Keys:
        if self._file >= 0:
            self._before = termios.tcgetattr(self._file)
            tty.setcbreak(self._file)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file >= 0:
            termios.tcsetattr(self._file, termios.TCSAFLUSH, self._before)

    def ends(self, seconds: float) -> bool:
        """Wait for so many seconds; return whether the user wants to leave, or has left."""
        if self._file < 0:
            time.sleep(seconds)
            return False
        if not select.select([self._file], [], [], seconds)[0]:
            return False
        pressed = os.read(self._file, 64)
        return not pressed or bool(set(pressed) & set(b"qQ"))


def _print(console: Console, tables: Group) -> None:
    """Print tables; without a terminal, leave out the spaces that fill their lines."""
    if console.is_terminal:
        console.print(tables)
        return
    with console.capture() as printed:
        console.print(tables)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in printed.get().splitlines()))


def _plain(view: JobView) -> dict[str, Any]:
    return {**dataclasses.asdict(view), "elsewhere": view.size - len(view.ranks)}

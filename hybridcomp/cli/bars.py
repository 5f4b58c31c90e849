"""Show how far a command is that starts one run after another."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from hybridcomp.errors import printable


class RunBars:
    """Display of many runs: bars over all and for the one under way on a terminal, a line for each run elsewhere."""

    def __init__(self, console: Console, runs: int) -> None:
        """Show ``runs`` runs on a console."""
        self._console, self._runs = console, runs
        self._ended, self._began = 0, 0.0
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._all = self._progress.add_task("runs", total=runs, said="")
        self._one = self._progress.add_task("", total=1, said="", visible=False)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _begin(self, name: str, steps: int, said: str) -> None:
        """Start the bar of a run."""
        self._began = time.monotonic()
        self._progress.reset(self._one, total=steps, description=printable(name), said=said, visible=True)

    def _count(self) -> None:
        """Count a run that has ended."""
        self._ended += 1
        self._progress.advance(self._all)

    def _seconds(self) -> str:
        """Return the time since the run began, in words."""
        return f"{time.monotonic() - self._began:.0f} s"

    def _say(self, name: str, said: str, spent: str) -> None:
        """Print the line of a run that has ended; names come from outside, and have no markup."""
        line = f"[{self._ended}/{self._runs}] {name}: {said} ({spent})"
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

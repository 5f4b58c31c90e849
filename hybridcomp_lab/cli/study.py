"""Run ``hybridcomp study``: a grid of policies, schedules, links and seeds on the lab, with a report."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from rich.console import Console

from hybridcomp import style
from hybridcomp.cli.bars import RunBars
from hybridcomp.cli.terminate import end_on_signals
from hybridcomp.net import KINDS
from hybridcomp.results.record import RunRecord
from hybridcomp_lab.study.plan import Run, Study
from hybridcomp_lab.study.reading import read_study
from hybridcomp_lab.study.results import Results, results_of
from hybridcomp_lab.study.runner import Done, find_runs, run_study
from hybridcomp_lab.study.tables import tables

EPILOG = """STUDY is a TOML file; studies/ of the source has those behind the documentation's figures, and
docs/study.md explains them. Runs that are done stay in OUT/runs: a study that was interrupted goes on when it is
called again, and one whose file has changed runs what is new in it.
"""
_NOT_SHOWN = 1
_FILE_WIDTH = 150


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``hybridcomp study``."""
    result = argparse.ArgumentParser(
        prog="hybridcomp study",
        description="Train under a grid of policies, schedules, links and seeds on four hosts made on this machine; "
        "leave tables, pictures, a report page and results.json. Exit code 1: something that the study is to show "
        "did not show.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("study", type=Path, metavar="STUDY.toml", help="what to run")
    result.add_argument("--out", type=Path, help="folder to write to (default runs/study/NAME)")
    result.add_argument("--part", choices=("loss", "speed"), help="run one part alone")
    result.add_argument("--reduced", action="store_true", help="at the size that the file's [reduced] says")
    result.add_argument(
        "--list", action="store_true", help="say what would run, and what is done of it; run nothing"
    )
    result.add_argument("--kind", choices=KINDS, default="auto", help="of lab; see `hybridcomp lab --help`")
    result.add_argument("--results", type=Path, help="also write the results' files here, without the runs")
    return result


class Show(RunBars):
    """Display of a study's progress: a bar over all runs on a terminal, a line for each run elsewhere."""

    def begin(self, run: Run) -> None:
        """Start the run's bar."""
        self._begin(run.name, run.steps, "starting")

    def update(self, run: Run, record: RunRecord) -> None:
        """Advance the bar."""
        if record.train and not self._progress.disable:
            last = record.train[-1]
            said = f"loss {last['loss']:6.3f}  {last['tokens_per_s']:8,.0f} tokens/s"
            self._progress.update(self._one, completed=last["step"], said=said)

    def finish(self, run: Run, done: Done, *, kept: bool) -> None:
        """Count a run that has ended."""
        self._count()
        if kept:
            return
        if done.diverged:
            said = "diverged"
        elif run.part == "loss":
            said = f"validation loss {done.record.val_loss:.4f}"
        else:
            said = f"{done.record.tokens_per_s:,.0f} tokens/s"
        self._say(run.name, said, self._seconds())


def main(argv: list[str]) -> int:
    """Run ``hybridcomp study ARGV``; return 0, or 1 if an expectation did not hold.

    Raises:
        ConfigError: wrong arguments, or a wrong study.
        LabError: this machine cannot bring up a lab of that kind.
        RunFailedError: a run failed.
    """
    arguments = parser().parse_args(argv)
    for needed in ("matplotlib", "torch", "tyro"):  # known now, not after minutes of training
        if importlib.util.find_spec(needed) is None:
            raise ModuleNotFoundError(f"No module named {needed!r}", name=needed)
    study = read_study(arguments.study, reduced=arguments.reduced)
    out = arguments.out or Path("runs", "study", study.name + ("-reduced" if arguments.reduced else ""))
    console = style.console(width=None if sys.stdout.isatty() else _FILE_WIDTH)
    if arguments.list:
        _list(console, study, out)
        return 0
    end_on_signals()
    with Show(console, len(study.runs(arguments.part))) as show:
        run_study(study, out, show, part=arguments.part, kind=arguments.kind)
    results = results_of(study, find_runs(study, out))
    _print(console, results)
    from hybridcomp_lab.study.report import write_report  # noqa: PLC0415  (matplotlib takes a second to load)

    for folder in (out, *([arguments.results] if arguments.results else [])):
        page = write_report(results, folder)
        console.print(f"The report: {page}", highlight=False, soft_wrap=True)
    return 0 if all(verdict.held for verdict in results.verdicts) else _NOT_SHOWN


def _list(console: Console, study: Study, out: Path) -> None:
    done = {one.run.folder for one in find_runs(study, out)}
    for run in study.runs():
        mark = "done" if run.folder in done else "to run"
        console.print(
            f"{mark:<7}{run.name}, {run.steps} steps", highlight=False, markup=False, soft_wrap=True
        )


def _print(console: Console, results: Results) -> None:
    for table in tables(results):
        table.show(console)
    for verdict in results.verdicts:
        mark = "yes" if verdict.held else "NO"
        console.print(f"{mark:<4}{verdict.sentence}", highlight=False, markup=False, soft_wrap=True)

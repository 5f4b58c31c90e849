"""``hybridcomp demo``: train one model with and without compression on a slow cluster, and compare."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
import os
import time
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from hybridcomp import style
from hybridcomp.cli.terminate import end_on_signals
from hybridcomp.errors import printable
from hybridcomp.net import KINDS, Lab, Rate
from hybridcomp.results.record import RunRecord
from hybridcomp_lab.demo.plan import FULL, DemoPlan, Run
from hybridcomp_lab.demo.report import Report
from hybridcomp_lab.demo.runner import Outcome, run_all

LINES_PER_RUN = 8  # lines printed for a run where there is no terminal to draw on
MINUTES = {DemoPlan(): 3, FULL: 7}  # minutes that a plan takes on two cores, about


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``hybridcomp demo``."""
    plan = DemoPlan()
    result = argparse.ArgumentParser(
        prog="hybridcomp demo",
        description="Train the same GPT under several policies on four hosts with slow links, made on this "
        "machine, and compare speed, loss and traffic. Leaves a table, demo.png, demo.html and results.json.",
    )
    result.add_argument(
        "--out", type=Path, default=Path("runs/demo"), help="folder to write to (default runs/demo)"
    )
    result.add_argument("--rate", default=plan.rate, help=f"speed of each host's link (default {plan.rate})")
    result.add_argument(
        "--full",
        action="store_true",
        help=f"the README's: {FULL.pp * FULL.dp * FULL.tp} ranks, tensor parallelism too, {FULL.steps} steps",
    )
    result.add_argument(
        "--steps", type=int, help=f"of each run (default {plan.steps}; with --full {FULL.steps})"
    )
    result.add_argument(
        "--policies",
        default=",".join(plan.policies),
        help=f"presets to compare, none among them (default {','.join(plan.policies)})",
    )
    result.add_argument("--data", help="UTF-8 text or .bin tokens (default: Python's standard library)")
    result.add_argument("--kind", choices=KINDS, default="auto", help="of lab; see `hybridcomp lab --help`")
    return result


class Show:
    """Display of the runs: bars on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description:<9}", markup=False),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}", markup=False),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._printed = 0
        self._began = 0.0

    def __enter__(self) -> Show:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, run: Run, lab: Lab) -> None:
        """Start a bar."""
        link = "links unshaped" if lab.rate.bits_per_second is None else f"links at {lab.rate}"
        if self._task is None:
            for note in lab.notes:
                self._print(note)
        self._printed, self._began = 0, time.monotonic()
        self._task = self._progress.add_task(printable(run.name), total=run.steps, said="starting the ranks")
        if self._progress.disable:
            place = link if lab.kind == "namespaces" else lab.kind
            self._print(
                f"{run.name}: {run.steps} steps under policy {run.policy}, {place}; starting the ranks"
            )

    def update(self, run: Run, record: RunRecord) -> None:
        """Advance the bar."""
        if not record.train or self._task is None:
            return
        last = record.train[-1]
        step, megabytes = last["step"], sum(last["wire_bytes"].values()) / 1e6
        said = f"loss {last['loss']:6.3f}  {last['tokens_per_s']:8,.0f} tokens/s  {megabytes:9,.1f} MB sent"
        self._progress.update(self._task, completed=step, said=said)
        if self._progress.disable and step >= self._printed + math.ceil(run.steps / LINES_PER_RUN):
            self._printed = step
            self._print(f"  step {step:4d}  {said}")

    def finish(self, run: Run, record: RunRecord) -> None:
        """Print the result of the run."""
        if self._progress.disable:
            self._print(
                f"  validation loss {record.val_loss:.3f}, {record.tokens_per_s:,.0f} tokens/s, "
                f"{time.monotonic() - self._began:.0f} s with start and evaluations"
            )

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


def main(argv: list[str]) -> int:
    """Run ``hybridcomp demo ARGV`` and return 0.

    Raises:
        ConfigError: wrong arguments.
        LabError: this machine cannot bring up a lab of that kind.
        RunFailedError: a run failed.
    """
    arguments = parser().parse_args(argv)
    for needed in ("matplotlib", "torch"):  # known now, not after minutes of training
        if importlib.util.find_spec(needed) is None:
            raise ModuleNotFoundError(f"No module named {needed!r}", name=needed)
    end_on_signals()
    base = FULL if arguments.full else DemoPlan()
    plan = dataclasses.replace(
        base,
        rate=str(Rate.parse(arguments.rate)),
        steps=base.steps if arguments.steps is None else arguments.steps,
        policies=tuple(name.strip() for name in arguments.policies.split(",")),
        data=arguments.data,
    )
    plan.check()
    console = style.console()
    console.print(
        announcement(plan, len(os.sched_getaffinity(0)), os.getloadavg()[0]), highlight=False, soft_wrap=True
    )
    from hybridcomp_lab.demo.output import write_report  # noqa: PLC0415  (matplotlib takes a second to load)

    with Show(console) as show:
        outcome = run_all(plan, arguments.out, show, kind=arguments.kind)
    report = write_report(outcome, arguments.out)
    _print_report(console, outcome, report)
    page, picture = arguments.out / "demo.html", arguments.out / "demo.png"
    console.print(f"\nThe same as a page: {page}, as a picture: {picture}", highlight=False, soft_wrap=True)
    return 0


def announcement(plan: DemoPlan, cores: int, load: float) -> str:
    """Return a text about the plan: the runs, and how long they take, where that is known.

    Args:
        plan: plan of the demonstration.
        cores: processor cores that this process may use.
        load: load of this machine before the runs begin, in running processes.
    """
    said = (
        f"Training a GPT under {len(plan.policies)} policies ({', '.join(plan.policies)}), {plan.steps} steps each, "
        f"on {plan.pp * plan.dp * plan.tp} ranks of {plan.hosts} hosts with links of {plan.rate}, made on this "
        "machine"
    )
    minutes = MINUTES.get(plan)
    if minutes is not None:
        said += f": about {minutes} minutes on two cores"
    if cores == 1:
        said += ". There is one core here: it takes longer, and compression, which takes processor time, gains less"
    if load > cores / 2:
        said += f". Others are busy here (load {load:.1f}): it takes longer, and speeds vary with them"
    return said + "."


def _print_report(console: Console, outcome: Outcome, report: Report) -> None:
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for index, heading in enumerate(report.headings):
        table.add_column(heading, justify="left" if index == 0 else "right", no_wrap=True)
    for row in report.cells:
        table.add_row(*row)
    console.print()
    console.print(table)
    console.print()
    for sentence in (*report.sentences, *outcome.notes):
        console.print(sentence, highlight=False, soft_wrap=True)

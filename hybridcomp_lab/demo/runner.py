"""Run the plan in labs, one run after the other, and show the progress of each."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from hybridcomp.errors import ConfigError
from hybridcomp.net import Lab
from hybridcomp.results.record import RunRecord
from hybridcomp_lab.demo.plan import DemoPlan, Run
from hybridcomp_lab.demo.training import train_in


@dataclass
class Outcome:
    """Result of a demonstration, with the plan that was run.

    Attributes:
        plan: plan that was run.
        kind: kind of lab that it ran in.
        notes: sentences on what the lab could not do as asked.
        records: metrics by name of the run, in order.
        commands: command lines that repeat the runs, by name of the run.
        seconds: wall time of everything.
    """

    plan: DemoPlan
    kind: str = "auto"
    notes: list[str] = field(default_factory=list)
    records: dict[str, RunRecord] = field(default_factory=dict)
    commands: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


class Watcher(Protocol):
    """Observer of the demonstration's progress."""

    def begin(self, run: Run, lab: Lab) -> None:
        """Take notice that a run starts."""

    def update(self, run: Run, record: RunRecord) -> None:
        """Take notice that a run has written something, or that time has passed."""

    def finish(self, run: Run, record: RunRecord) -> None:
        """Take notice that a run has ended well."""


def run_all(plan: DemoPlan, out: Path, watcher: Watcher, *, kind: str = "auto") -> Outcome:
    """Run everything that ``plan`` asks for, into folders of ``out`` named after the runs.

    Raises:
        ConfigError: the plan cannot be run.
        LabError: this machine cannot bring up a lab of that kind.
        RunFailedError: a run failed.
    """
    plan.check()
    start = time.monotonic()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {out}: {error.strerror}") from error
    outcome = Outcome(plan)
    with Lab(plan.hosts, plan.rate, kind=kind) as shaped:
        outcome.kind, outcome.notes = shaped.kind, list(shaped.notes)
        for run in plan.runs(shaped=shaped.kind != "shared-memory"):
            with _lab_for(run, shaped) as lab:
                folder = out / run.name
                _forget(folder)
                outcome.commands[run.name] = _shown(plan, run, folder)
                outcome.records[run.name] = _run(plan, run, lab, folder, watcher)
    outcome.seconds = time.monotonic() - start
    return outcome


@contextlib.contextmanager
def _lab_for(run: Run, shaped: Lab) -> Iterator[Lab]:
    """Return the lab at the run's rate: the one that is up, or another beside it."""
    if run.rate == str(shaped.rate):
        yield shaped
    else:
        with Lab(shaped.hosts, run.rate, kind=shaped.kind) as other:
            yield other


def _shown(plan: DemoPlan, run: Run, folder: Path) -> str:
    lab = ["hybridcomp", "lab", "-n", str(plan.hosts), "--ppn", str(plan.ppn), "--rate", run.rate, "--"]
    return shlex.join([*lab, *plan.command(run, folder)])


def _forget(folder: Path) -> None:
    """Remove what an earlier demonstration left, and nothing else."""
    for name in ("metrics.jsonl", "config.toml", "log.txt"):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def _run(plan: DemoPlan, run: Run, lab: Lab, folder: Path, watcher: Watcher) -> RunRecord:
    folder.mkdir(parents=True, exist_ok=True)
    record = RunRecord(run.name)
    watcher.begin(run, lab)
    train_in(lab, plan.command(run, folder), plan.ppn, folder, record, lambda: watcher.update(run, record))
    watcher.update(run, record)
    watcher.finish(run, record)
    return record

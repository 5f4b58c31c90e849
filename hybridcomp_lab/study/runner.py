"""Run a study in labs, one run after the other; keep runs that an earlier call has finished."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from hybridcomp import __version__
from hybridcomp.errors import ConfigError, printable
from hybridcomp.files import checked, read_json, write_text
from hybridcomp.net import Lab
from hybridcomp.policy.load import default_policy, load_policy
from hybridcomp.policy.toml import parse_policy
from hybridcomp.results.provenance import commit
from hybridcomp.results.record import Follower, RunRecord
from hybridcomp_lab.demo.training import train_in
from hybridcomp_lab.study.plan import Run, Study

RECORD = "run.json"
BEGUN = "begun.json"
METRICS = "metrics.jsonl"
_RECORD = {"identity": dict, "command": str, "kind": str, "diverged": bool, "commit?": str}


@dataclass(frozen=True)
class Done:
    """Run that has ended.

    Attributes:
        run: run that ended.
        record: metrics of the run; without a summary if it diverged.
        command: command line that repeats it.
        kind: kind of the lab that it ran in.
        commit: commit whose code ran; empty if it is not known.
    """

    run: Run
    record: RunRecord
    command: str
    kind: str
    commit: str = ""

    @property
    def diverged(self) -> bool:
        """Tell whether the loss became infinite or no number, which ends a run."""
        return not self.record.summary


class Watcher(Protocol):
    """Observer of a study's progress."""

    def begin(self, run: Run) -> None:
        """Take notice that a run starts."""

    def update(self, run: Run, record: RunRecord) -> None:
        """Take notice that a run has written something, or that time has passed."""

    def finish(self, run: Run, done: Done, *, kept: bool) -> None:
        """Take notice that a run has ended, or, if kept, had ended in an earlier call."""


def run_study(
    study: Study, out: Path, watcher: Watcher, *, part: str | None = None, kind: str = "auto"
) -> list[Done]:
    """Run the runs that are not done yet.

    Args:
        study: study to run.
        out: folder of the study's files; runs lie in ``out/runs``.
        watcher: observer of the progress.
        part: ``loss`` or ``speed`` alone; None runs both.
        kind: kind of lab.

    Returns:
        All runs, in order, those of earlier calls among them.

    Raises:
        LabError: this machine cannot bring up a lab of that kind.
        RunFailedError: a run failed, other than by a loss that diverged.
        ConfigError: the folder cannot be written to.
    """
    policies = _write_policies(study, out / "policies")
    try:
        (out / "runs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {printable(out)}: {error.strerror}") from error
    ended: dict[str, Done] = {}
    runs = study.runs(part)
    for run in runs:
        done = _find(study, run, out)
        if done is not None:
            ended[run.folder] = done
            watcher.finish(run, done, kept=True)
    to_run = (run for run in runs if run.folder not in ended)
    for (rate, cores), group in groupby(to_run, lambda run: (run.rate, run.cores)):
        with Lab(study.hosts, rate, kind=kind, cores=cores) as lab:
            for run in group:
                watcher.begin(run)
                ended[run.folder] = _run(study, run, lab, out, policies, watcher)
                watcher.finish(run, ended[run.folder], kept=False)
    return [ended[run.folder] for run in runs]


def find_runs(study: Study, out: Path) -> list[Done]:
    """Return the runs that have ended, in order; starts nothing."""
    found = (_find(study, run, out) for run in study.runs())
    return [done for done in found if done is not None]


def _write_policies(study: Study, folder: Path) -> dict[str, Path]:
    """Write the study's own policies to files, for the trainer to read."""
    files = {}
    for number, (name, text) in enumerate(study.policies.items()):
        safe = "".join(c if c.isalnum() or c in ".=-" else "_" for c in name)
        files[name] = folder / f"{number:02}-{safe}.toml"
        write_text(files[name], f"# {printable(name)}\n{text.rstrip()}\n")
    return files


def _identity(study: Study, run: Run) -> dict[str, Any]:
    """Return the settings that identify an earlier run as this one."""
    policy = run.fields.get("policy")
    if policy is None:
        rules = default_policy()
    else:
        text = study.policies.get(str(policy))
        rules = load_policy(str(policy)) if text is None else parse_policy(text, str(policy))
    return {
        "fields": dict(run.fields),
        "policy": rules.digest,
        "rate": run.rate,
        "hosts": study.hosts,
        "ppn": study.ppn,
        "version": __version__,
        **({} if run.cores is None else {"cores": run.cores}),
    }


def _find(study: Study, run: Run, out: Path) -> Done | None:
    """Return the run, if an earlier call has finished it."""
    folder = out / "runs" / run.folder
    record = RunRecord(run.name)
    try:
        kept = checked(read_json(folder / RECORD), _RECORD, str(folder / RECORD))
        if kept["identity"] != _identity(study, run):
            return None
        Follower(folder / METRICS, record).poll()
    except ConfigError:
        return None  # damaged, or not there
    if not (record.start and record.summary) and not kept["diverged"]:
        return None
    return Done(run, record, kept["command"], kept["kind"], kept.get("commit", ""))


def _run(study: Study, run: Run, lab: Lab, out: Path, policies: Mapping[str, Path], watcher: Watcher) -> Done:
    folder = out / "runs" / run.folder
    identity = _identity(study, run)
    _forget(folder, identity)
    write_text(folder / BEGUN, json.dumps(identity) + "\n")
    command = run.command(folder, policies)
    record = RunRecord(run.name)
    train_in(
        lab,
        command,
        study.ppn,
        folder,
        record,
        lambda: watcher.update(run, record),
        may_fail=lambda tail: "DivergedError" in tail,
    )
    shown = shlex.join(
        [
            "hybridcomp",
            "lab",
            "-n",
            str(study.hosts),
            "--ppn",
            str(study.ppn),
            "--rate",
            run.rate,
            *(() if run.cores is None else ("--cores", run.cores)),
            "--",
            *command,
        ]
    )
    done = Done(run, record, shown, lab.kind, commit())
    kept = {
        "identity": identity,
        "command": shown,
        "kind": lab.kind,
        "diverged": done.diverged,
        "commit": done.commit,
    }
    write_text(folder / RECORD, json.dumps(kept, indent=2) + "\n")
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # the run has ended
    return done


def _forget(folder: Path, identity: Mapping[str, Any]) -> None:
    """Remove what an earlier call left of the run, except for checkpoints of the same run to go on from."""
    try:
        same = read_json(folder / BEGUN) == identity
    except ConfigError:
        same = False
    if not (same and any((folder / "checkpoints").glob("step-*"))):
        (folder / METRICS).unlink(missing_ok=True)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    (folder / RECORD).unlink(missing_ok=True)

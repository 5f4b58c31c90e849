"""Run a comparison, one run after the other in turns; go on with one that was interrupted."""

from __future__ import annotations

import json
import math
import secrets
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hybridcomp import variables
from hybridcomp.compare.plan import BASELINE, PROFILED_STEPS, Candidate, Plan, environment_of
from hybridcomp.compare.processes import Here, InLab, place_of
from hybridcomp.errors import ConfigError, HybridcompError, printable
from hybridcomp.files import Log, checked, listed, read_bytes, read_json, write_text
from hybridcomp.plugin.recording import ALONE, DONE, EARLY, MADE, PROGRESS, SEEN

OUTPUT, BEGUN, RUN, RESULTS = "output.txt", "begun.json", "run.json", "results.json"
_POLL_SECONDS = 0.2
_LEAVE_SECONDS = 60.0  # from a program's last step to its end
_TAIL_LINES = 15
_NO_LAUNCHER = "environment variable RANK expected"  # what torch says then
_START = "start it by -n RANKS, or by torchrun, mpiexec or srun"
_UNSEEN = (
    "No process that imports torch has taken notice of the comparison: its Python must have hybridcomp, its launcher "
    "must hand on the environment's variables (srun --export=ALL; Open MPI's mpiexec to other hosts: -x "
    f"{variables.COMPARE.name} and so on), and all hosts must see the folder of --out"
)
_ENDED = "the program ended with exit status"
_RECORD = {"state": str, "rank": int}
_WHOLE = {
    "size": int,
    "host": str,
    "hostname": str,
    "backend": str,
    "seconds": [float],
    "loss": [float | None],
    "not_finite": [int],
    "sent_bytes": int | None,
    "counted_bytes": int | None,
    "counted_all_bytes": int | None,
    "memory_bytes": int,
    "device": str,
    "device_memory_bytes": int | None,
    "waiting": float | None,
}


class ProgramError(HybridcompError, RuntimeError):
    """Program that cannot be compared: it trains alone, steps no optimizer, or too few times, or fails as it is."""


@dataclass(frozen=True)
class Done:
    """Run that has ended.

    Attributes:
        candidate: candidate that it was under.
        round: number of the round, from 1.
        records: what each rank has recorded, by rank; empty if the program failed.
        failure: why it has no records, in words; None where it has.
        output: file with the program's output.
    """

    candidate: Candidate
    round: int
    records: Sequence[Mapping[str, Any]]
    failure: str | None
    output: Path


class Watcher(Protocol):
    """Observer of a comparison's progress."""

    def begin(self, candidate: Candidate, number: int) -> None:
        """Take notice that a run of a round starts."""

    def update(self, steps: int, loss: float | None) -> None:
        """Take notice of a run's steps, and its latest loss where one is known."""

    def finish(self, done: Done, *, kept: bool) -> None:
        """Take notice that a run has ended, or, if kept, had ended in an earlier call."""


def run_comparison(plan: Plan, out: Path, watcher: Watcher) -> tuple[list[Done], list[str]]:
    """Run what an interrupted comparison has not run yet, or all.

    A candidate under which the program fails is not run again.

    Args:
        plan: plan to carry out.
        out: folder of its files; the ranks must find it, too.
        watcher: observer of the progress.

    Returns:
        All runs, and sentences on what the lab could not do as asked.

    Raises:
        ProgramError: the program cannot be compared.
        LabError: this machine cannot bring up the lab.
        ConfigError: the folder cannot be written to, or there is no such program.
    """
    plan.check()
    out = out.absolute()
    token = _begin(plan, out)
    ended: list[Done] = []
    failed: set[str] = set()
    with place_of(plan) as place:
        for number in range(1, plan.rounds + 1):
            for candidate in plan.candidates:
                if candidate.name in failed:
                    continue
                folder = out / "runs" / f"{number:02}-{candidate.folder}"
                done = _find(folder, token, candidate, number)
                kept = done is not None
                if done is None:
                    watcher.begin(candidate, number)
                    done = _run(plan, place, candidate, number, folder, watcher)
                    ended_as = {"token": token, "policy": candidate.digest, "failure": done.failure}
                    write_text(folder / RUN, json.dumps(ended_as) + "\n")
                if done.failure is not None:
                    if candidate.name == BASELINE:
                        raise ProgramError(done.failure)
                    failed.add(candidate.name)
                watcher.finish(done, kept=kept)
                ended.append(done)
    return ended, place.notes


def _begin(plan: Plan, out: Path) -> str:
    """Return the mark of the comparison that this call goes on with, or of a new one."""
    identity = plan.identity()
    try:
        begun = checked(read_json(out / BEGUN), {"identity": dict, "token": str}, str(out / BEGUN))
        if begun["identity"] == identity:
            return str(begun["token"])
    except ConfigError:
        pass  # none was begun, or its mark is damaged
    token = secrets.token_hex(8)
    write_text(out / BEGUN, json.dumps({"identity": identity, "token": token}) + "\n")
    (out / RESULTS).unlink(missing_ok=True)
    return token


def end_comparison(out: Path) -> None:
    """Say that a comparison has its results: the next one begins anew."""
    (out / BEGUN).unlink(missing_ok=True)


def _find(folder: Path, token: str, candidate: Candidate, number: int) -> Done | None:
    """Return the run, if this comparison has finished it."""
    try:
        known = {"token": str, "policy": str, "failure": str | None}
        kept = checked(read_json(folder / RUN), known, str(folder / RUN))
        if (kept["token"], kept["policy"]) != (token, candidate.digest):
            return None
        if kept["failure"] is not None:
            return (
                None
                if candidate.name == BASELINE
                else Done(candidate, number, [], kept["failure"], folder / OUTPUT)
            )
        return Done(candidate, number, _read(folder), None, folder / OUTPUT)
    except (ConfigError, ProgramError):
        return None


def _run(
    plan: Plan, place: InLab | Here, candidate: Candidate, number: int, folder: Path, watcher: Watcher
) -> Done:
    """Run the program once, under one candidate."""
    for path in [
        folder / PROGRESS,
        folder / SEEN,
        folder / RUN,
        *listed(folder, "rank-*.json"),
        *listed(folder, f"{MADE}-*"),
    ]:
        path.unlink(missing_ok=True)
    plan_of_ranks = {"warmup": plan.warmup, "steps": plan.steps, "profiled": PROFILED_STEPS}
    write_text(folder / "plan.json", json.dumps(plan_of_ranks) + "\n")
    environment = {**environment_of(candidate), variables.COMPARE.name: str(folder)}
    with Log(folder / OUTPUT) as output:
        process = place.start(environment, output)
        try:
            silent = _follow(process, plan, folder, watcher)
            if silent is not None:
                place.end(process)
        except BaseException:
            place.end(process)
            raise
    failure = silent
    records: list[dict[str, Any]] = []
    if failure is None:
        try:
            records = _read(folder)
        except ProgramError as error:
            failure = str(error) if process.returncode == 0 else None
        if process.returncode != 0 and not records:
            failure = failure or f"{_ENDED} {process.returncode}"
    if records and candidate.name != BASELINE and not any(one["counted_all_bytes"] for one in records):
        what = (
            "makes no group of gloo or nccl"
            if variables.REPLACE.name in candidate.variables
            else "wraps no module in DistributedDataParallel, or has a hook of its own"
        )
        records, failure = [], f"nothing was compressed: the program {what}"
    if failure is not None:
        failure = _explained(failure, plan, folder)
    return Done(candidate, number, records, failure, folder / OUTPUT)


def _follow(process: subprocess.Popen[Any], plan: Plan, folder: Path, watcher: Watcher) -> str | None:
    """Follow a run to its end; return why it must be ended, if it must."""
    last, steps = time.monotonic(), 0
    finished: float | None = None
    while process.poll() is None:
        now = time.monotonic()
        try:
            told = checked(read_json(folder / PROGRESS), {"steps": int, "loss": float | None}, PROGRESS)
        except ConfigError:
            told = {"steps": 0, "loss": None}  # not there yet
        if told["steps"] > steps:
            last, steps = now, told["steps"]
        watcher.update(steps, told["loss"])
        if finished is None and _all_there(folder):
            finished = now
        if finished is not None:
            if now - finished > _LEAVE_SECONDS:
                return (
                    None
                    if _end_politely(process)
                    else f"it did not end in {_LEAVE_SECONDS:g} s after its last step"
                )
        elif now - last > plan.limit:
            if not steps:
                return f"the first step had not ended after {plan.limit:g} s (--limit)"
            return f"no step ended for {plan.limit:g} s (--limit), {steps} or more having been made"
        time.sleep(_POLL_SECONDS)
    return None


def _end_politely(process: subprocess.Popen[Any]) -> bool:
    process.terminate()
    try:
        process.wait(_POLL_SECONDS * 50)
    except subprocess.TimeoutExpired:
        return False
    return True


def _all_there(folder: Path) -> bool:
    """Tell whether all ranks have written their record, and all of it."""
    try:
        return all(record["state"] == DONE for record in _read(folder))
    except (ConfigError, ProgramError):
        return False


def _read(folder: Path) -> list[dict[str, Any]]:
    """Return the records of all ranks, by rank.

    Raises:
        ProgramError: not all ranks have come to the last step, or they are ranks of several jobs.
    """
    records: list[dict[str, Any]] = []
    for path in listed(folder, "rank-*.json"):
        record = checked(read_json(path), _RECORD, str(path))
        if record["state"] == ALONE:
            raise ProgramError(
                f"the program trains on one rank alone: {_START}"
                if record.get("distributed")
                else "the program trains without torch.distributed: it makes no process group, so it sends nothing. "
                f"If it makes one where it has several ranks, {_START}"
            )
        if record["state"] == EARLY:
            count = checked(record, {"count": int}, str(path))["count"]
            raise ProgramError(f"the program made {count} optimizer steps")
        record = checked(record, _WHOLE, str(path))
        lost = set(record["not_finite"])
        record["loss"] = [math.nan if step in lost else loss for step, loss in enumerate(record["loss"])]
        records.append(record)
    if not records:
        raise ProgramError(
            "the program stepped no optimizer of PyTorch, whose steps are counted (torch.optim.Optimizer.step)"
        )
    ended_as = Counter(path.name.split("-")[1] for path in listed(folder, f"{MADE}-*"))
    for rank, count in ended_as.items():
        if count > 1:
            raise ProgramError(
                f"{count} processes were rank {rank} at once: each that was started has started ranks of its own. "
                "Where -n or --lab starts the ranks, what comes after -- is the program without torchrun, mpiexec or "
                "srun"
            )
    size = records[0]["size"]
    if len(records) != size:
        raise ProgramError(f"{len(records)} of {size} ranks stepped an optimizer often enough")
    return sorted(records, key=lambda one: int(one["rank"]))


def _explained(failure: str, plan: Plan, folder: Path) -> str:
    """Return a failure with what to do about it, and the end of the program's output."""
    if "optimizer steps" in failure:
        failure += (
            f", and {plan.needed} are needed ({plan.warmup} to warm up, {plan.steps} measured, {PROFILED_STEPS} "
            "profiled): have it train longer, or ask for fewer by --steps and --warmup"
        )
    lines = printable(read_bytes(folder / OUTPUT).decode(errors="replace"), keep="\n\t").splitlines()
    if not (folder / SEEN).exists() and not failure.startswith(_ENDED):  # else its output tells what happened
        failure += f". {_UNSEEN}"
    if any(_NO_LAUNCHER in line for line in lines):
        failure += f". No launcher has told it which rank it is: {_START}"
    tail = "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])
    return f"{failure}; its output: {folder / OUTPUT}" + (f", which ends with\n{tail}" if tail else "")

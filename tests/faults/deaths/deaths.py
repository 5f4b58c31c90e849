"""Interrupt, stop or kill a rank at any instant: those that live have an error in time, or the right bits."""

from __future__ import annotations

import json
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.faults.deaths.jobs import Job
from tests.faults.outcome import Outcome

#: Where the signal comes, and how often that is drawn beside the others.
PLACES = {"operations": 6, "callbacks": 2, "making": 2, "splitting": 2, "rendezvous": 1, "exit": 2}
#: Signals; the launcher learns of SIGTERM without a handler and of SIGKILL, or not.
SIGNALS = ("SIGINT", "SIGTERM", "SIGSTOP", "SIGTERM death", "SIGKILL", "SIGTERM death, kept", "SIGKILL, kept")
_START_SECONDS = 40.0
_END_SECONDS = 45.0
_LAUNCHER_SECONDS = 15.0  # in which the launcher ends a job after it has seen a rank die
_BRIEF = 3.0  # timeout where an operation may have to fail
_LONG = 20.0
_LATE = 6.0  # seconds that an error may come after its timeout, on a machine with more to do
_UNREADABLE = "process_vm_readv failed"  # MPI's error about the memory of a process that has died
_MAKING = ("making", "splitting", "rendezvous")
_KINDS = ("CollectiveTimeoutError", "RemoteError")
_COUNT = 16  # operations; the signal comes from one of the first on


def scenario(seed: int, place: str | None = None, sent: str | None = None) -> Outcome:
    """Send a signal to one of 2 to 5 ranks, while they do something; see :mod:`.death_ranks`.

    Args:
        seed: decides all.
        place: one of :data:`PLACES`, instead of one that is drawn.
        sent: one of :data:`SIGNALS`, likewise.

    Raises:
        AssertionError: a rank that lives has wrong bits, no error, a late one or one that does not name the rank; the
            job does not end; something is left of it.
    """
    random_ = random.Random(seed)
    drawn = random_.choices(list(PLACES), list(PLACES.values()))[0], random_.choice(SIGNALS)
    place, sent = place or drawn[0], sent or drawn[1]
    ranks = random_.randint(2, 5)
    victim = random_.randrange(ranks)
    lethal = "death" in sent or "SIGKILL" in sent
    # MPI_Finalize waits without a limit for a rank that has died in it, unless the launcher ends the job.
    kept = "kept" in sent and place != "exit"
    pause = random_.choice([0.05, 0.5, 1.0, _BRIEF + 2.0])
    brief = lethal or (sent == "SIGSTOP" and pause > _BRIEF) or place == "exit"
    brief = brief or (place in _MAKING and sent in ("SIGINT", "SIGTERM"))
    plan = {
        "seed": seed,
        "place": place,
        "signal": sent,
        "lethal": lethal,
        "kept": kept,
        "victim": victim,
        "at": random_.randrange(6),
        "operations": _COUNT,
        "timeout": _BRIEF if brief else _LONG,
        "hosts": random_.choice([[0] * ranks, [2 * r // ranks for r in range(ranks)], list(range(ranks))]),
    }
    delays = [random_.uniform(0, 0.03)] + [random_.uniform(0, 0.02) for _ in range(random_.randrange(4))]
    with tempfile.TemporaryDirectory(prefix="hybridcomp-faults-") as name:
        folder = Path(name)
        (folder / "plan.json").write_text(json.dumps(plan))
        with Job(folder, ranks, ["tests.faults.deaths.death_ranks"], ranks - 1 if kept else None) as job:
            try:
                job.armed(_START_SECONDS)
                _send(job, plan, pause, delays)
                status = job.end(_LAUNCHER_SECONDS if lethal and not kept else _END_SECONDS)
                logs = [job.log(rank) for rank in range(ranks)]
                _judge(plan, pause, status, logs, ended=lethal and not kept)
            except AssertionError as error:
                raise AssertionError(
                    f"deaths:{seed}: {plan}, pause {pause}, delays {delays}: {error}"
                ) from error
    return _outcome(plan, logs)


def _send(job: Job, plan: dict[str, Any], pause: float, delays: list[float]) -> None:
    victim, sent = plan["victim"], plan["signal"].split()[0].rstrip(",")
    number = getattr(signal, sent)
    once = plan["lethal"] or sent == "SIGSTOP" or plan["place"] == "exit"
    for delay in delays[:1] if once else delays:
        time.sleep(delay)
        job.send(victim, number)
    if sent == "SIGSTOP":
        time.sleep(pause)
        job.send(victim, signal.SIGCONT)


def _judge(
    plan: dict[str, Any], pause: float, status: int, logs: list[list[dict[str, Any]]], *, ended: bool
) -> None:
    """Compare what ranks have written with what is promised."""
    victim, sent, place = plan["victim"], plan["signal"], plan["place"]
    lines = [line for log in logs for line in log]
    bits: dict[str, set[str]] = {}
    for line in lines:
        assert line["said"] != "WRONG", f"wrong bits: {line}"
        if line["said"] == "right" and line["common"]:
            bits.setdefault(line["what"], set()).add(line["bits"])
    differ = [what for what, several in bits.items() if len(several) > 1]
    assert not differ, f"ranks have different bits: {differ}"
    failures = [(rank, line) for rank, log in enumerate(logs) for line in log if "seconds" in line]
    for rank, line in failures:
        # MPI has an error of its own about a rank that has died: it cannot read that one's memory.
        kinds = _KINDS + ("Exception",) * plan["lethal"] + ("DistNetworkError",) * (place == "rendezvous")
        assert line["said"] in kinds, f"rank {rank}: {line}"
        assert line["seconds"] < _bound(plan, line), f"rank {rank} has a late error: {line}"
    if ended:
        assert status != 0, "the launcher has not seen the death"
        return
    if place == "exit":
        assert sent != "SIGSTOP" or status == 0 or pause > _BRIEF, f"exit status {status}"
        return
    alive = [rank for rank in range(len(logs)) if not (plan["lethal"] and rank == victim)]
    for rank in alive:
        assert any(line["said"] == "reached" for line in logs[rank]), f"rank {rank} has not come to its end"
    first = {rank: line for rank, line in reversed(failures) if line["what"] != "afterwards"}
    if plan["lethal"]:
        for rank, line in first.items():
            assert _names(victim, line), f"rank {rank}: {line}"
        if place in ("operations", "callbacks"):
            silent = [rank for rank in alive if rank not in first]
            done = len([line for line in logs[victim] if line["said"] == "right"]) == plan["operations"]
            assert done or not silent, f"ranks {silent} have no error"
    elif sent == "SIGSTOP" and pause < _BRIEF:
        assert not failures, f"a rank was stopped for {pause} s: {failures[0]}"
    elif sent != "SIGSTOP" and place in ("operations", "callbacks"):
        assert not failures, f"an interrupt is an error elsewhere: {failures[0]}"
    again = [line for _, line in failures if line["what"] == "afterwards"]
    assert not again or place in _MAKING, f"what comes afterwards fails: {again[0]}"


def _names(victim: int, line: dict[str, Any]) -> bool:
    """Tell whether an error names the rank that is gone, where it can be known; or else the operation."""
    if "Case(kind='send'" in line["what"]:  # the peer may have failed in an operation before
        return "still waiting for rank" in line["text"] or line["said"] == "Exception"
    if line["what"].startswith(("communicator", "group")):  # while MPI makes it, nobody can be asked
        return True
    if _UNREADABLE in line["text"]:  # MPI sees it first, and does not say whose
        return " number " in line["text"]
    return f"rank {victim}" in line["text"]


def _bound(plan: dict[str, Any], line: dict[str, Any]) -> float:
    if line["what"] == "afterwards":
        return 3 * _LONG
    waits = 3 if plan["place"] in _MAKING else 1  # to meet, to exchange, to make
    return float(waits * plan["timeout"] + _LATE)


def _outcome(plan: dict[str, Any], logs: list[list[dict[str, Any]]]) -> Outcome:
    done = Outcome(faults=Counter([f"{plan['signal']} in {plan['place']}"]))
    for log in logs:
        done.outcomes += Counter(line["said"] for line in log if line["said"] != "reached")
    done.operations = max(sum("bits" in line or "seconds" in line for line in log) for log in logs)
    if plan["lethal"]:
        done.outcomes["killed"] += 1
    return done

"""``hybridcomp top``: what ranks say of themselves, who may say it, and what is made of it."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridcomp.steps import NO_STEPS
from hybridcomp.top.folder import file_name, machine, started_at
from hybridcomp.top.snapshot import AxisTotals, CommunicatorState, InFlight, Snapshot, to_bytes

KEY = "8a63a6c1e8edeadd"


def totals(axis: str = "dp", calls: int = 10, **more: Any) -> AxisTotals:
    known = {"plain_bytes": 4000, "wire_bytes": 1000, "shared_bytes": 0, "between_bytes": 0}
    seconds = {"encode_seconds": 0.5, "wire_seconds": 4.0, "decode_seconds": 0.25}
    return AxisTotals(axis, calls, **(known | seconds | more))


def group(latest: int = 10, waited: float = 4.0, **more: Any) -> CommunicatorState:
    return replace(CommunicatorState(KEY, "dp", 2, latest, waited), **more)


def flying(since: float, number: int = 11, awaits: tuple[int, ...] = (), **more: Any) -> InFlight:
    return replace(InFlight("all_reduce", "dp", KEY, number, since, awaits), **more)


def snapshot(rank: int = 0, **more: Any) -> Snapshot:
    """Return what a rank says; its process is this one."""
    pid = os.getpid()
    made = Snapshot(
        rank=rank,
        size=2,
        pid=pid,
        started=started_at(pid),
        host="here",
        machine=machine(),
        program="train.py --pp 2",
        launcher="",
        since=time.time() - 60,
        at=time.time(),
        steps=NO_STEPS,
        axes=(totals(),),
        groups=(group(),),
        in_flight=(),
        unlisted=0,
    )
    return replace(made, **more)


def keep(folder: Path, says: Snapshot) -> Path:
    """Write a rank's file as ranks do, under a name that its number makes one of its own."""
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / file_name(says.pid, says.started + says.rank)
    path.write_bytes(to_bytes(says))
    return path


def dead(**more: Any) -> Snapshot:
    """Return what a rank has said whose process is gone: its id is another's now."""
    says = snapshot(**more)
    return replace(says, started=says.started + 1)

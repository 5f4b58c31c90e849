"""Cost of `hybridcomp top` to a job: ``mpiexec -n 2 python benchmarks/watched.py --json watched.json``.

Short parts of equally many all-reduces follow each other: without the thread that keeps the rank's file ("off"), with
it while nobody watches ("looks"), and while someone does ("files"). The thread looks, or writes its file, some hundred
times as often as in a job, where its time is far less than the difference between two parts. A round has one of each,
in an order that changes. The excess time of a part over one without the thread, divided by the number of looks or files
in it, is the cost of one, in ``microseconds`` of the slowest rank: by the medians of all parts, and by their quickest
tenths, in which other programs on the same cores have taken least. ``share`` is the median's in a job, where there is
one look in a second, or two files. ``processor`` is the thread's own time, by its own clock. Results are checked.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from resultfile import write

import hybridcomp as hc
from hybridcomp.top import publish
from hybridcomp.top.publish import Entry, Publisher
from hybridcomp.top.read import watch

WORLD = MPI.COMM_WORLD
SIZES = [4 << 10, 256 << 10]
KINDS = ("off", "looks", "files")
IN_A_JOB = {"looks": 1 / publish._LOOK_SECONDS, "files": 1 / publish._WRITE_SECONDS}
_FOLDER = WORLD.bcast(tempfile.mkdtemp(prefix="watched-") if WORLD.rank == 0 else None)


class Counting(Publisher):
    """The publishing thread, with a count of its looks."""

    looks = 0

    def _watched(self, path: str) -> bool:
        self.looks += 1
        return super()._watched(path)


def part(
    comm: hc.Communicator, x: np.ndarray, y: np.ndarray, kind: str, calls: int
) -> tuple[float, float, float]:
    """Return the seconds of ``calls`` calls, the number of the thread's looks, and its processor time."""
    publisher, clock = None, 0
    if kind != "off":
        publisher = Counting(WORLD.rank, WORLD.size)
        publisher.add(Entry(comm.session, comm.session.table.rows))
        publisher.start()
        until(lambda: publisher.looks > 0)
        if kind == "files":
            watch(Path(_FOLDER))
            until(lambda: publisher._until > 0)
        assert publisher._thread is not None
        clock = time.pthread_getcpuclockid(publisher._thread)
    time.sleep(0.01)
    WORLD.Barrier()
    looks, used = (publisher.looks, time.clock_gettime(clock)) if publisher else (0, 0.0)
    began = time.perf_counter()
    for _ in range(calls):
        comm.Allreduce(x, y)
    seconds = time.perf_counter() - began
    if publisher is None:
        return seconds, 0.0, 0.0
    looks, used = publisher.looks - looks, time.clock_gettime(clock) - used
    assert (publisher._until > time.monotonic()) == (kind == "files"), "a part takes too long"
    publisher.stop()
    return seconds, looks, used


def until(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "the thread does not look"
        time.sleep(1e-3)


def measure(nbytes: int, rounds: int, seconds: float) -> dict[str, Any]:
    os.environ["HYBRIDCOMP_TOP"] = "0"  # so that a communicator starts no thread by itself
    comm = hc.Communicator(WORLD, "none", "dp")
    os.environ["HYBRIDCOMP_TOP"] = _FOLDER
    x = np.arange(nbytes // 4, dtype=np.float32) + WORLD.rank
    y = np.empty_like(x)
    took = np.array(min(part(comm, x, y, "off", 100)[0] for _ in range(5)))
    WORLD.Bcast(took)
    calls = max(10, int(seconds / took * 100))
    found = np.empty((rounds, len(KINDS), 3))
    for i in range(rounds):
        for place in range(len(KINDS)):
            kind = (place + i) % len(KINDS)
            found[i, kind] = part(comm, x, y, KINDS[kind], calls)
    wanted = WORLD.size * np.arange(nbytes // 4, dtype=np.float32) + WORLD.size * (WORLD.size - 1) / 2
    correct = WORLD.allreduce(bool(np.array_equal(y, wanted)), op=MPI.LAND)
    comm.Free()
    slowest = np.empty_like(found)
    WORLD.Allreduce(found, slowest, MPI.MAX)
    row: dict[str, Any] = {
        "bytes": nbytes,
        "ranks": WORLD.size,
        "calls": calls,
        "rounds": rounds,
        "correct": correct,
    }
    row["off"] = {"call_microseconds": round(float(np.median(slowest[:, 0, 0])) / calls * 1e6, 2)}
    for kind, name in enumerate(KINDS[1:], 1):
        each = slowest[:, kind, 1].mean()
        if not each:
            raise SystemExit(f"no look within {seconds:g} s: --seconds must be more")
        quick, middle = np.quantile(slowest[:, kind, 0], (0.1, 0.5)) - np.quantile(
            slowest[:, 0, 0], (0.1, 0.5)
        )
        row[name] = {
            "a_part": round(float(each), 1),
            "over": round(float(np.median(slowest[:, kind, 0] / slowest[:, 0, 0])), 3),
            "microseconds": round(float(middle / each) * 1e6, 1),
            "quickest_microseconds": round(float(quick / each) * 1e6, 1),
            "share": round(float(middle / each) * IN_A_JOB[name], 6),
            "processor_microseconds": round(float(slowest[:, kind, 2].mean() / each) * 1e6, 1),
        }
    return row


def main() -> None:
    """Print a line for each size on rank 0; exit with 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=0.05, help="of a part")
    parser.add_argument("--every", type=float, default=5e-3, help="seconds between looks, and between files")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    publish._LOOK_SECONDS = publish._WRITE_SECONDS = args.every
    rows = []
    for nbytes in SIZES:
        row = measure(nbytes, args.rounds, args.seconds)
        rows.append(row)
        if WORLD.rank == 0:
            print(json.dumps(row), flush=True)
    if WORLD.rank == 0 and args.json is not None:
        write(args.json, {"rows": rows})
    if not all(row["correct"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()

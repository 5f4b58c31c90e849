"""Measure how much of an all-reduce hides behind computation: ours by codec, MPI's own, and gloo's.

mpirun -n 2 python benchmarks/overlap.py --codec int8,int4 --size 16M --peer mpi,gloo
hybridcomp lab -n 2 --rate 1gbit -- python benchmarks/overlap.py --codec int8 --size 64M

The computation is products of matrices on one thread of every rank, as many as take as long as the operation alone.
Operation, computation, and both at once take turns. ``hidden`` is the share of the operation that cost no time;
``slowdown`` is how much longer the computation took while the operation ran. MPI's own Iallreduce makes progress in a
thread that polls it every 200 us, the best found for MPICH; gloo has threads of its own.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import harness
import numpy as np
from allreduce import OPERATION
from collbench import output, peers
from collbench.elements import Elements
from collbench.figures import Values, hidden
from collbench.link import Link
from harness import WORLD, Side
from mpi4py import MPI
from resultfile import write

import hybridcomp as hc

_SIDE = 192  # side of the matrices, whose product is short beside any message and releases the GIL
_POLL = 200e-6  # seconds between a thread's looks at MPI's request
_PROBES = 3


@dataclass(frozen=True)
class Row:
    """Figures of one codec or peer: medians of the slowest rank, in seconds; ``hidden`` and ``slowdown`` are shares."""

    size: int
    kind: str
    name: str
    communication: float
    computation: float
    both: float
    hidden: float
    slowdown: float
    relative_error: float

    def line(self) -> str:
        """Return the row as text."""
        times = " ".join(f"{x * 1e3:>10.2f}" for x in (self.communication, self.computation, self.both))
        return f"{self.size:>12} {self.name:>26} {times} {self.hidden:>8.2f} {self.slowdown:>9.1%}"


HEADER = "\n".join(
    (
        f"{'size':>12} {'codec or peer':>26} {'operation':>10} {'compute':>10} {'both':>10} {'hidden':>8} "
        f"{'slowdown':>9}",
        f"{'(B)':>12} {'':>26} {'(ms)':>10} {'(ms)':>10} {'(ms)':>10}",
    )
)


class Computation:
    """A computation of as many products of matrices as :meth:`last` has chosen."""

    def __init__(self) -> None:
        self._a = np.random.default_rng(1).standard_normal((_SIDE, _SIDE)).astype(np.float32) / _SIDE
        self._out = np.empty_like(self._a)
        self._count = 1
        self.seconds = 0.0

    def __call__(self) -> None:
        """Compute, and keep the seconds that it took."""
        began = time.perf_counter()
        for _ in range(self._count):
            np.matmul(self._a, self._a, out=self._out)
        self.seconds = time.perf_counter() - began

    def last(self, seconds: float, timed: Callable[[Callable[[], Any]], float]) -> None:
        """Choose how many products take ``seconds`` while every rank computes."""
        self._count = 100
        for _ in range(_PROBES):
            each = timed(self) / self._count
            self._count = max(1, WORLD.bcast(round(seconds / each)))


def polled(post: Callable[[], MPI.Request]) -> Callable[[], Any]:
    """Start an operation of MPI's with a thread that makes it progress; return a function that waits for it."""
    request = post()

    def poll() -> None:
        while not request.Test():
            time.sleep(_POLL)

    thread = threading.Thread(target=poll)
    thread.start()
    return thread.join


def measure(
    side: Side,
    start: Callable[[], Callable[[], Any]],
    args: Any,
    before: Callable[..., None],
    after: Callable[..., None],
) -> tuple[float, float, float, float]:
    """Return the seconds of the operation, of the computation, of both, and of the computation in both."""
    link, compute = Link(), Computation()

    def timed(run: Callable[[], Any]) -> float:
        with harness.bounded(args.timeout):
            return harness.timed(run, link)[0]

    def alone() -> None:
        start()()

    def together() -> None:
        wait = start()
        compute()
        wait()

    first = []
    for _ in range(args.warmup + _PROBES):
        before(side, False)
        first.append(timed(alone))
    compute.last(statistics.median(first[args.warmup :]), timed)
    seconds: list[list[float]] = [[], [], [], []]
    for i in range(args.iters):
        before(side, False)
        seconds[0].append(timed(alone))
        seconds[1].append(timed(compute))
        before(side, i == args.iters - 1)
        seconds[2].append(timed(together))
        seconds[3].append(WORLD.allreduce(compute.seconds, op=MPI.MAX))
    after(side)
    operation, computation, both, inside = (statistics.median(column) for column in seconds)
    return operation, computation, both, inside


def rows_of(size: int, values: Values, args: Any) -> list[Row]:
    """Measure all codecs and peers at one size."""
    elements = values.elements
    n = max(1, size // elements.storage.itemsize)
    send = values.of(WORLD.rank, n)
    recv = np.empty_like(send)
    x, y = elements.handed(send), elements.handed(recv)
    pieces = OPERATION.pieces(WORLD.rank, WORLD.size, n)
    comm = hc.Communicator(WORLD, "none", "dp", timeout=args.timeout)
    starts: list[tuple[Side, Callable[[], Callable[[], Any]]]] = [
        (
            Side("ours", spec, lambda: None, comm),
            lambda spec=spec: comm.Iallreduce(x, y, codec=spec).wait,
        )
        for spec in args.codec
    ]
    for peer in args.peer:
        if peer == "mpi":
            starts.append(
                (Side(peer, peer, lambda: None), lambda: polled(lambda: WORLD.Iallreduce(send, recv)))
            )
        else:
            dist, tensor = peers.gloo(args.timeout), elements.tensor(recv)
            starts.append(
                (
                    Side(peer, peer, lambda: None),
                    lambda dist=dist, tensor=tensor: dist.all_reduce(tensor, async_op=True).wait,
                )
            )
    rows = []
    for side, start in starts:
        before = harness.filler(OPERATION, elements, send, recv)
        operation, computation, both, inside = measure(
            side, start, args, before, lambda side: harness.check(OPERATION, side, recv, values, pieces)
        )
        rows.append(
            Row(
                size,
                side.kind,
                side.name,
                operation,
                computation,
                both,
                hidden(operation, computation, both),
                inside / computation - 1,
                side.error,
            )
        )
    comm.Free()
    return rows


def main() -> None:
    args = harness.parse(harness.parser(__doc__))

    def work() -> None:
        harness.say(f"# overlap of an all-reduce, {args.dtype}, {WORLD.size} ranks")
        harness.say(HEADER)
        values, rows = Values(Elements(args.dtype)), []
        for size in args.size:
            for row in rows_of(size, values, args):
                harness.say(row.line())
                rows.append(row)
        record = output.record("overlap", args, rows, [])
        if WORLD.rank == 0 and args.json is not None:
            write(args.json, record)

    harness.run(work)


if __name__ == "__main__":
    main()

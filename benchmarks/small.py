"""Blocking operations on small messages beside mpi4py's: ``mpiexec -n 2 python benchmarks/small.py --json small.json``.

One call of ours and one of mpi4py's alternate, so that both see the same machine; a figure is a median over the calls
of the slowest rank, and ``over`` is ours over mpi4py's. A policy's codec compresses from its ``min_bytes`` on alone, so
that messages here go as they are. Every result is checked.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI
from resultfile import write

import hybridcomp as hc
from hybridcomp.policy.rules import Policy, Rule

WORLD = MPI.COMM_WORLD
SIZES = [4 << 10, 16 << 10, 64 << 10]
Call = Callable[[Any], None]


def operations(nbytes: int) -> dict[str, tuple[Call, np.ndarray, Callable[[], np.ndarray]]]:
    """Return by name a call on a communicator, its result, and a function that computes the right result."""
    n, p, rank = nbytes // 4, WORLD.size, WORLD.rank
    x = np.arange(n, dtype=np.float32) + rank
    total = p * np.arange(n, dtype=np.float32) + p * (p - 1) / 2
    reduced, spread = np.empty(n, np.float32), np.empty(n // p, np.float32)
    gathered, exchanged = np.empty(n // p * p, np.float32), np.empty(n // p * p, np.float32)
    part, given = x[: n // p].copy(), x[: n // p * p].copy()
    root = np.arange(n, dtype=np.float32)
    buf = root.copy() if rank == 0 else np.zeros(n, np.float32)
    received = np.zeros(n, np.float32)
    block = slice(rank * (n // p), (rank + 1) * (n // p))

    def pingpong(comm: Any) -> None:
        if rank == 0:
            comm.Send(root, 1, 3)
            comm.Recv(received, 1, 3)
        elif rank == 1:
            comm.Recv(received, 0, 3)
            comm.Send(received, 0, 3)

    every = [np.arange(n, dtype=np.float32) + r for r in range(p)]
    return {
        "allreduce": (lambda c: c.Allreduce(x, reduced), reduced, lambda: total),
        "reduce_scatter_block": (
            lambda c: c.Reduce_scatter_block(given, spread),
            spread,
            lambda: total[block],
        ),
        "allgather": (
            lambda c: c.Allgather(part, gathered),
            gathered,
            lambda: np.concatenate([e[: n // p] for e in every]),
        ),
        "alltoall": (
            lambda c: c.Alltoall(given, exchanged),
            exchanged,
            lambda: np.concatenate([e[block] for e in every]),
        ),
        "bcast": (lambda c: c.Bcast(buf, 0), buf, lambda: root),
        "sendrecv": (pingpong, received, lambda: root if rank < 2 else np.zeros(n, np.float32)),
    }


def measure(ours: hc.Communicator, bare: MPI.Comm, call: Call, calls: int) -> tuple[float, float]:
    """Return the median seconds of our call and of mpi4py's, on the slowest rank."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for i in range(2 * calls):
        comm = ours if i % 2 else bare
        began = perf_counter()
        call(comm)
        seconds[bool(i % 2)].append(perf_counter() - began)
    mine = np.array([np.median(seconds[True][calls // 10 :]), np.median(seconds[False][calls // 10 :])])
    slowest = np.empty_like(mine)
    bare.Allreduce(mine, slowest, MPI.MAX)
    return float(slowest[0]), float(slowest[1])


def main() -> None:
    """Print a line for each operation, size and policy on rank 0; exit with 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=2000, help="of each, for every figure")
    parser.add_argument("--op", help="one operation alone")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if WORLD.size < 2:
        sys.exit("a message needs two ranks: mpiexec -n 2 python benchmarks/small.py")
    bare = WORLD.Dup()
    policies = {
        "none": "none",
        "int8 from 1 MiB": Policy("int8", Rule((hc.get_codec("int8"),), min_bytes=1 << 20)),
    }
    rows = []
    for policy, given in policies.items():
        ours = hc.Communicator(WORLD, given)
        for nbytes in SIZES:
            for name, (call, result, want) in operations(nbytes).items():
                if args.op not in (None, name):
                    continue
                kept = result.copy()
                call(ours)
                good = bool(np.array_equal(result, want()))
                if name != "bcast":
                    result[:] = kept
                mine, theirs = measure(ours, bare, call, args.calls)
                good = WORLD.allreduce(good and bool(np.array_equal(result, want())), op=MPI.LAND)
                row = {
                    "op": name,
                    "policy": policy,
                    "bytes": nbytes,
                    "ranks": WORLD.size,
                    "microseconds": round(mine * 1e6, 2),
                    "mpi4py_microseconds": round(theirs * 1e6, 2),
                    "over": round(mine / theirs, 3),
                    "correct": good,
                }
                rows.append(row)
                if WORLD.rank == 0:
                    print(
                        f"{WORLD.size} ranks  {policy:16} {name:21} {nbytes >> 10:3} KiB  p50 "
                        f"{mine * 1e6:8.2f} us  mpi4py {theirs * 1e6:8.2f} us  "
                        f"{mine / theirs:5.2f}  {'ok' if good else 'WRONG'}",
                        flush=True,
                    )
        ours.Free()
    if WORLD.rank == 0 and args.json is not None:
        write(args.json, {"rows": rows})
    if not all(row["correct"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()

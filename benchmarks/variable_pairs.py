"""All-reduces of arrays in host memory on communicators made with one value of a variable and with another.

mpiexec -n 2 python benchmarks/variable_pairs.py HYBRIDCOMP_SHARED_MEMORY 1 0 --json pairs.json

The two communicators take turns, call by call, so that both see the same machine. A figure is the median over the calls
of the slowest rank; ``over`` is the first value's over the second's. Results must be near each other.
"""

from __future__ import annotations

import argparse
import os
import random
from pathlib import Path
from time import perf_counter

import numpy as np
from mpi4py import MPI
from resultfile import write

import hybridcomp as hc

WORLD = MPI.COMM_WORLD
SIZES = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
CODECS = ["int8", "none"]


def made(variable: str, value: str) -> hc.Communicator:
    """Return a communicator that was made while a variable had a value."""
    os.environ[variable] = value
    return hc.Communicator(WORLD, "none")


def measure(comms: dict[str, hc.Communicator], codec: str, nbytes: int, calls: int) -> dict[str, float]:
    """Return the median seconds of a call on each communicator, on the slowest rank; the results must be near."""
    x = np.random.default_rng(WORLD.rank).standard_normal(nbytes // 4).astype(np.float32)
    results = {name: np.empty_like(x) for name in comms}
    seconds: dict[str, list[float]] = {name: [] for name in comms}
    for i in range(calls + 5):
        for name in random.Random(i).sample(sorted(comms), len(comms)):
            WORLD.Barrier()
            began = perf_counter()
            comms[name].Allreduce(x, results[name], codec=codec)
            seconds[name].append(perf_counter() - began)
    assert np.allclose(*results.values(), atol=0.1)  # two steps of int8
    found = {}
    for name, mine in seconds.items():
        slowest = np.array(mine[5:])
        WORLD.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
        found[name] = float(np.median(slowest))
    return found


def main() -> None:
    """Print a line for each codec and size on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variable")
    parser.add_argument("values", nargs=2)
    parser.add_argument("--calls", type=int, default=4000, help="most calls for a figure")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    first, second = args.values
    comms = {value: made(args.variable, value) for value in args.values}
    rows = []
    for codec in CODECS:
        for nbytes in SIZES:
            found = measure(comms, codec, nbytes, max(31, min(args.calls, (1 << 30) // nbytes)))
            row = {
                "codec": codec,
                "bytes": nbytes,
                "microseconds": round(found[first] * 1e6, 1),
                "microseconds_second": round(found[second] * 1e6, 1),
                "over": round(found[first] / found[second], 3),
            }
            rows.append(row)
            if WORLD.rank == 0:
                print(row, flush=True)
    if WORLD.rank == 0 and args.json is not None:
        record = {
            "variable": args.variable,
            "values": args.values,
            "ranks": WORLD.size,
            "rows": rows,
        }
        write(args.json, record, "shared-memory")


if __name__ == "__main__":
    main()

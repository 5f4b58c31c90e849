"""Measure cells of (operation, algorithm, codec, bytes) on the job's ranks; rank 0 writes their times.

python -m modelbench.cells CELLS.json OUT.json [--seconds 0.3]

Each time is the median over repetitions, each that of the slowest rank, from a barrier on. All ranks' results must
have the same bits where they should be the same, or the run ends with an error.
"""

from __future__ import annotations

import argparse
import json
import statistics
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.cli.calibration.timing import communicator, prepared, repeat
from hybridcomp.perfmodel.fitting import CHUNK


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cells", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=0.3, help="for each cell")
    args = parser.parse_args()
    comm = MPI.COMM_WORLD
    made: dict[tuple[str, str], hc.Communicator] = {}
    results = []
    for cell in json.loads(args.cells.read_text(encoding="utf-8")):
        key = cell["op"], cell["algorithm"]
        if key not in made:
            forced = {} if key[0] in ("all_to_all", "send") else {key[0]: key[1]}
            made[key] = communicator(comm, CHUNK, forced)
        results.append(cell | measure(made[key], cell, args.seconds))
    if comm.rank == 0:
        args.out.write_text(json.dumps(results), encoding="utf-8")


def measure(comm: hc.Communicator, cell: dict[str, Any], seconds: float) -> dict[str, float]:
    """Return a cell's median seconds, processor time of all ranks, and the spread of its repetitions."""
    world = MPI.COMM_WORLD
    operation = prepared(comm, cell["op"], cell["nbytes"], cell["codec"])
    operation.call()
    check(cell, operation.result)
    taken, busy = repeat(world, comm, operation.call, seconds)
    cuts = statistics.quantiles(taken, n=4)
    return {"seconds": cuts[1], "spread": (cuts[2] - cuts[0]) / cuts[1], "busy": world.allreduce(busy)}


def check(cell: dict[str, Any], result: np.ndarray) -> None:
    """End the run if ranks hold different bits of a result that all of them get."""
    if cell["op"] in ("all_reduce", "all_gather", "broadcast"):
        sums = MPI.COMM_WORLD.allgather(zlib.crc32(result.tobytes()))
        if len(set(sums)) > 1:
            raise SystemExit(f"{cell}: ranks hold different bits")


if __name__ == "__main__":
    main()

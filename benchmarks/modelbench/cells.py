"""Measure cells of (operation, algorithm, codec, bytes) on the ranks that it runs on; rank 0 writes their times.

python -m modelbench.cells CELLS.json OUT.json [--seconds 0.3]

Each time is the median over repetitions, each that of the slowest rank, from a barrier on. All ranks' results must
have the same bits where they should be the same, or the run ends with an error.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import hybridcomp as hc

CHUNK = 1 << 20  # uncompressed bytes of a message
_LEAST, _MOST = 5, 60  # repetitions
_TIMEOUT = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cells", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=0.3, help="for each cell")
    args = parser.parse_args()
    os.environ["HYBRIDCOMP_CHUNK_BYTES"] = str(CHUNK)
    comm = MPI.COMM_WORLD
    made: dict[tuple[str, str], hc.Communicator] = {}
    results = []
    for cell in json.loads(args.cells.read_text(encoding="utf-8")):
        key = cell["op"], cell["algorithm"]
        if key not in made:
            os.environ["HYBRIDCOMP_ALGORITHM"] = "=".join(key) if key[0] not in ("all_to_all", "send") else ""
            made[key] = hc.Communicator(comm, "none", "model", timeout=_TIMEOUT)
        results.append(cell | measure(made[key], cell, args.seconds))
    if comm.rank == 0:
        args.out.write_text(json.dumps(results), encoding="utf-8")


def measure(comm: hc.Communicator, cell: dict[str, Any], seconds: float) -> dict[str, float]:
    """Return a cell's median seconds, processor time of all ranks, and the spread of its repetitions."""
    call, result = prepared(comm, cell)
    world = MPI.COMM_WORLD
    call()
    check(cell, result)
    begin = time.perf_counter()
    call()
    once = world.allreduce(time.perf_counter() - begin, MPI.MAX)
    count = int(min(max(seconds / once, _LEAST), _MOST))
    taken = []
    busy = time.process_time()
    for _ in range(count):
        comm.Barrier()  # ours, which sleeps: MPI's takes the cores from ranks that have not ended yet
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    busy = time.process_time() - busy
    slowest = np.array(taken)
    world.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
    cuts = statistics.quantiles(slowest.tolist(), n=4)
    return {
        "seconds": cuts[1],
        "spread": (cuts[2] - cuts[0]) / cuts[1],
        "busy": world.allreduce(busy) / count,
    }


def prepared(comm: hc.Communicator, cell: dict[str, Any]) -> tuple[Callable[[], Any], np.ndarray]:
    """Return a call that does the operation once, and where its result is."""
    world = MPI.COMM_WORLD
    p, n, op = world.size, cell["nbytes"] // 4, cell["op"]
    codec = cell["codec"]
    data = np.random.default_rng(world.rank).standard_normal(n, np.float32)
    whole, part = np.empty(n, np.float32), np.empty(n // p, np.float32)
    shard = data[: n // p].copy()
    peer = world.size // 2  # a rank of another host
    calls: dict[str, tuple[Callable[[], Any], np.ndarray]] = {
        "all_reduce": (lambda: comm.Allreduce(data, whole, codec=codec), whole),
        "reduce_scatter": (lambda: comm.Reduce_scatter_block(data[: n // p * p], part, codec=codec), part),
        "all_gather": (lambda: comm.Allgather(shard, whole[: n // p * p], codec=codec), whole[: n // p * p]),
        "broadcast": (lambda: comm.Bcast(data, 0, codec=codec), data),
        "reduce": (lambda: comm.Reduce(data, whole, root=0, codec=codec), whole),
        "all_to_all": (
            lambda: comm.Alltoall(data[: n // p * p], whole[: n // p * p], codec=codec),
            whole[: n // p * p],
        ),
    }
    if op != "send":
        return calls[op]

    def send() -> None:
        if world.rank == 0:
            comm.Send(data, peer, 1, codec=codec)
        elif world.rank == peer:
            comm.Recv(whole, 0, 1)

    return send, whole


def check(cell: dict[str, Any], result: np.ndarray) -> None:
    """End the run where ranks hold other bits of what all of them get."""
    if cell["op"] in ("all_reduce", "all_gather", "broadcast"):
        sums = MPI.COMM_WORLD.allgather(zlib.crc32(result.tobytes()))
        if len(set(sums)) > 1:
            raise SystemExit(f"{cell}: ranks hold different bits")


if __name__ == "__main__":
    main()

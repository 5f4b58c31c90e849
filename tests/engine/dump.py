"""Write schedules to files that tests/engine/driver.cpp reads: all ranks of one all-reduce in each.

``python -m tests.engine.dump FOLDER smoke|full``. A file is little-endian 64-bit integers: ranks, each rank's host,
elements, whether messages are plain, whether there is error feedback, whether the sum is divided; then of each rank the
elements of its scratch memory and the lengths and contents of the three arrays of ``Schedule.packed``.
"""

from __future__ import annotations

import sys
from array import array
from itertools import product
from pathlib import Path

from hybridcomp.schedules.registry import ALGORITHMS, build
from hybridcomp.schedules.schedule import Operation
from hybridcomp.schedules.topology import Topology

CHUNK_BYTES = 1024  # so that a few thousand elements are a pipeline
MODES = ("plain", "int8", "ef")


def topologies(ranks: int) -> dict[str, Topology]:
    """Return layouts with all ranks on one host, on two, and each on a host of its own, by name."""
    hosts = {
        "one": tuple(0 for _ in range(ranks)),
        "two": tuple(rank * 2 // ranks for rank in range(ranks)),
        "each": tuple(range(ranks)),
    }
    return {name: Topology(of) for name, of in hosts.items() if name == "one" or max(of) > 0}


def packed(operation: Operation, topology: Topology, algorithm: str) -> array[int]:
    """Return one case as the driver reads it."""
    numbers = array("q", (len(topology.hosts), *topology.hosts, operation.counts[0]))
    numbers.extend((operation.plain, operation.feedback, operation.mean))
    for rank in range(len(topology.hosts)):
        schedule = build(operation, topology, rank, algorithm)
        parts = schedule.packed()
        numbers.extend((schedule.scratch, *map(len, parts)))
        for part in parts:
            numbers.extend(part)
    return numbers


def main(folder: str, extent: str) -> None:
    """Write all cases, or for ``smoke`` some."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.case"):
        old.unlink()
    smoke = extent == "smoke"
    for ranks in (1, 2, 4) if smoke else (1, 2, 3, 4, 5):
        for (where, topology), (name, algorithm) in product(
            topologies(ranks).items(), ALGORITHMS["all_reduce"].items()
        ):
            if algorithm.refuses(topology):
                continue
            for place, (count, mode) in enumerate(product((63, 5000) if smoke else (1, 63, 5000), MODES)):
                if mode == "ef" and not algorithm.feedback:
                    continue
                operation = Operation(
                    "all_reduce",
                    (count,),
                    4,
                    plain=mode == "plain",
                    feedback=mode == "ef",
                    mean=place % 2 == 1,
                    chunk_bytes=CHUNK_BYTES,
                )
                how = f"{mode}{'-mean' * operation.mean}"
                file = out / f"{ranks}-{where}-{name}-{count}-{how}.case"
                file.write_bytes(packed(operation, topology, name).tobytes())


if __name__ == "__main__":
    main(*sys.argv[1:])

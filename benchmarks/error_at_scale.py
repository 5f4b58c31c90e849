"""Relative error of an all-reduce by ranks: one encoding for each sum, and a ring that encodes at every hop.

python benchmarks/error_at_scale.py --json error.json --picture error.png

Every rank has Gaussian float32 values of its own. The error is L2, of the result against the sum in float64, over the
norm of that sum. Simulated: one process encodes and decodes as all ranks would, with the real codecs. Measured: that
many ranks of MPI on this machine, by ``comm.Allreduce`` (``direct``) and by a ring of messages made here; all ranks of
the former must end with the same bits.

With one encoding each rank's values are off by a share e of themselves, independently, and so is the sum: towards
e * sqrt(2), however many ranks there are (the owner of a shard adds its own exactly). A ring encodes a partial sum at
each hop, of k ranks at the k-th: e * sqrt(ranks / 2), and more where that is no longer small.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from resultfile import write

import hybridcomp as hc
from hybridcomp.arrays import DType
from hybridcomp.launcher import find_mpiexec

CODECS = ("bf16", "int8:block=128", "fp8:e4m3", "int4:block=128")
SIMULATED = tuple(1 << power for power in range(1, 11))
MEASURED = (2, 4, 8, 16)
ELEMENTS = 1 << 16  # elements in a shard, a multiple of every codec's block
WAYS = {"once": "one encoding", "ring": "encoded at each hop"}
_SECONDS = 240
_TAG = 7

Row = dict[str, Any]


def drawn(rank: int, elements: int = ELEMENTS) -> np.ndarray:
    """Draw a rank's values, which are the same in every process."""
    return np.random.default_rng(1000 + rank).standard_normal(elements, dtype=np.float32)


def relative(result: np.ndarray, exact: np.ndarray) -> float:
    """Compute the relative L2 error of a result."""
    return float(np.linalg.norm(result - exact) / np.linalg.norm(exact))


def simulate(spec: str, ranks: int) -> Row:
    """Sum a shard over ``ranks`` ranks in both ways, and return the errors."""
    codec = hc.get_codec(spec)
    exact = np.zeros(ELEMENTS)
    once = np.zeros(ELEMENTS, np.float32)
    partial = np.zeros(ELEMENTS, np.float32)
    for rank in range(ranks):
        values = drawn(rank)
        exact += values
        # The owner of a shard, rank 0 here, adds its own values as they are.
        if rank:
            codec.decode_add(codec.encode(values), once)
        else:
            once += values
        # Around the ring the first rank sends its values; each later one adds its own to the partial sum that arrives.
        partial = values if rank == 0 else hc.decode(codec.encode(partial)) + values
    errors = {
        "once": relative(hc.decode(codec.encode(once)), exact),
        "ring": relative(hc.decode(codec.encode(partial)), exact),
    }
    return {"codec": codec.spec, "ranks": ranks, **errors}


def ring(comm: MPI.Comm, spec: str, values: np.ndarray) -> np.ndarray:
    """Sum by a reduce-scatter around a ring, each partial sum encoded, and an all-gather of encoded sums."""
    codec = hc.get_codec(spec)
    parts = np.split(values.copy(), comm.size)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    room = np.empty(codec.bound(parts[0].size, DType.FLOAT32), np.uint8)

    def passed(message: np.ndarray) -> np.ndarray:
        status = MPI.Status()
        comm.Sendrecv(message, after, _TAG, room, before, _TAG, status)
        return room[: status.Get_count(MPI.BYTE)].copy()

    for hop in range(comm.size - 1):
        arrived = passed(codec.encode(parts[(comm.rank - hop) % comm.size]))
        codec.decode_add(arrived, parts[(comm.rank - hop - 1) % comm.size])
    message = codec.encode(parts[after])
    for hop in range(comm.size):
        parts[(comm.rank + 1 - hop) % comm.size] = hc.decode(message)
        message = passed(message)
    return np.concatenate(parts)


def measure() -> None:
    """Run on every rank; rank 0 prints the rows as JSON."""
    world = MPI.COMM_WORLD
    elements = ELEMENTS * world.size
    values = drawn(world.rank, elements)
    exact = np.empty(elements)
    world.Allreduce(values.astype(np.float64), exact)
    rows: list[Row] = []
    comm = hc.Communicator(world, policy="none")
    for spec in CODECS:
        result = np.empty_like(values)
        comm.Allreduce(values, result, codec=spec, algorithm="direct")
        first = result.copy()
        world.Bcast(first)
        same = world.allreduce(bool(np.array_equal(first.view(np.uint32), result.view(np.uint32))), MPI.LAND)
        if not same:
            raise RuntimeError(f"{spec}: ranks ended with different bits")
        errors = {"once": relative(result, exact), "ring": relative(ring(world, spec, values), exact)}
        rows.append({"codec": hc.get_codec(spec).spec, "ranks": world.size, **errors})
    if world.rank == 0:
        print(json.dumps(rows))


def measured(ranks: int) -> list[Row]:
    """Start ``ranks`` ranks and return their rows."""
    command = [find_mpiexec(), "-n", str(ranks), sys.executable, __file__, "--measure"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"{ranks} ranks ended with {done.returncode}: {done.stderr[-2000:]}")
    rows: list[Row] = json.loads(done.stdout)
    return rows


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw error over ranks: lines are simulated, markers measured."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    from hybridcomp.style import SERIES  # noqa: PLC0415

    figure = Figure(figsize=(8.5, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for colour, spec in zip(SERIES, dict.fromkeys(row["codec"] for row in record["simulated"]), strict=False):
        for way, dash, marker in (("once", "-", "o"), ("ring", "--", "x")):
            lines = [row for row in record["simulated"] if row["codec"] == spec]
            points = [row for row in record["measured"] if row["codec"] == spec]
            axes.plot(
                [row["ranks"] for row in lines],
                [row[way] for row in lines],
                dash,
                color=colour,
                label=f"{spec}, {WAYS[way]}",
            )
            axes.plot(
                [row["ranks"] for row in points],
                [row[way] for row in points],
                marker,
                color=colour,
                linestyle="",
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("ranks")
    axes.set_ylabel("relative error of the sum (L2)")
    axes.set_title("Lines: simulated. Markers: measured on ranks of MPI")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--picture", type=Path, help="draw them there (.png, .svg)")
    parser.add_argument("--most", type=int, default=SIMULATED[-1], help="ranks that are simulated, at most")
    parser.add_argument("--measured", type=int, default=MEASURED[-1], help="ranks that are measured, at most")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure()
        return
    if arguments.picture is not None and arguments.picture.suffix not in (".png", ".svg"):
        parser.error(f"--picture {arguments.picture}: its suffix must be .png or .svg")
    record: dict[str, Any] = {
        "elements": ELEMENTS,
        "simulated": [
            simulate(spec, ranks) for spec in CODECS for ranks in SIMULATED if ranks <= arguments.most
        ],
        "measured": [row for ranks in MEASURED if ranks <= arguments.measured for row in measured(ranks)],
    }
    print(f"{'codec':>32} {'ranks':>6} {'once':>10} {'ring':>10}")
    for kind in ("simulated", "measured"):
        for row in record[kind]:
            print(f"{row['codec']:>32} {row['ranks']:>6} {row['once']:>10.2e} {row['ring']:>10.2e}  {kind}")
    if arguments.json is not None:
        write(arguments.json, record)
    if arguments.picture is not None:
        draw(record, arguments.picture)


if __name__ == "__main__":
    main()

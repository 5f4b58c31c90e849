"""Consensus of random matrices by gossip on a ring: distance between the ranks, by the bits that they have sent.

python benchmarks/consensus.py --json consensus.json --picture consensus.png

Every rank has a Gaussian float32 matrix of its own, and mixes it with its neighbours' by the trainer's rules
(``hybridcomp train --sync gossip``), on that many ranks of MPI on this machine. The error is the L2 distance of all
ranks' matrices from their mean, over that at the beginning. Bits are what a rank sends to all its neighbours, headers
included, over the elements of the matrix.

PowerGossip has nothing to tune. Choco runs with each ``--gamma``, since a gamma has to be found for each codec: the
first one is the trainer's default. Vogels et al. (arXiv:2008.01425) have PowerGossip's error fall linearly in the bits,
and below that of tuned rules.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from resultfile import write

import hybridcomp as hc
from hybridcomp.launcher import find_mpiexec
from hybridcomp_lab.train.gossip.choco import Choco
from hybridcomp_lab.train.gossip.graph import make_graph
from hybridcomp_lab.train.gossip.neighbours import Neighbours
from hybridcomp_lab.train.gossip.powergossip import PowerGossip
from hybridcomp_lab.train.gossip.rules import PlainGossip, Rule

RANKS = (4, 8)
GAMMAS = (0.0375, 0.1, 0.3)
POWERS = (1, 2, 4)
TOPK = "topk:ratio=0.01"
_SECONDS = 600

Record = dict[str, Any]
Make = Callable[[dict[str, np.ndarray], Neighbours], Rule]


def rules(gammas: list[float]) -> Iterator[tuple[str, Make]]:
    """Yield the name of each rule to compare, and a function that makes the rule."""
    yield "plain", PlainGossip
    for rank in POWERS:
        yield f"powergossip rank {rank}", lambda x, near, rank=rank: PowerGossip(x, near, rank)
    for gamma in gammas:
        codec = hc.get_codec(TOPK)
        yield (
            f"choco {TOPK} gamma {gamma:g}",
            lambda x, near, gamma=gamma, codec=codec: Choco(x, near, codec, gamma, alike=False),
        )


def distance(world: MPI.Comm, mine: np.ndarray) -> float:
    """Return the L2 distance of all ranks' matrices from their mean."""
    everyone = np.empty((world.size, mine.size))
    world.Allgather(mine.astype(np.float64).ravel(), everyone)
    return float(np.linalg.norm(everyone - everyone.mean(0)))


def measure(rows: int, columns: int, bits: float, gammas: list[float]) -> None:
    """Run on every rank; rank 0 prints the lines as JSON."""
    world = MPI.COMM_WORLD
    comm = hc.Communicator(world, policy="none")
    lines: list[Record] = []
    for name, make in rules(gammas):
        x = np.random.default_rng(1000 + world.rank).standard_normal((rows, columns), dtype=np.float32)
        neighbours = Neighbours(comm, make_graph("ring", world.size))
        rule = make({"x": x}, neighbours)
        mean = world.allreduce(float(x.mean(dtype=np.float64)))
        first = distance(world, x)
        points = [(0.0, 1.0)]
        while points[-1][0] < bits:
            with np.errstate(over="ignore", invalid="ignore"):  # a gamma may diverge
                rule.mix(len(points) - 1)
                error = distance(world, x) / first
            (row,) = neighbours.rows()
            points.append((8 * world.allreduce(row.wire_bytes, MPI.MAX) / x.size, error))
            if not error < 1e3:
                break
        moved = abs(world.allreduce(float(x.mean(dtype=np.float64))) - mean)
        if points[-1][1] < 1 and moved > 1e-4:
            raise RuntimeError(
                f"{name}: gossip has moved the mean of all elements by {moved / world.size:.3g}"
            )
        lines.append({"rule": name, "ranks": world.size, "points": points})
    if world.rank == 0:
        print(json.dumps(lines))


def measured(ranks: int, arguments: argparse.Namespace) -> list[Record]:
    """Start ``ranks`` ranks and return their lines."""
    more = [
        "--measure",
        "--shape",
        arguments.shape,
        "--bits",
        str(arguments.bits),
        "--gamma",
        arguments.gamma,
    ]
    command = [find_mpiexec(), "-n", str(ranks), sys.executable, __file__, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"{ranks} ranks ended with {done.returncode}: {done.stderr[-2000:]}")
    lines: list[Record] = json.loads(done.stdout)
    return lines


def draw(record: Record, path: Path) -> None:
    """Draw error over bits: a panel for each ring."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    from hybridcomp.style import SERIES  # noqa: PLC0415

    rings = list(dict.fromkeys(line["ranks"] for line in record["lines"]))
    figure = Figure(figsize=(5.5 * len(rings), 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(rings), squeeze=False, sharey=True)[0]
    for axes, ranks in zip(panels, rings, strict=True):
        lines = [line for line in record["lines"] if line["ranks"] == ranks]
        for number, line in enumerate(lines):
            dash = "--" if line["rule"].startswith("choco") else "-"
            colour = SERIES[number % len(SERIES)]
            axes.plot(*zip(*line["points"], strict=True), dash, color=colour, label=line["rule"])
        axes.set_yscale("log")
        axes.set_ylim(1e-6, 10)
        axes.set_xlabel("bits that a rank sends, per element")
        axes.set_title(f"ring of {ranks}, {record['shape']}")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("distance from the mean, over that at the beginning")
    panels[0].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def shape_of(text: str) -> tuple[int, int]:
    """Read ``100x100``."""
    try:
        rows, columns = map(int, text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape such as 100x100") from None
    if min(rows, columns) <= max(POWERS):
        raise argparse.ArgumentTypeError(
            f"both sides must be above {max(POWERS)}, the highest rank, not {text}"
        )
    return rows, columns


def gammas_of(text: str) -> list[float]:
    """Read ``0.0375,0.1``."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers such as 0.0375,0.1") from None
    if not all(0 < gamma <= 1 for gamma in found):
        raise argparse.ArgumentTypeError(f"gammas must be above 0 and at most 1, not {text}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the lines there")
    parser.add_argument("--picture", type=Path, help="draw them there (.png, .svg)")
    parser.add_argument("--most", type=int, default=RANKS[-1], help="ranks of a ring, at most")
    parser.add_argument("--shape", default="100x100", help="of each rank's matrix")
    parser.add_argument("--bits", type=float, default=1000.0, help="that a rank sends per element, at least")
    parser.add_argument("--gamma", default=",".join(f"{gamma:g}" for gamma in GAMMAS), help="of Choco")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    try:
        (rows, columns), gammas = shape_of(arguments.shape), gammas_of(arguments.gamma)
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    if arguments.measure:
        measure(rows, columns, arguments.bits, gammas)
        return
    if arguments.picture is not None and arguments.picture.suffix not in (".png", ".svg"):
        parser.error(f"--picture {arguments.picture}: its suffix must be .png or .svg")
    lines = [line for ranks in RANKS if ranks <= arguments.most for line in measured(ranks, arguments)]
    print(f"{'rule':>34} {'ranks':>6} {'mixings':>8} {'bits':>8} {'error':>10}")
    for line in lines:
        sent, error = line["points"][-1]
        print(
            f"{line['rule']:>34} {line['ranks']:>6} {len(line['points']) - 1:>8} {sent:>8.1f} {error:>10.2e}"
        )
    record = {"shape": arguments.shape, "lines": lines}
    if arguments.json is not None:
        write(arguments.json, record)
    if arguments.picture is not None:
        draw(record, arguments.picture)


if __name__ == "__main__":
    main()

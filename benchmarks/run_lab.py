"""Measure the matrix of operations, codecs, sizes, links and ranks in the lab, and write a report.

python benchmarks/run_lab.py --quick            # what shows the most; some minutes
python benchmarks/run_lab.py                    # all; goes on where an earlier run ended
python benchmarks/run_lab.py --only bcast_1gbit --again
python benchmarks/run_lab.py --report           # only renders what is there

Every cell is a run of one benchmark on fresh ranks, and leaves a JSON file in RESULTS/lab. The report is
RESULTS/lab.md. Shaped links take root, as ``hybridcomp lab`` does.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from collbench import matrix, report
from collbench.matrix import SHARED, Cell
from tqdm import tqdm

from hybridcomp.lab import Lab

TIMEOUT = 180.0  # seconds for a cell: several times what it is reckoned to take


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="only the cells that show the most")
    parser.add_argument("--only", default="", help="only cells whose name contains this")
    parser.add_argument("--again", action="store_true", help="measure cells that have results, too")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--list", action="store_true", help="print the cells' names and measure nothing")
    parser.add_argument(
        "--results", type=Path, default=Path("runs/bench"), help="folder (default runs/bench)"
    )
    return parser.parse_args()


def measure(cell: Cell, lab: Lab, folder: Path) -> str | None:
    """Run one cell; returns what went wrong, if anything."""
    out = folder / f"{cell.name}.json"
    fresh = out.with_suffix(".part")  # a cell has results when it has ended well
    try:
        command = [sys.executable, *cell.arguments(fresh.resolve())]
        done = lab.mpirun(command, cell.ppn, timeout=TIMEOUT)
    except subprocess.TimeoutExpired as error:
        return f"{cell.name}: no end within {error.timeout:g} s"
    if done.returncode != 0 or not fresh.exists():
        return f"{cell.name}: exit code {done.returncode}\n{done.stderr[-2000:]}"
    fresh.replace(out)
    return None


def run_group(link: str, hosts: int, cells: list[Cell], folder: Path, bar: tqdm) -> Iterator[str]:
    """Run cells of one link and number of hosts; yields what went wrong."""
    place = ("none", "shared-memory") if link == SHARED else (link, "namespaces")
    with Lab(hosts, place[0], kind=place[1]) as lab:
        for cell in cells:
            bar.set_description(cell.name)
            failure = measure(cell, lab, folder)
            if failure is not None:
                yield failure
            bar.update()


def main() -> None:
    args = arguments()
    folder = args.results / "lab"
    folder.mkdir(parents=True, exist_ok=True)
    cells = [cell for cell in matrix.every() if args.only in cell.name]
    cells = [cell for cell in cells if matrix.is_quick(cell)] if args.quick else cells
    left_out = [cell for cell in cells if cell.iters == 0]
    wanted = [
        cell for cell in cells if cell.iters and (args.again or not (folder / f"{cell.name}.json").exists())
    ]
    if args.list:
        print("\n".join(f"{cell.name} {cell.iters}" for cell in cells))
        return
    failures: list[str] = []
    if not args.report:
        bar = tqdm(total=len(wanted), unit="cell")
        for (link, hosts), group in itertools.groupby(wanted, key=lambda cell: (cell.link, cell.hosts)):
            for failure in run_group(link, hosts, list(group), folder, bar):
                failures.append(failure)
                tqdm.write(failure, file=sys.stderr)
        bar.close()
    report.write(folder, args.results / "lab.md", left_out)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()

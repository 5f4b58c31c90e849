"""Measure the matrix of operations, codecs, sizes, links and ranks in the lab, and write a report.

python benchmarks/run_lab.py --quick            # the cells that show the most; some minutes
python benchmarks/run_lab.py                    # all; goes on where an earlier run ended
python benchmarks/run_lab.py --only bcast_1gbit --again
python benchmarks/run_lab.py --report           # only renders the results that are there

Every cell leaves a line in the file of its benchmark, RESULTS/lab/allreduce.json for instance. Cells of one benchmark
that differ in sizes alone share a run. The report is RESULTS/lab.md. Shaped links take root, as ``hybridcomp lab``
does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from collbench import matrix, report
from collbench.matrix import SHARED, Cell
from collbench.records import Records
from tqdm import tqdm

from hybridcomp.net import Lab

TIMEOUT = 180.0  # seconds for a cell: several times its estimate


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


def measure(cells: list[Cell], lab: Lab, records: Records, folder: Path) -> Iterator[str]:
    """Run cells of one benchmark on the same ranks, one after the other; yield a line for each failure.

    Args:
        cells: cells to run.
        lab: lab on whose hosts they run.
        records: records to which results are added.
        folder: folder for the files that the benchmark writes.
    """
    # A cell's results count once it has ended well: when the next cell has begun, or the last one's run has ended well.
    fresh = [folder / f"{cell.name}.json" for cell in cells]
    command = [sys.executable, *cells[0].arguments(fresh[0])]
    for cell, part in zip(cells[1:], fresh[1:], strict=True):
        command += cell.more(part)
    limit, ended = TIMEOUT * len(cells), False
    try:
        done = lab.mpirun(command, cells[0].ppn, timeout=limit)
        ended = done.returncode == 0
        why = f"exit code {done.returncode}\n{done.stderr[-2000:]}"
    except subprocess.TimeoutExpired:
        why = f"no end within {limit:g} s"
    for cell, part in zip(cells, fresh, strict=True):
        if part.exists() and (ended or cell is not cells[-1]):
            records.add(cell.name, json.loads(part.read_text(encoding="utf-8")))
        else:
            yield f"{cell.name}: {why}"


def run_group(link: str, hosts: int, cells: list[Cell], records: Records, bar: tqdm) -> Iterator[str]:
    """Run cells of one link and number of hosts; yield a line for each failure."""
    place = ("none", "shared-memory") if link == SHARED else (link, "namespaces")
    with Lab(hosts, place[0], kind=place[1]) as lab:
        for (ppn, benchmark), group in itertools.groupby(cells, key=lambda cell: (cell.ppn, cell.benchmark)):
            same = list(group)
            bar.set_description(f"{benchmark} {link} {hosts}x{ppn}")
            with tempfile.TemporaryDirectory(prefix="run-lab-") as folder:
                yield from measure(same, lab, records, Path(folder))
            bar.update(len(same))


def main() -> None:
    args = arguments()
    records = Records(args.results / "lab")
    cells = [cell for cell in matrix.every() if args.only in cell.name]
    cells = [cell for cell in cells if matrix.is_quick(cell)] if args.quick else cells
    left_out = [cell for cell in cells if cell.iters == 0]
    wanted = [cell for cell in cells if cell.iters and (args.again or cell.name not in records)]
    if args.list:
        print("\n".join(f"{cell.name} {cell.iters}" for cell in cells))
        return
    failures: list[str] = []
    if not args.report:
        bar = tqdm(total=len(wanted), unit="cell")
        for (link, hosts), group in itertools.groupby(wanted, key=lambda cell: (cell.link, cell.hosts)):
            for failure in run_group(link, hosts, list(group), records, bar):
                failures.append(failure)
                tqdm.write(failure, file=sys.stderr)
        bar.close()
    report.write(records, args.results / "lab.md", left_out)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()

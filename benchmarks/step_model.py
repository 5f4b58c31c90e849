"""Training steps in the lab: predicted by hybridcomp_lab.planner, and measured.

python benchmarks/step_model.py calibrate       # profiles of the lab, and trainings to which overheads are fitted
python benchmarks/step_model.py measure         # the trainings that are predicted; run again, it goes on
python benchmarks/step_model.py compare         # predicts them, and writes figures and a picture
python benchmarks/step_model.py choose          # measures all layouts of ten jobs: is the fastest chosen?
python benchmarks/step_model.py scale           # adds replicas up to 16 ranks on 8 hosts: measured, and predicted

Files are in benchmarks/results/planner. `--minutes` ends a measurement early; finished trainings are kept.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from resultfile import commits, read, write
from stepmodel.cells import CELLS, FITTED, HOSTS, SCALED, Cell, profile_name
from stepmodel.choices import CASES, choose
from stepmodel.measuring import measure
from stepmodel.scaling import scaled

from hybridcomp.net import Lab
from hybridcomp.results.provenance import commit

OUT = Path(__file__).parent / "results" / "planner"
RATES = ("none", "200mbit", "1gbit")
_TIMEOUT = 200.0  # seconds that a calibration may take


def calibrate(rate: str, ppn: int, path: Path) -> None:
    """Measure the profile of the lab at a rate with ``ppn`` ranks on a host."""
    with Lab(HOSTS, rate) as lab:
        done = lab.mpirun(["hybridcomp", "doctor", "--calibrate", "--out", str(path)], ppn, timeout=_TIMEOUT)
    if done.returncode:
        raise SystemExit(f"calibration at {rate} failed:\n{done.stderr[-3000:]}")


def profiles(labs: Iterable[tuple[str, int]], out: Path) -> None:
    """Measure the profiles of labs, by rate and ranks on a host, that are not there yet."""
    for rate, ppn in labs:
        path = out / profile_name(rate, ppn)
        if not path.exists():
            calibrate(rate, ppn, path)


def run(cells: Iterable[Cell], file: Path, out: Path, until: float) -> bool:
    """Measure the cells that are not in the file yet, until a time; tell whether all are there."""
    found: list[dict[str, Any]] = read(file)["rows"] if file.exists() else []
    names = {row["name"] for row in found}
    missing = sorted((cell for cell in cells if cell.name not in names), key=_lab)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "text"
        data.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(20000)))
        for (hosts, rate), group in itertools.groupby(missing, _lab):
            with Lab(hosts, rate) as lab:
                for cell in group:
                    if time.monotonic() > until:
                        print(f"{len(missing)} were missing; run again for the rest")
                        return False
                    begin = time.monotonic()
                    row = measure(lab, cell, out / profile_name(rate, cell.ppn), data)
                    found.append(row | {"commit": commit()})
                    write(file, {"commit": commits(found), "rows": found}, lab.kind)
                    print(
                        f"{found[-1]['median'] * 1e3:8.1f} ms  {cell.name} ({time.monotonic() - begin:.0f} s)",
                        flush=True,
                    )
    return True


def overheads(out: Path) -> dict[str, float]:
    """Return the seconds of a step beside a model's operations, as ``compare`` has fitted them."""
    found: dict[str, float] = json.loads((out / "steps.json").read_text())["overheads"]
    return found


def _lab(cell: Cell) -> tuple[int, str]:
    return cell.hosts, cell.rate


def main() -> None:
    """Run the command that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("calibrate", "measure", "compare", "choose", "scale"))
    parser.add_argument(
        "--out", type=Path, default=OUT, help="folder of the files (default: the committed ones)"
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="after which nothing new is begun")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * arguments.minutes
    if arguments.what == "calibrate":
        profiles(itertools.product(RATES, (2, 1)), arguments.out)
        run(FITTED, arguments.out / "fitted.json", arguments.out, until)
    elif arguments.what == "measure":
        run(CELLS, arguments.out / "measured.json", arguments.out, until)
    elif arguments.what == "choose":
        cells = [cell for case in CASES.values() for cell in case]
        profiles(dict.fromkeys((cell.rate, cell.ppn) for cell in cells), arguments.out)
        if run(cells, arguments.out / "chosen.json", arguments.out, until):
            choose(arguments.out, overheads(arguments.out))
    elif arguments.what == "scale":
        if run(SCALED, arguments.out / "scaled.json", arguments.out, until):
            scaled(arguments.out, overheads(arguments.out))
    else:
        from stepmodel.comparing import compare  # noqa: PLC0415  (draws)

        compare(arguments.out)


if __name__ == "__main__":
    sys.exit(main())

"""Measure collectives in the lab, predict them by the simulator, and report the errors of the predictions.

python benchmarks/model.py calibrate --out benchmarks/results/model   # links, memory and codecs alone: profile.toml
python benchmarks/model.py measure --cells runs/model          # ten minutes; takes root, as `hybridcomp lab` does
python benchmarks/model.py judge --cells runs/model --out benchmarks/results/model

`measure` has two sets of cells drawn for each link and each number of hosts and ranks: cells to fit, and cells to
judge by, at other sizes. It measures all of them in several rounds; a cell's time is the median over rounds.
`judge` fits the profile's parameters for each link, as for a site, to the first set alone. It writes the errors of
both, every cell's measured and predicted seconds, how far two halves of the rounds are from each other, and a picture.
No cell is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from modelbench import fitting, sample
from resultfile import write
from tqdm import tqdm

from hybridcomp.launcher import find_mpiexec
from hybridcomp.net import Lab
from hybridcomp.perfmodel import load_profile

_TIMEOUT = 240.0
CORES = 2  # cores that all hosts of the lab share
KINDS = ("fit", "unseen")
MEASURED = ("seconds", "spread", "busy")  # figures of a cell in a round
ROUNDS = 5  # default; at most ten
HERE = Path(__file__).parent


def calibrate(out: Path) -> None:
    """Measure shared memory, memory and codecs by themselves, on two ranks of this machine; the lab sets the links."""
    out.mkdir(parents=True, exist_ok=True)
    command = [find_mpiexec(), "-n", "2", sys.executable, str(HERE / "model_ranks.py"), "alone"]
    subprocess.run([*command, str(out / "profile.toml")], check=True, timeout=_TIMEOUT)


def measure(out: Path, only: str, rounds: int) -> None:
    """Measure the cells that have no times yet."""
    out.mkdir(parents=True, exist_ok=True)
    runs = [
        (number, kind, link, place)
        for number in range(rounds)
        for kind in KINDS
        for link in sample.LINKS
        for place in sample.PLACES
    ]
    for number, kind, link, (hosts, ppn) in tqdm(runs, unit="run"):
        name = f"{kind}_{link}_{hosts}x{ppn}_{number}.json"
        if (out / name).exists() or only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder, Lab(hosts, link) as lab:
            given, made = Path(folder) / "cells.json", Path(folder) / "times.json"
            given.write_text(
                json.dumps(sample.cells(link, hosts, ppn, unseen=kind == KINDS[1])), encoding="utf-8"
            )
            command = [sys.executable, str(HERE / "model_ranks.py"), "cells", str(given), str(made)]
            done = lab.mpirun(command, ppn, timeout=_TIMEOUT)
            if done.returncode:
                raise SystemExit(f"{name}: exit code {done.returncode}\n{done.stderr[-3000:]}")
            (out / name).write_text(made.read_text(encoding="utf-8"), encoding="utf-8")


def judge(folder: Path, out: Path) -> None:
    """Fit each link's profile, and write the errors of its predictions of cells that the fit has not seen."""
    base = load_profile(out / "profile.toml")
    judged: list[fitting.Cell] = []
    parameters, errors = {}, {}
    for link in tqdm(sample.LINKS, unit="link"):
        cells = {kind: read(folder, f"{kind}_{link}_*.json") for kind in KINDS}
        found = parameters[link] = fitting.fit(base, cells["fit"], CORES)
        errors[link] = {}
        for kind, some in cells.items():
            predicted = fitting.predict(base, found, some, CORES)
            errors[link][kind] = fitting.errors(predicted, some)
            judged += [
                cell | {"seen": kind == "fit", "predicted": float(f"{seconds:.4g}")}
                for cell, seconds in zip(some, predicted.tolist(), strict=True)
            ]
    unseen = [cell for cell in judged if not cell["seen"]]
    errors["all"] = {"unseen": fitting.errors(np.array([c["predicted"] for c in unseen]), unseen)}
    rounds = max(number for number in range(1000) if list(folder.glob(f"unseen_*_{number}.json"))) + 1
    halves = [read(folder, f"unseen_*_[{''.join(map(str, range(k, rounds, 2)))}].json") for k in (0, 1)]
    again = fitting.errors(np.array([cell["seconds"] for cell in halves[1]]), halves[0])
    record = {
        "rounds": rounds,
        "errors": errors,
        "of every second round beside the others": again,
        "parameters": parameters,
        "cells": judged,
    }
    write(out / "collectives.json", record, "namespaces")
    draw(unseen, errors["all"]["unseen"], out / "collectives.png")
    print(json.dumps(errors, indent=1))


def read(folder: Path, pattern: str) -> list[fitting.Cell]:
    """Return the cells in the files that match a pattern: medians over each cell's rounds."""
    rounds: dict[str, list[fitting.Cell]] = {}
    for path in sorted(folder.glob(pattern)):
        for cell in json.loads(path.read_text(encoding="utf-8")):
            rounds.setdefault(json.dumps({k: v for k, v in cell.items() if k not in MEASURED}), []).append(
                cell
            )
    return [
        json.loads(key)
        | {name: float(f"{statistics.median(c[name] for c in some):.4g}") for name in MEASURED}
        for key, some in rounds.items()
    ]


def draw(cells: list[fitting.Cell], errors: dict[str, float], path: Path) -> None:
    """Draw predicted over measured times."""
    figure = Figure(figsize=(7, 6.4), dpi=130, layout="constrained")
    axes = figure.subplots()
    for link, colour in zip(sample.LINKS, ("#3a6ea5", "#c8553d", "#5b8c5a"), strict=True):
        some = [cell for cell in cells if cell["link"] == link]
        name = "unshaped" if link == "none" else link
        x, y = [1e3 * c["seconds"] for c in some], [1e3 * c["predicted"] for c in some]
        axes.scatter(x, y, s=14, alpha=0.7, color=colour, label=name, linewidths=0)
    ends = [0.07, 1500]
    axes.plot(ends, ends, color="#888888", linewidth=0.8)
    axes.fill_between(ends, [0.75 * e for e in ends], [1.25 * e for e in ends], color="#888888", alpha=0.12)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set_xlabel("measured (ms)")
    axes.set_ylabel("predicted (ms)")
    axes.set_title(
        f"{errors['cells']} cells that the fit has not seen: geometric mean error "
        f"{100 * errors['geometric mean']:.1f} %, 95th percentile {100 * errors['95th percentile']:.0f} %; band: 25 %",
        fontsize=9,
        loc="left",
    )
    axes.legend(frameon=False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("calibrate", "measure", "judge"))
    parser.add_argument("--cells", type=Path, default=Path("runs/model"), help="folder of the measured times")
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/model"), help="of judge: has profile.toml"
    )
    parser.add_argument(
        "--rounds", type=int, choices=range(2, 11), default=ROUNDS, metavar="N", help="2 to 10"
    )
    parser.add_argument("--only", default="", help="measure only runs whose name contains this")
    args = parser.parse_args()
    if args.what == "calibrate":
        calibrate(args.out)
    elif args.what == "measure":
        measure(args.cells, args.only, args.rounds)
    else:
        judge(args.cells, args.out)


if __name__ == "__main__":
    main()

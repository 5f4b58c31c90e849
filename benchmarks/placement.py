"""Pipelines on hosts that differ, with as many layers on each stage, and with the cut of hybridcomp_lab.planner.

python benchmarks/placement.py --json benchmarks/results/planner/placement.json
python benchmarks/placement.py --case processor --rounds 1        # one case, quickly

Each case is trained in the lab both ways in turn, from the same seed, and predicted by profiles of the lab whose hosts
are alike, which are measured first. The measured speedup of the planner's cut should be within 10 % of the
predicted one, and losses should be the same but for the order of sums.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from resultfile import write
from step_model import calibrate
from stepmodel.cells import HOSTS, Cell, profile_name
from stepmodel.comparing import cluster_of
from stepmodel.measuring import WARM, measure

from hybridcomp.net import Lab
from hybridcomp.net.hosts import cores_of, rates_of
from hybridcomp.policy import load_policy
from hybridcomp_lab.planner.cluster import Cluster
from hybridcomp_lab.planner.placement import predict_best_cut
from hybridcomp_lab.planner.step.prediction import predict_step
from hybridcomp_lab.train.config import TrainConfig

PROFILES = Path(__file__).parent / "results" / "planner"
_BASE = "1gbit"  # rate of the profiles that are used: all but the link's costs are the same at all rates
_SECONDS = 300.0  # most of a training: a host with 1/4 of a core takes half a minute to import torch
_GOAL = 0.1
_SAME_LOSS = 1e-3  # relative difference, since norms of gradients are summed in another order
_SHAPE = {"layers": 12, "d_model": 128, "heads": 4, "seq_len": 64, "micro_batch_size": 2, "policy": "none"}


def _case(name: str, rate: str, cores: str, ppn: int = 1, **layout: Any) -> Cell:
    return Cell(name, rate, ppn, {**_SHAPE, "pp": 4, "micro_batches": 8, **layout}, cores=cores)


CASES = (
    _case("processor", "1gbit", "all,all,all,0.25"),
    _case("processors", "1gbit", "0.3,0.3,all,all", schedule="gpipe"),
    _case("link", "1gbit,100mbit,1gbit,1gbit", "all,0.3,all,all"),
    _case(
        "interleaved",
        "1gbit,1gbit,200mbit,1gbit",
        "all,all,0.3,all",
        layers=16,
        schedule="interleaved",
        virtual_stages=2,
    ),
    _case("replicas", "1gbit,1gbit,1gbit,200mbit", "all,0.2,all,all", 2, dp=2),
)


def cluster_for(case: Cell, profiles: Path) -> Cluster:
    """Return a case's hosts as a cluster, from the profile of the lab whose hosts are alike."""
    steps = profiles / "steps.json"
    overheads = json.loads(steps.read_text())["overheads"] if steps.exists() else None
    alike = cluster_of({"rate": _BASE, "ppn": case.ppn}, profiles, overheads)
    bandwidth = alike.profile.network.bandwidth
    rates = [rate.bits_per_second for rate in rates_of(case.rate, HOSTS)]
    return dataclasses.replace(
        alike,
        rates=tuple(bandwidth if bits is None else bits / 8 for bits in rates),
        speeds=tuple(
            1.0 if cores is None else min(1.0, cores / case.ppn) for cores in cores_of(case.cores, HOSTS)
        ),
    )


def planned(case: Cell, cluster: Cluster) -> dict[str, tuple[Cell, float]]:
    """Return the case with both cuts, and the predicted seconds of a step of each."""
    policy = load_policy("none")
    even = TrainConfig(**case.fields)
    cut, prediction = predict_best_cut(even, cluster, policy)
    if cut.stage_layers is None:
        raise SystemExit(f"{case.name}: no cut is predicted to be faster than the even one")
    fields = {**case.fields, "stage_layers": cut.stage_layers}
    return {
        "even": (case, predict_step(even, cluster, policy).seconds),
        "planner": (dataclasses.replace(case, fields=fields), prediction.seconds),
    }


def run(case: Cell, profiles: Path, data: Path, rounds: int) -> dict[str, Any]:
    """Train a case with both cuts in turn; return the measured figures of each beside the predicted ones."""
    cuts = planned(case, cluster_for(case, profiles))
    profile = profiles / profile_name(_BASE, case.ppn)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in cuts}
    with Lab(HOSTS, case.rate, kind="namespaces", cores=case.cores) as lab:
        for _ in range(rounds):
            for name, (cell, _predicted) in cuts.items():
                found[name].append(measure(lab, cell, profile, data, _SECONDS))
    record: dict[str, Any] = {"name": case.name, "rate": case.rate, "cores": case.cores, "ppn": case.ppn}
    for name, (cell, predicted) in cuts.items():
        by_round = [one["seconds"] for one in found[name]]
        record[name] = {
            "fields": cell.fields,
            "predicted": predicted,
            "measured": statistics.median(
                map(statistics.median, by_round)
            ),  # a disturbed round does not count
            "seconds": by_round,
            "losses": found[name][0]["losses"],
            "command": found[name][0]["command"],
        }
    for kind in ("predicted", "measured"):
        record[f"{kind}_ratio"] = record["even"][kind] / record["planner"][kind]
    record["ratio_error"] = record["measured_ratio"] / record["predicted_ratio"] - 1
    record["loss_difference"] = max(
        abs(a / b - 1) for a, b in zip(record["planner"]["losses"], record["even"]["losses"], strict=True)
    )
    return record


def say(row: dict[str, Any]) -> None:
    """Print a case's figures."""
    even, cut = row["even"], row["planner"]
    layers = " ".join(map(str, cut["fields"]["stage_layers"]))
    print(
        f"{row['name']:12} {row['rate']}, cores {row['cores']}: layers {layers}\n"
        f"  even    {even['measured'] * 1e3:7.1f} ms, predicted {even['predicted'] * 1e3:7.1f}\n"
        f"  planner {cut['measured'] * 1e3:7.1f} ms, predicted {cut['predicted'] * 1e3:7.1f}\n"
        f"  {row['measured_ratio']:.2f} times as fast, predicted {row['predicted_ratio']:.2f} "
        f"({row['ratio_error']:+.1%}); losses differ by {row['loss_difference']:.1e}",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases that the command line names; return 1 if losses differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [case.name for case in CASES]
    parser.add_argument("--case", choices=names, action="append", help="which to run (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="trainings of each cut (default 3)")
    parser.add_argument(
        "--profiles", type=Path, help="folder of the lab's profiles (default: they are measured)"
    )
    parser.add_argument(
        "--predict", action="store_true", help="predict by the committed profiles, and run nothing"
    )
    parser.add_argument("--json", type=Path, help="file to write")
    arguments = parser.parse_args(argv)
    cases = [case for case in CASES if case.name in (arguments.case or names)]
    if arguments.predict:
        for case in cases:
            even, cut = planned(case, cluster_for(case, arguments.profiles or PROFILES)).values()
            print(f"{case.name}: {even[1]:.3g} s, {cut[1]:.3g} s with {cut[0].fields['stage_layers']}")
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        profiles = arguments.profiles or Path(folder)
        if arguments.profiles is None:
            for ppn in sorted({case.ppn for case in cases}):
                calibrate(_BASE, ppn, profiles / profile_name(_BASE, ppn))
        data = Path(folder) / "text"
        data.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(20000)))
        for case in cases:
            rows.append(run(case, profiles, data, arguments.rounds))
            say(rows[-1])
            if arguments.json is not None:
                record = {"goal": _GOAL, "warm": WARM, "rounds": arguments.rounds, "cases": rows}
                write(arguments.json, record, "namespaces")
    return int(any(row["loss_difference"] > _SAME_LOSS for row in rows))


if __name__ == "__main__":
    sys.exit(main())

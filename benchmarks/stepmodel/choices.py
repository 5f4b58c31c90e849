"""Compare the layout that the model predicts to be the fastest of a job with the fastest that was measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from resultfile import commits, read, write

from stepmodel.cells import Cell
from stepmodel.comparing import Row, cluster_of, predicted

BATCH = 16  # sequences in a step
_MODELS = {
    "8 layers of 128": {"layers": 8, "d_model": 128, "heads": 4, "seq_len": 64},
    "4 layers of 320": {"layers": 4, "d_model": 320, "heads": 4, "seq_len": 32},
    "8 layers of 64": {"layers": 8, "d_model": 64, "heads": 2, "seq_len": 192},
}
_RATES = ("none", "1gbit", "200mbit")
_RANKS = ((1, "8 layers of 128"), (1, "4 layers of 320"), (1, "8 layers of 64"), (2, "8 layers of 128"))
_POLICIES = ("none", "int8:block=128")
# pp, dp, micro-batches and sequences in each, by ranks on a host.
_LAYOUTS = {
    1: ((1, 4, 1, 4), (2, 2, 4, 2), (4, 1, 8, 2)),
    2: ((1, 8, 1, 2), (2, 4, 2, 2), (4, 2, 4, 2)),
}
ENOUGH = 1.05  # times the fastest


def _cells() -> dict[str, tuple[Cell, ...]]:
    found = {}
    for ppn, model in _RANKS:
        for rate in _RATES if ppn == 1 else _RATES[-1:]:
            case = f"{model}, {4 * ppn} ranks, {rate}"
            layouts: list[tuple[str, dict[str, Any]]] = [
                (
                    f"pp{pp} dp{dp}, {count} micro-batches of {size}, {policy}",
                    {"pp": pp, "dp": dp, "micro_batches": count, "micro_batch_size": size, "policy": policy},
                )
                for pp, dp, count, size in _LAYOUTS[ppn]
                for policy in _POLICIES
            ]
            found[case] = tuple(
                Cell(f"{case}: {name}", rate, ppn, {**_MODELS[model], "schedule": "1f1b", **layout})
                for name, layout in layouts
            )
    return found


CASES = _cells()
"""Ten jobs of a model on a network by name, each with all layouts that are measured."""


def choose(out: Path, overheads: dict[str, float], say: Callable[[str], None] = print) -> None:
    """Predict all layouts of each job, and write the chosen and the fastest one to choices.json."""
    rows: dict[str, Row] = {row["name"]: row for row in read(out / "chosen.json")["rows"]}
    cases = []
    for case, cells in CASES.items():
        layouts = [rows[cell.name] for cell in cells]
        for row in layouts:
            row["predicted"] = predicted(row, cluster_of(row, out, overheads)).seconds
        choice = min(layouts, key=lambda row: float(row["predicted"]))
        best, worst = (of(layouts, key=lambda row: float(row["median"])) for of in (min, max))
        cases.append(
            {
                "case": case,
                "chosen": choice["name"].partition(": ")[2],
                "fastest": best["name"].partition(": ")[2],
                "of_fastest": choice["median"] / best["median"],
                "slowest_of_fastest": worst["median"] / best["median"],
                "layouts": layouts,
            }
        )
        say(f"{cases[-1]['of_fastest']:5.2f} of the fastest: {case}: {cases[-1]['chosen']}")
    good = sum(case["of_fastest"] <= ENOUGH for case in cases)
    say(f"{good} of {len(cases)} within {ENOUGH - 1:.0%}")
    write(out / "choices.json", {"commit": commits(rows.values()), "rows": cases}, "namespaces")

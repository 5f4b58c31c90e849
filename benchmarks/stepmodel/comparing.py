"""Predict the trainings that were measured, and write what came of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from modelbench.fitting import errors

from hybridcomp import style
from hybridcomp.planner.cluster import Cluster
from hybridcomp.planner.compute import Fitted
from hybridcomp.planner.site import read_site
from hybridcomp.planner.step.prediction import StepPrediction, predict_step
from hybridcomp.train.config import TrainConfig
from stepmodel.cells import HOSTS, profile_name

CORES = 2.0  # of the machine that the lab is on
FITTED = ("pass", "replica", "send", "sum", "step")
_ROUNDS = 5
_GUESS = 1e-3  # seconds, of each
_DIFFERENCE = 1e-4

Row = dict[str, Any]


def cluster_of(row: Row, folder: Path, overheads: Mapping[str, float] | None = None) -> Cluster:
    """Return what a training ran on, as its profile describes it, with other overheads if some are given."""
    found = read_site(str(folder / profile_name(row["rate"], row["ppn"])), HOSTS, row["ppn"])
    compute = found.compute
    if overheads is not None:
        assert isinstance(compute, Fitted)
        rows = dict(compute.rows)
        for name in rows:
            seconds = overheads.get(name.partition(".")[0])
            if seconds is not None:
                rows[name] = (seconds, 0.0, 0.0)
        compute = replace(compute, rows=rows)
    return replace(found, cores=CORES, compute=compute)


def predicted(row: Row, cluster: Cluster) -> StepPrediction:
    """Predict one training."""
    return predict_step(TrainConfig(**row["fields"]), cluster)


def fit(rows: Sequence[Row], folder: Path) -> dict[str, float]:
    """Fit the overheads to trainings: by Gauss and Newton, relative errors, none negative."""
    from scipy.optimize import nnls  # noqa: PLC0415  (of the extra "plan")

    found = dict.fromkeys(FITTED, _GUESS)
    measured = np.array([row["median"] for row in rows])

    def seconds(overheads: Mapping[str, float]) -> np.ndarray[Any, Any]:
        return np.array([predicted(row, cluster_of(row, folder, overheads)).seconds for row in rows])

    for _ in range(_ROUNDS):
        now = seconds(found)
        columns = [(seconds(found | {n: found[n] + _DIFFERENCE}) - now) / _DIFFERENCE for n in FITTED]
        slopes = np.stack(columns, axis=1)
        target = measured - now + slopes @ np.array([found[n] for n in FITTED])
        best, _residual = nnls(slopes * _DIFFERENCE / measured[:, None], target / measured)
        found = dict(zip(FITTED, map(float, best * _DIFFERENCE), strict=True))
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def summed(rows: Sequence[Row], key: str) -> dict[str, float]:
    """Return the errors of predictions, the largest of them, and Spearman's correlation with what was measured."""
    from scipy.stats import spearmanr  # noqa: PLC0415

    predictions, measured = ([row[name] for row in rows] for name in (key, "median"))
    found = errors(np.array(predictions), [{"seconds": seconds} for seconds in measured])
    largest = max(abs(p - m) / m for p, m in zip(predictions, measured, strict=True))
    return found | {"largest": largest, "spearman": float(spearmanr(predictions, measured).statistic)}


def compare(out: Path, say: Callable[[str], None] = print) -> None:
    """Predict all that was measured, and write steps.json and steps.png."""
    rows: list[Row] = json.loads((out / "measured.json").read_text())
    fitted: list[Row] = json.loads((out / "fitted.json").read_text())
    overheads = fit(fitted, out)
    say(f"fitted to {len(fitted)} trainings: {overheads}")
    for row in (*fitted, *rows):
        found = predicted(row, cluster_of(row, out, overheads))
        row |= {
            "predicted": found.seconds,
            "unsynchronised": found.unsynchronised,
            "compute": found.compute,
            "exposed": dict(found.exposed),
            "predicted_wire": dict(found.wire_bytes),
        }
    for kind, of in (("fitted", fitted), ("unseen", rows)):
        say(f"{kind}: {len(of)} trainings")
        for row in sorted(of, key=lambda r: r["predicted"] / r["median"]):
            ms = {key: f"{row[key] * 1e3:7.1f}" for key in ("median", "predicted", "unsynchronised")}
            say(
                f"  {ms['median']} ms, predicted {ms['predicted']} ({row['predicted'] / row['median']:.2f}), "
                f"unsynchronised {ms['unsynchronised']}  {row['name']}"
            )
        for key in ("predicted", "unsynchronised"):
            say(f"  {key}: " + ", ".join(f"{name} {value:.3g}" for name, value in summed(of, key).items()))
    figures = {key: summed(rows, key) for key in ("predicted", "unsynchronised")}
    record = {"overheads": overheads, "figures": figures, "fitted": fitted, "unseen": rows}
    (out / "steps.json").write_text(json.dumps(record, indent=1) + "\n")
    draw(rows, out / "steps.png")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw predicted against measured."""
    import matplotlib  # noqa: PLC0415

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, axes = pyplot.subplots(figsize=(6, 5.4), dpi=110)
    measured = [row["median"] * 1e3 for row in rows]
    ends = min(measured) / 1.6, max(measured) * 1.6
    axes.plot(ends, ends, color="0.5", linewidth=1)
    for key, marker, colour, label in (
        ("predicted", "o", style.SERIES[0], "predicted"),
        ("unsynchronised", "x", style.SERIES[1], "without waiting of ranks"),
    ):
        axes.scatter(
            measured, [row[key] * 1e3 for row in rows], marker=marker, color=colour, s=28, label=label
        )
    axes.set(xscale="log", yscale="log", xlim=ends, xlabel="measured ms of a step", ylabel="predicted ms")
    axes.legend(frameon=False)
    axes.grid(True, which="major", color="0.9")
    figure.tight_layout()
    figure.savefig(path)

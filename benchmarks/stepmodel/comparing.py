"""Predict the trainings that were measured, and write figures and a picture."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from resultfile import commits, read, write

from hybridcomp import style
from hybridcomp.perfmodel.fitting import errors
from hybridcomp_lab.planner.cluster import Cluster
from hybridcomp_lab.planner.compute import Fitted
from hybridcomp_lab.planner.site import read_site
from hybridcomp_lab.planner.step.prediction import StepPrediction, predict_step
from hybridcomp_lab.train.config import TrainConfig
from stepmodel.cells import HOSTS, profile_name

CORES = 2.0  # cores of the machine that the lab is on
# Where the fit begins: seconds of a step's overheads beside its operations, and a waiting rank's share of a core.
FITTED = {
    "pass": 2e-4,
    "replica": 1e-3,
    "send": 5e-4,
    "sum": 3e-4,
    "coded": 1e-4,
    "step": 3e-3,
    "waiting": 0.1,
}
_MOST = 10.0  # largest factor on these that the fit tries
_STEPS = 25

Row = dict[str, Any]


def cluster_of(row: Row, folder: Path, overheads: Mapping[str, float] | None = None) -> Cluster:
    """Return the cluster that a training ran on, as its profile describes it, with other overheads if given.

    The links' latency is that of one rank a host: with two, eight ranks share two cores as they measure it, and the
    replay counts the wait for a core by itself.
    """
    found = _site(folder, row["rate"], row.get("hosts", HOSTS), row["ppn"])
    compute, waiting = found.compute, found.waiting
    if overheads is not None:
        assert isinstance(compute, Fitted)
        rows = {f"{name}.forward": (seconds, 0.0, 0.0) for name, seconds in overheads.items()}
        rows["pass.backward"] = rows["pass.forward"]
        waiting = overheads["waiting"]
        compute = replace(compute, rows={**compute.rows, **rows})
    return replace(found, cores=CORES, compute=compute, waiting=waiting)


@functools.cache  # returns the same profile each time, since costs are cached by it
def _site(folder: Path, rate: str, hosts: int, ranks_per_host: int) -> Cluster:
    found = read_site(str(folder / profile_name(rate, ranks_per_host)), hosts, ranks_per_host)
    alone = read_site(str(folder / profile_name(rate, 1)), hosts, 1)
    network = replace(found.profile.network, latency=alone.profile.network.latency)
    return replace(found, profile=replace(found.profile, network=network))


def predicted(row: Row, cluster: Cluster) -> StepPrediction:
    """Predict one training."""
    return predict_step(TrainConfig(**row["fields"]), cluster)


def fit(rows: Sequence[Row], folder: Path) -> dict[str, float]:
    """Fit the overheads to trainings: by logarithms of the times, none negative."""
    from scipy.optimize import least_squares  # noqa: PLC0415  (of the extra "plan")

    measured = np.array([row["median"] for row in rows])

    def residuals(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        overheads = dict(zip(FITTED, x * np.array(list(FITTED.values())), strict=True))
        times = [predicted(row, cluster_of(row, folder, overheads)).seconds for row in rows]
        return np.log(np.array(times) / measured)

    best = least_squares(
        residuals, np.ones(len(FITTED)), bounds=(0.0, _MOST), diff_step=0.02, max_nfev=_STEPS
    )
    return {name: float(f"{x * FITTED[name]:.3g}") for name, x in zip(FITTED, best.x, strict=True)}


def summed(rows: Sequence[Row], key: str) -> dict[str, float]:
    """Return the errors of predictions, the largest of them, and Spearman's correlation with what was measured."""
    from scipy.stats import spearmanr  # noqa: PLC0415

    predictions, measured = ([row[name] for row in rows] for name in (key, "median"))
    found = errors(predictions, measured)
    largest = max(abs(p - m) / m for p, m in zip(predictions, measured, strict=True))
    return found | {"largest": largest, "spearman": float(spearmanr(predictions, measured).statistic)}


def compare(out: Path, say: Callable[[str], None] = print) -> None:
    """Predict all measured trainings, and write steps.json and steps.png."""
    rows: list[Row] = read(out / "measured.json")["rows"]
    fitted: list[Row] = read(out / "fitted.json")["rows"]
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
    record = {
        "commit": commits((*fitted, *rows)),
        "overheads": overheads,
        "figures": figures,
        "fitted": fitted,
        "unseen": rows,
    }
    write(out / "steps.json", record, "namespaces")
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

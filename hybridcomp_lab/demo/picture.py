"""Draw the demonstration in one picture: loss over wall time, and bytes per axis."""

from __future__ import annotations

import itertools
import math
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from hybridcomp.results.pictures import png, run_styles, smoothed
from hybridcomp.results.record import RunRecord
from hybridcomp.style import LIGHT, Scheme
from hybridcomp_lab.demo.plan import BASELINE
from hybridcomp_lab.demo.report import Report
from hybridcomp_lab.demo.runner import Outcome

# Hatches repeat the distinction that colours make.
_AXIS_STYLES = {"dp": (5, ""), "pp": (4, "///"), "tp": (7, "...")}  # numbers of series' colours
AXIS_LABELS = {"dp": "data (dp)", "pp": "pipeline (pp)", "tp": "tensor (tp, inside a host)"}


def draw(outcome: Outcome, report: Report, scheme: Scheme = LIGHT) -> bytes:
    """Return the picture as PNG."""
    with mpl.rc_context(scheme.settings):
        figure = Figure(figsize=(11.5, 4.8), dpi=150, layout="constrained")
        losses, traffic = figure.subplots(1, 2, width_ratios=(1.7, 1))
        _draw_losses(losses, outcome, report, scheme)
        _draw_traffic(traffic, report, scheme)
        return png(figure)


def _draw_losses(axes: Any, outcome: Outcome, report: Report, scheme: Scheme) -> None:
    top = []
    for row, (colour, marker) in zip(report.rows, itertools.cycle(run_styles(scheme)), strict=False):
        record = outcome.records[row.name]
        label = row.name if row.name == BASELINE else f"{row.name} ({row.speedup:.1f}x tokens/s)"
        top += _draw_run(axes, record, {"color": colour, "marker": marker}, label, scheme.paper)
    axes.set_xlabel("training time (seconds, evaluations excluded)")
    axes.set_ylabel("loss (nats per token)")
    where = f" at {outcome.plan.rate}" if report.share is not None else ""
    axes.set_title(f"Loss over wall time{where}")
    axes.set_xlim(left=0)
    if top:
        axes.set_ylim(top=max(top) * 1.03)
    axes.grid(alpha=0.25)
    axes.legend(title="line: training (smoothed), marker: validation", frameon=False, title_fontsize=9)


def _draw_run(axes: Any, record: RunRecord, style: dict[str, str], label: str, paper: str) -> list[float]:
    """Draw one run and return its first loss, if it has one."""
    seconds = [row["elapsed"] for row in record.train]
    line = smoothed([row["loss"] for row in record.train])
    axes.plot(seconds[: len(line)], line, color=style["color"], linewidth=1.6)
    shown: dict[str, Any] = {**style, "markersize": 7, "markeredgecolor": paper}
    axes.plot([], [], linewidth=1.6, label=label, **shown)  # for the legend, with line and marker in one
    points = [(row["elapsed"], row["loss"]) for row in record.evaluations if math.isfinite(row["loss"])]
    axes.plot(
        [x for x, _ in points],
        [y for _, y in points],
        linestyle="none",
        zorder=3,
        **shown,
    )
    return line[:1]


def _draw_traffic(axes: Any, report: Report, scheme: Scheme) -> None:
    names = [row.name for row in report.rows]
    unit, divisor = _unit(max(sum(row.wire_bytes.values()) for row in report.rows))
    bottom = [0.0] * len(names)
    for axis in report.axes:
        series, hatch = _AXIS_STYLES[axis]
        heights = [row.wire_bytes.get(axis, 0) / divisor for row in report.rows]
        axes.bar(
            names,
            heights,
            bottom=bottom,
            width=0.62,
            color=scheme.series[series],
            hatch=hatch,
            edgecolor=scheme.paper,
            linewidth=0.8,
            label=AXIS_LABELS[axis],
        )
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    for index, total in enumerate(bottom):
        axes.annotate(
            f"{total:.3g} {unit}", (index, total), xytext=(0, 3), textcoords="offset points", ha="center"
        )
    axes.set_xlabel("policy")
    axes.set_ylabel(f"bytes sent by all ranks ({unit})")
    axes.set_title("Traffic per axis")
    axes.set_ylim(top=max(bottom) * 1.15 or 1)  # margins do not widen what ends in a bar of no height
    axes.legend(title="parallelism", frameon=False, title_fontsize=9)


def _unit(largest: float) -> tuple[str, float]:
    return ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6) if largest >= 1e6 else ("kB", 1e3)

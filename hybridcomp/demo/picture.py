"""Draw the demonstration in one picture: loss over wall time, and bytes per axis."""

from __future__ import annotations

import io
import itertools
import math
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hybridcomp.demo.plan import BASELINE
from hybridcomp.demo.record import RunRecord
from hybridcomp.demo.report import Report
from hybridcomp.demo.runner import Outcome
from hybridcomp.style import PICTURE, SERIES

# Markers and hatches repeat the distinction that colours make.
RUN_STYLES = tuple(zip(SERIES, "os^Dv", strict=False))
AXIS_STYLES = {"dp": (SERIES[5], ""), "pp": (SERIES[4], "///"), "tp": (SERIES[7], "...")}
AXIS_LABELS = {"dp": "data (dp)", "pp": "pipeline (pp)", "tp": "tensor (tp, inside a host)"}
SMOOTHING = 0.75


def draw(outcome: Outcome, report: Report) -> bytes:
    """Return the picture as PNG."""
    with mpl.rc_context(PICTURE):
        figure = Figure(figsize=(11.5, 4.8), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        losses, traffic = figure.subplots(1, 2, width_ratios=(1.7, 1))
        _draw_losses(losses, outcome, report)
        _draw_traffic(traffic, report)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def smoothed(values: list[float]) -> list[float]:
    """Return the exponential moving average, unbiased at its start, up to the first non-finite value."""
    mean, weight, result = 0.0, 0.0, []
    for value in values:
        if not math.isfinite(value):
            break
        mean = SMOOTHING * mean + (1 - SMOOTHING) * value
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        result.append(mean / weight)
    return result


def _draw_losses(axes: Any, outcome: Outcome, report: Report) -> None:
    top = []
    for row, (colour, marker) in zip(report.rows, itertools.cycle(RUN_STYLES), strict=False):
        record = outcome.records[row.name]
        label = row.name if row.name == BASELINE else f"{row.name} ({row.speedup:.1f}x tokens/s)"
        top += _draw_run(axes, record, colour, marker, label)
    axes.set_xlabel("training time (seconds, evaluations excluded)")
    axes.set_ylabel("loss (nats per token)")
    where = f" at {outcome.plan.rate}" if report.share is not None else ""
    axes.set_title(f"Loss over wall time{where}")
    axes.set_xlim(left=0)
    if top:
        axes.set_ylim(top=max(top) * 1.03)
    axes.grid(alpha=0.25)
    axes.legend(title="line: training (smoothed), marker: validation", frameon=False, title_fontsize=9)


def _draw_run(axes: Any, record: RunRecord, colour: str, marker: str, label: str) -> list[float]:
    """Draw one run and return its first loss, if it has one."""
    seconds = [row["elapsed"] for row in record.train]
    line = smoothed([row["loss"] for row in record.train])
    axes.plot(seconds[: len(line)], line, color=colour, linewidth=1.6)
    shown = {"color": colour, "marker": marker, "markersize": 7, "markeredgecolor": "white"}
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


def _draw_traffic(axes: Any, report: Report) -> None:
    names = [row.name for row in report.rows]
    unit, divisor = _unit(max(sum(row.wire_bytes.values()) for row in report.rows))
    bottom = [0.0] * len(names)
    for axis in report.axes:
        colour, hatch = AXIS_STYLES[axis]
        heights = [row.wire_bytes.get(axis, 0) / divisor for row in report.rows]
        axes.bar(
            names,
            heights,
            bottom=bottom,
            width=0.62,
            color=colour,
            hatch=hatch,
            edgecolor="white",
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
    axes.margins(y=0.15)
    axes.legend(title="parallelism", frameon=False, title_fontsize=9)


def _unit(largest: float) -> tuple[str, float]:
    return ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6) if largest >= 1e6 else ("kB", 1e3)

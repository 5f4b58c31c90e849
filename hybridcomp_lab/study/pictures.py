"""Draw a study's pictures: loss over steps, speed by link, speed against loss, and loss against bits per value."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from hybridcomp.codecs import get_codec
from hybridcomp.results.pictures import png, run_styles
from hybridcomp.style import LIGHT, Scheme, picture_text
from hybridcomp_lab.study.results import Losses, Results

_SAMPLE = 1 << 20  # values of the message that gives a codec's bits per value
_LINES = ("-", "--", ":", "-.")


def pictures(results: Results, scheme: Scheme = LIGHT) -> dict[str, bytes]:
    """Draw the pictures for which the runs have figures, as PNG, by file name without the suffix."""
    swept = any(variant.series is not None for variant in results.study.variants)
    made: dict[str, Callable[[Results, Scheme], Figure]] = {}
    if results.losses and not swept:
        made["loss"] = _loss
    if swept and results.losses:
        made["bits"] = _bits
    if results.speeds:
        made["speed"] = _speed
    if results.speeds and results.losses:
        made["tradeoff"] = _tradeoff
    with mpl.rc_context(scheme.settings):
        return {name: png(draw(results, scheme)) for name, draw in made.items()}


def _spread(results: Results) -> float:
    """Return the standard deviation of the baseline's loss over the seeds; 0 where it is not known."""
    base = results.losses.get(results.study.baseline)
    return base.spread if base is not None and math.isfinite(base.spread) else 0.0


def _styles(results: Results, scheme: Scheme) -> dict[str, dict[str, Any]]:
    """Return colour, marker and line of each variant; the same in all pictures."""
    given = itertools.product(_LINES, run_styles(scheme))
    return {
        variant.name: {"color": colour, "marker": marker, "linestyle": line}
        for variant, (line, (colour, marker)) in zip(
            results.study.variants, itertools.cycle(given), strict=False
        )
    }


def _loss(results: Results, scheme: Scheme) -> Figure:
    figure = Figure(figsize=(7.5, 4.6), dpi=150, layout="constrained")
    axes = figure.subplots()
    styles = _styles(results, scheme)
    ends = []
    for name, losses in results.losses.items():
        steps, values = list(losses.curve), list(losses.curve.values())
        axes.plot(
            steps,
            values,
            label=f"{picture_text(name)} ({losses.mean:.3f})",
            linewidth=1.6,
            markersize=5,
            **styles[name],
        )
        ends += [
            value for step, value in losses.curve.items() if math.isfinite(value) and step >= steps[-1] // 4
        ]
    if ends:  # the first steps would flatten the rest
        room = 0.06 * (max(ends) - min(ends) or 1)
        axes.set_ylim(min(ends) - room, max(ends) + room)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("validation loss (nats per token)")
    count = len(results.study.loss.seeds) if results.study.loss else 0
    axes.set_title(f"Validation loss, mean of {count} seed{'s' * (count != 1)}")
    axes.grid(alpha=0.25)
    axes.legend(title="variant (at the end)", frameon=False, title_fontsize=9)
    return figure


def _speed(results: Results, scheme: Scheme) -> Figure:
    rates = list(results.speeds)
    figure = Figure(figsize=(3.6 * len(rates) + 0.6, 4.2), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(rates), squeeze=False)[0]
    styles = _styles(results, scheme)
    for panel, rate in zip(panels, rates, strict=True):
        rows = results.speeds[rate]
        for position, (name, speeds) in enumerate(rows.items()):
            low, high = speeds.ratio - min(speeds.ratios), max(speeds.ratios) - speeds.ratio
            panel.bar(position, speeds.ratio, color=styles[name]["color"], width=0.7)
            panel.errorbar(position, speeds.ratio, [[low], [high]], color=scheme.ink, capsize=3, linewidth=1)
            panel.annotate(f"{speeds.ratio:.2f}", (position, max(speeds.ratios)), xytext=(0, 3),
                           textcoords="offset points", ha="center", fontsize=9)  # fmt: skip
        panel.axhline(1, color=scheme.ink, linewidth=0.8)
        panel.set_xticks(range(len(rows)), [picture_text(name) for name in rows], rotation=35, ha="right")
        panel.set_title("unshaped links" if rate == "none" else f"links at {rate}")
        panel.margins(y=0.12)
    panels[0].set_ylabel(f"samples per second, ratio to {picture_text(results.study.baseline)}")
    return figure


def _tradeoff(results: Results, scheme: Scheme) -> Figure:
    rates = list(results.speeds)
    figure = Figure(figsize=(3.9 * len(rates) + 0.6, 4.2), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(rates), squeeze=False, sharey=True)[0]
    styles = _styles(results, scheme)
    spread = (
        results.losses[results.study.baseline].spread if results.study.baseline in results.losses else 0.0
    )
    for panel, rate in zip(panels, rates, strict=True):
        for name, speeds in results.speeds[rate].items():
            losses = results.losses.get(name)
            if losses is None or not math.isfinite(losses.gap):
                continue
            panel.plot(speeds.ratio, losses.gap, markersize=9, linestyle="none", color=styles[name]["color"],
                       marker=styles[name]["marker"])  # fmt: skip
            panel.annotate(
                picture_text(name),
                (speeds.ratio, losses.gap),
                xytext=(6, 6),
                textcoords="offset points",
                fontsize=9,
            )
        panel.axhspan(-spread, spread, color="#999999", alpha=0.2, linewidth=0)
        panel.set_xlabel("samples per second, ratio")
        panel.set_title("unshaped links" if rate == "none" else f"links at {rate}")
        panel.margins(x=0.25, y=0.15)
        panel.grid(alpha=0.25)
    panels[0].set_ylabel(
        f"validation loss above {picture_text(results.study.baseline)}\n(grey: its spread over the seeds)"
    )
    return figure


def bits_per_value(codec: str) -> float:
    """Return the bits per value in the codec's message of 2^20 normally distributed float32 values."""
    sample = np.random.default_rng(0).standard_normal(_SAMPLE, dtype=np.float32)
    return 8 * float(np.asarray(get_codec(codec).encode(sample)).nbytes) / sample.size


def _bits(results: Results, scheme: Scheme) -> Figure:
    figure = Figure(figsize=(8, 4.8), dpi=150, layout="constrained")
    axes = figure.subplots()
    by_series: dict[str, dict[float, Losses]] = {}
    for variant in results.study.variants:
        if variant.series is not None and variant.codec is not None and variant.name in results.losses:
            found = by_series.setdefault(variant.series, {})
            found[bits_per_value(variant.codec)] = results.losses[variant.name]
    for (series, points), (colour, marker) in zip(
        by_series.items(), itertools.cycle(run_styles(scheme)), strict=False
    ):
        _draw_series(axes, series, points, colour, marker)
    spread = (
        results.losses[results.study.baseline].spread if results.study.baseline in results.losses else 0.0
    )
    axes.axhspan(-spread, spread, color="#999999", alpha=0.2, linewidth=0)
    axes.set_yscale("symlog", linthresh=max(0.002, spread))
    axes.set_xlabel("bits per value on the wire")
    axes.set_ylabel(
        f"validation loss above {picture_text(results.study.baseline)} (nats)\n(grey: its spread over the seeds)"
    )
    axes.set_title("What compressing one kind of traffic alone costs")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, title="compressed alone", title_fontsize=9)
    return figure


def _draw_series(axes: Any, series: str, points: Mapping[float, Losses], colour: str, marker: str) -> None:
    ends = {bits: losses for bits, losses in sorted(points.items()) if math.isfinite(losses.gap)}
    gaps = [losses.gap for losses in ends.values()]
    below = [losses.gap - min(losses.gaps.values()) for losses in ends.values()]
    above = [max(losses.gaps.values()) - losses.gap for losses in ends.values()]
    axes.errorbar(
        list(ends),
        gaps,
        [below, above],
        label=picture_text(series),
        color=colour,
        marker=marker,
        capsize=3,
        linewidth=1.4,
    )

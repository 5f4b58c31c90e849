"""Pictures of the measurements."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hybridcomp.net.rate import Rate
from hybridcomp.style import SERIES

from .figures import size_text

_MARKERS = "osv^DPX*"  # lines differ by marker as well as by colour
Line = list[tuple[float, float]]


def busbw(record: dict[str, Any], path: Path) -> None:
    """Draw busbw over size: a line for each codec and peer, dashed where the link limits what is compressed.

    Args:
        record: record of one benchmark.
        path: PNG file to write.
    """
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    lines = {row["codec"]: _line(record["rows"], "codec", row["codec"], "busbw") for row in record["rows"]}
    lines |= {row["peer"]: _line(record["peers"], "peer", row["peer"], "busbw") for row in record["peers"]}
    _draw(axes, lines)
    for i, codec in enumerate(dict.fromkeys(row["codec"] for row in record["rows"])):
        limits = [
            (row["size"], row["busbw"] / row["wire_fraction"])
            for row in record["rows"]
            if row["codec"] == codec and row["wire_fraction"]
        ]
        if limits:
            axes.plot(*zip(*limits, strict=True), "--", color=SERIES[i % len(SERIES)], linewidth=1)
    _finish(
        axes,
        f"{record['operation']}, {record['ranks']} ranks, {link_text(record)}",
        "busbw (GB/s, uncompressed bytes)",
    )
    axes.legend(fontsize="small")
    _save(figure, path)


def speedups(records: Iterable[dict[str, Any]], path: Path) -> None:
    """Draw each codec's speed over that of the best peer, over size: a panel for each link, one operation."""
    panels: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        panels.setdefault(link_text(record), []).append(record)
    figure = Figure(figsize=(4.2 * len(panels), 4.2), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (link, group) in zip(grid, panels.items(), strict=True):
        rows = [row for record in group for row in record["rows"]]
        codecs = dict.fromkeys(row["codec"] for row in rows)
        _draw(axes, {codec: _line(rows, "codec", codec, "speedup") for codec in codecs})
        axes.axhline(1, color="black", linewidth=0.8)
        _finish(axes, link, "times as fast as the best peer" if axes is grid[0] else "")
    grid[0].legend(fontsize="x-small")
    _save(figure, path)


def link_text(record: dict[str, Any]) -> str:
    """Return the link of a record, in words."""
    if record["hosts"] == 1:
        return "shared memory"
    if record["link"] == "this network":
        return "network"
    rate = Rate.parse(record["link"])
    bits = rate.bits_per_second
    if bits is None:
        return "unshaped"
    return f"{bits / 1e9:g} Gb/s" if bits >= 1e9 else f"{bits / 1e6:g} Mb/s"


def _line(rows: list[dict[str, Any]], key: str, name: str, value: str) -> Line:
    return sorted((row["size"], row[value]) for row in rows if row[key] == name)


def _draw(axes: Axes, lines: dict[str, Line]) -> None:
    for i, (name, points) in enumerate(lines.items()):
        style = {"color": SERIES[i % len(SERIES)], "marker": _MARKERS[i % len(_MARKERS)]}
        axes.plot(*zip(*points, strict=True), label=name, markersize=4, **style)


def _finish(axes: Axes, title: str, label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: size_text(round(value)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:.0e}"[0] in "25" else "")
    axes.set(title=title, xlabel="size (bytes)", ylabel=label)
    axes.grid(True, which="major", alpha=0.3)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=110)

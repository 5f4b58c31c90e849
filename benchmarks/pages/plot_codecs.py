"""Two pictures of benchmarks/codecs.py's results: error, and speed, against bits per value.

python benchmarks/pages/plot_codecs.py                      # from and to benchmarks/results
python benchmarks/pages/plot_codecs.py runs/bench           # from and to another folder
"""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.colors
import matplotlib.lines
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from page import RESULTS, codec_records
from PIL import Image

from hybridcomp.style import PICTURE, SERIES

SHOWN = ("Gaussian", "gradients")  # data sets in the picture of errors

# Families differ by marker as well as by colour.
STYLES = {
    "exact": ("#000000", "*"),
    "cast": (SERIES[4], "P"),
    "integer": (SERIES[0], "o"),
    "small float": (SERIES[2], "^"),
    "error-bounded": (SERIES[5], "s"),
    "sparse": (SERIES[1], "D"),
    "low rank": (SERIES[3], "v"),
    "homomorphic": (SERIES[6], "X"),
    "other": ("#777777", "h"),
}
EXACT_AT = 1e-5  # where an error of zero is drawn
BITS = (0.03, 0.1, 0.3, 1, 2, 4, 8, 16, 32)
SMALL = 8.0  # font size of labels, in points
COLOURS = 256  # colours of a picture: enough for its edges, and a third of the bytes

Row = dict[str, Any]
Point = tuple[float, float]
Box = tuple[float, float, float, float]  # left, bottom, right, top in pixels


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    record = codec_records(folder)[0]
    with mpl.rc_context(PICTURE):
        save(draw_errors(record), folder / "codecs_error.png")
        save(draw_speeds(record), folder / "codecs_speed.png")


def save(figure: Figure, path: Path) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    Image.open(buffer).convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")


def measured(record: dict[str, Any], *, ours: bool) -> list[Row]:
    return [row for row in record["rows"] if "encode" in row and row["ours"] is ours]


def canvas(height: float, columns: int) -> tuple[Figure, Sequence[Any]]:
    figure = Figure(figsize=(12.5, height), dpi=110)
    FigureCanvasAgg(figure)
    figure.subplots_adjust(left=0.055, right=0.99, top=0.9, bottom=0.075, wspace=0.12)
    return figure, figure.subplots(1, columns)


def bits_axis(axes: Any) -> None:
    axes.set_xscale("log")
    axes.set_xticks(BITS, [f"{bits:g}" for bits in BITS])
    axes.minorticks_off()
    axes.set_xlabel("bits per value (32 uncompressed)")
    axes.grid(alpha=0.25)


# -- labels ------------------------------------------------------------------------------------------------


class Labels:
    """Labels beside points, placed so that they cover neither points nor each other.

    Each label takes the cheapest of some spots around its point; a few rounds, since it depends on the others.

    Args:
        axes: axes whose scales and limits are set.
        points: all points drawn, in data coordinates.
    """

    def __init__(self, axes: Any, points: Sequence[Point]) -> None:
        self._axes = axes
        self._frame: Box = tuple(axes.bbox.extents)
        self._pixel = axes.figure.dpi / 72  # pixels in a point of type
        self._markers = [self._around(axes.transData.transform(point)) for point in points]
        self._labels: list[tuple[Any, Any, float, float]] = []  # annotation, place, width, height
        self._chosen: list[tuple[Box, Any]] = []

    def _around(self, place: Any) -> Box:
        radius = 4.5 * self._pixel
        return place[0] - radius, place[1] - radius, place[0] + radius, place[1] + radius

    def add(self, text: str, point: Point, colour: Any) -> None:
        """Label ``point``."""
        note = self._axes.annotate(
            text,
            point,
            xytext=(0, 0),
            textcoords="offset pixels",
            va="bottom",
            ha="left",
            fontsize=SMALL,
            color=colour,
        )
        extent = note.get_window_extent()
        self._labels.append((note, self._axes.transData.transform(point), extent.width, extent.height))

    def arrange(self) -> None:
        """Move the labels to their places; a thin line leads to one that found no room beside its point."""
        self._chosen = [((0, 0, 0, 0), (0, 0))] * len(self._labels)
        for _ in range(4):
            for i, (_, place, width, height) in enumerate(self._labels):
                others = self._markers + [box for j, (box, _) in enumerate(self._chosen) if j != i]
                least = math.inf
                for spot in self._spots():
                    if math.hypot(*spot) >= least:
                        break  # this far out, nothing is cheaper
                    box = self._box(place, spot, width, height)
                    cost = self._cost(box, spot, place, others)
                    if cost < least:
                        least, self._chosen[i] = cost, (box, spot)
        for (note, place, _, height), (box, spot) in zip(self._labels, self._chosen, strict=True):
            note.set_position((box[0] - place[0], box[1] - place[1]))
            if math.hypot(*spot) > 15 * self._pixel:
                end = max(box[0], min(place[0], box[2])), max(box[1], min(place[1], box[3] - height / 4))
                inverse = self._axes.transData.inverted()
                xs, ys = zip(inverse.transform(place), inverse.transform(end), strict=True)
                self._axes.plot(xs, ys, color=note.get_color(), linewidth=0.5, alpha=0.6, zorder=1)

    def _spots(self) -> list[Point]:
        """Return the offsets to try for a label from its point, in pixels, near ones first."""
        radii = (7, 12, 20, 30, 42, 56, 72, 90)
        angles = [step * math.pi / 12 for step in range(24)]
        return [
            (r * self._pixel * math.cos(angle), r * self._pixel * math.sin(angle))
            for r in radii
            for angle in angles
        ]

    @staticmethod
    def _box(place: Any, spot: Point, width: float, height: float) -> Box:
        """Return the box of a label: right of its point, left of it, or across, by its offset."""
        left = place[0] + spot[0] - (0 if spot[0] > 1 else width if spot[0] < -1 else width / 2)
        bottom = place[1] + spot[1] - height / 2
        return left, bottom, left + width, bottom + height

    def _cost(self, box: Box, spot: Point, place: Any, others: list[Box]) -> float:
        left, bottom, right, top = self._frame
        outside = (
            max(0, left - box[0]) + max(0, box[2] - right) + max(0, bottom - box[1]) + max(0, box[3] - top)
        )
        covered = sum(_overlap(box, other) for other in others)
        way = [(place[0] + part * spot[0], place[1] + part * spot[1]) for part in (0.35, 0.5, 0.65, 0.8)]
        crossed = sum(b[0] < x < b[2] and b[1] < y < b[3] for x, y in way for b in others)
        return 1000 * outside + 50 * covered + 8 * crossed + math.hypot(*spot)


def _overlap(a: Box, b: Box) -> float:
    across = min(a[2], b[2]) - max(a[0], b[0])
    up = min(a[3], b[3]) - max(a[1], b[1])
    return across * up if across > 0 and up > 0 else 0.0


def plot(axes: Any, rows: list[Row], place: Callable[[Row], Point], peers: list[Row]) -> None:
    """Draw each row at its place, ours filled, peers' hollow, and label them."""
    points = [(row, place(row)) for row in rows + peers]
    for row, (x, y) in points:
        colour, marker = STYLES[row["family"]]
        face = colour if row["ours"] else "white"
        axes.plot(
            x, y, marker=marker, color=colour, markerfacecolor=face, markersize=7.5, zorder=3, clip_on=False
        )
    labels = Labels(axes, [point for _, point in points])
    for row, point in points:
        labels.add(short(row["name"]), point, darker(STYLES[row["family"]][0] if row["ours"] else "#999999"))
    labels.arrange()


def darker(colour: str) -> tuple[float, ...]:
    """Return a colour for text, since the palette's are too light for thin strokes."""
    return tuple(0.7 * part for part in mpl.colors.to_rgb(colour))


def short(name: str) -> str:
    """Return the label of a codec, without the parameter names that everybody guesses."""
    for guessed in ("ratio=", "rounding=", "=true", "rate=", "rank="):
        name = name.replace(guessed, "")
    name = name.replace(",values=", " ")
    return name.removeprefix("numcodecs ").removesuffix(", Blosc zstd")


def legend(figure: Figure, rows: list[Row], *, peers: bool) -> None:
    shown = [family for family in STYLES if any(row["family"] == family for row in rows)]
    handles = [
        mpl.lines.Line2D(
            [], [], linestyle="none", color=STYLES[f][0], marker=STYLES[f][1], markersize=7, label=f
        )
        for f in shown
    ]
    if peers:
        hollow = {"color": "#777777", "markerfacecolor": "white", "marker": "o", "markersize": 7}
        handles.append(mpl.lines.Line2D([], [], linestyle="none", label="peers (hollow)", **hollow))
    figure.legend(handles=handles, loc="upper center", ncols=len(handles), frameon=False, handletextpad=0.2)


# -- the pictures ------------------------------------------------------------------------------------------


def draw_errors(record: dict[str, Any]) -> Figure:
    """Draw relative L2 error on Gaussian data and on gradients."""
    rows = measured(record, ours=True)
    names = [name for name in SHOWN if name in record["sets"]]
    figure, all_axes = canvas(7.0, len(names))
    legend(figure, rows, peers=False)
    for axes, name in zip(all_axes if len(names) > 1 else [all_axes], names, strict=True):
        bits_axis(axes)
        axes.set_yscale("log")
        axes.set_ylim(EXACT_AT / 2, 2)
        axes.set_yticks(
            [EXACT_AT, 1e-4, 1e-3, 1e-2, 0.1, 1], ["exact", "0.0001", "0.001", "0.01", "0.1", "1"]
        )
        axes.minorticks_off()
        axes.set_title(f"Relative L2 error: {name}")
        cells = {row["name"]: row["sets"][name] for row in rows}
        low = min(cell["bits"] for cell in cells.values())
        axes.set_xlim(min(0.03, low * 0.8), 45)

        def place(row: Row, cells: dict[str, Row] = cells) -> Point:
            return cells[row["name"]]["bits"], max(cells[row["name"]]["l2"], EXACT_AT)

        plot(axes, rows, place, [])
    return figure


def draw_speeds(record: dict[str, Any]) -> Figure:
    """Draw the speeds of encode and decode_add, ours and peers', with memcpy as a line."""
    rows, peers = measured(record, ours=True), measured(record, ours=False)
    figure, all_axes = canvas(8.6, 2)
    legend(figure, rows + peers, peers=bool(peers))
    for axes, operation in zip(all_axes, ("encode", "decode_add"), strict=True):
        bits_axis(axes)
        axes.set_yscale("log")
        speeds = [row[operation]["gb_s"] for row in rows + peers]
        copies = sorted(row[operation]["memcpy_gb_s"] for row in rows + peers)
        memcpy = copies[len(copies) // 2]
        axes.set_ylim(min(speeds) * 0.7, max(*speeds, memcpy) * 1.6)
        axes.set_xlim(min(0.03, *(row["sets"]["Gaussian"]["bits"] * 0.8 for row in rows)), 60)
        axes.set_yticks([0.03, 0.1, 0.3, 1, 3, 10, 30], ["0.03", "0.1", "0.3", "1", "3", "10", "30"])
        axes.minorticks_off()
        axes.set_ylim(min(speeds) * 0.7, max(*speeds, memcpy) * 1.6)
        axes.axhline(memcpy, color="#777777", linewidth=1, linestyle="--", zorder=1)
        axes.annotate(
            f"memcpy, {memcpy:.1f} GB/s",
            (axes.get_xlim()[0], memcpy),
            xytext=(4, 3),
            textcoords="offset points",
            fontsize=SMALL,
            color="#555555",
        )
        axes.set_title(f"{operation}: GB/s of input, one thread, Gaussian data")
        plot(
            axes,
            rows,
            lambda row, operation=operation: (row["sets"]["Gaussian"]["bits"], row[operation]["gb_s"]),
            peers,
        )
    return figure


if __name__ == "__main__":
    main()

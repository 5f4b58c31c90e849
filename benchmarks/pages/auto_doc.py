"""Write docs/auto.md's table of cells from the result files, and draw them and a job in which the links' rate changes.

python benchmarks/pages/auto_doc.py            # rewrite both
python benchmarks/pages/auto_doc.py --check    # exit 1 if docs/auto.md and the files differ
"""

from __future__ import annotations

import sys
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from page import RESULTS, ROOT, origin, origins, read, rewrite

from hybridcomp.style import PICTURE, SERIES

PAGE = ROOT / "docs" / "auto.md"
FOLDER = RESULTS / "auto"
LINKS = {"200mbit": "200mbit", "1gbit": "1gbit", "none": "unshaped"}
GOAL = 0.97
MARKERS = "os^d"

Row = dict[str, Any]


def table(records: dict[str, Row]) -> str:
    """Return the number of cells that miss the goal, and the table of all cells."""
    cells = [(LINKS[link], cell) for link, record in records.items() for cell in record["cells"]]
    missed = [sum(cell[of] < GOAL for _, cell in cells) for of in ("of_best", "of_none")]
    lines = [
        f"The goal is {GOAL} of the best, and of `none`, in every cell: "
        f"**{missed[0]} of {len(cells)} cells miss the first, {missed[1]} the second**.",
        "",
        "| link | operation | KiB | takes | best | of best | two alike | of `none` |",
        "|---|---|---:|---|---|---:|---:|---:|",
    ]
    for link, cell in cells:
        figures = f"{cell['of_best']:.2f} | {cell['alike']:.2f} | {cell['of_none']:.2f}"
        kib = cell["bytes"] // 1024
        lines.append(f"| {link} | {cell['op']} | {kib} | `{cell['auto']}` | `{cell['best']}` | {figures} |")
    lines += ["", origins({LINKS[link]: record for link, record in records.items()})]
    return "\n" + "\n".join(lines) + "\n"


def draw_cells(records: dict[str, Row]) -> Figure:
    """Draw auto's speed over that of the best fixed choice, by how long an operation takes."""
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for (link, record), colour, marker in zip(records.items(), SERIES, MARKERS, strict=False):
        times = [1e3 * cell["seconds"]["auto"] for cell in record["cells"]]
        for of, filled in (("of_best", colour), ("of_none", "none")):
            speeds = [cell[of] for cell in record["cells"]]
            what = "the best" if of == "of_best" else "none"
            axes.scatter(times, speeds, marker=marker, s=28, edgecolors=colour, facecolors=filled,
                         label=f"{LINKS[link]}, over {what}")  # fmt: skip
    axes.axhline(GOAL, color="0.4", linewidth=1)
    axes.annotate(f"goal: {GOAL}", (0, GOAL), xytext=(4, -12), xycoords=("axes fraction", "data"),
                  textcoords="offset points")  # fmt: skip
    axes.set(
        xscale="log", yscale="log", xlabel="ms of an operation by auto", ylabel="speed of auto over another's"
    )
    axes.set_yticks([0.5, 1, 2, 5, 10], ["0.5", "1", "2", "5", "10"], minor=False)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend(frameon=False, ncols=3, loc="upper left", fontsize=8)
    return figure


def change(record: Row) -> str:
    """Return when auto noticed the change of the links, in words."""
    noticed = record["noticed"]
    if noticed is None:
        return f"\nIn {len(record['jobs']['auto'])} steps `auto` did not notice.\n"
    steps = noticed - record["change"]
    return (
        f"\nLinks that go from {record['rate']} to {record['to']} are noticed {steps} steps later (50 were allowed): "
        f"*{record['jobs']['auto'][noticed]['reason']}*. {origin(record)}\n"
    )


def draw(record: Row) -> Figure:
    """Draw each job's steps, with the change and auto's answer to it."""
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for (policy, steps), colour, marker in zip(record["jobs"].items(), SERIES, MARKERS, strict=False):
        times = [1e3 * step["seconds"] for step in steps]
        axes.plot(times, color=colour, marker=marker, markevery=12, markersize=4, linewidth=1.2, label=policy)
    axes.axvline(record["change"], color="0.4", linewidth=1)
    axes.annotate(f"{record['rate']} to {record['to']}", (record["change"], 1), xytext=(-4, -12),
                  xycoords=("data", "axes fraction"), textcoords="offset points", ha="right")  # fmt: skip
    if record["noticed"] is not None:
        axes.axvline(record["noticed"], color=SERIES[0], linewidth=1, linestyle="--")
        axes.annotate("auto notices", (record["noticed"], 1), xytext=(4, -12), color=SERIES[0],
                      xycoords=("data", "axes fraction"), textcoords="offset points")  # fmt: skip
    axes.set(yscale="log", xlabel="step", ylabel="ms of four all-reduces")
    axes.legend(frameon=False, ncols=2, loc="upper left")
    return figure


if __name__ == "__main__":
    found = {link: read(FOLDER / f"{link}.json") for link in LINKS}
    changed = read(FOLDER / "change.json")
    if "--check" not in sys.argv:
        with mpl.rc_context(PICTURE):
            draw_cells(found).savefig(FOLDER / "cells.png", dpi=144)
            draw(changed).savefig(FOLDER / "change.png", dpi=144)
    rewrite(PAGE, __file__, CELLS=table(found), CHANGE=change(changed))

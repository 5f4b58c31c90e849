"""Draw the split steps as one HTML page that needs no other file: bars, and a timeline, by Plotly."""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from hybridcomp import style
from hybridcomp.breakdown.split import KINDS, Breakdown, Slice
from hybridcomp.breakdown.summary import (
    COLUMNS,
    Share,
    axis_columns,
    columns,
    concerns,
    longest_step,
    median_step,
    said_of,
)
from hybridcomp.errors import ConfigError

COLOURS = {
    "compute": style.SERIES[7],
    "encode": style.SERIES[5],
    "wire": style.SERIES[0],
    "decode": style.SERIES[2],
    "waiting": style.SERIES[1],
}
PATTERNS = {"encode": "x", "decode": ".", "waiting": "/"}
_OF_AXES = (style.SERIES[3], style.SERIES[4], style.SERIES[6])
_MOST_BARS = 20_000  # bars of a timeline: browsers draw as many in a second

_STYLE = """
<style>
.drawn { width: 100%; } select { font: inherit; color: inherit; background: var(--hc-panel); padding: 0.2rem; }
</style>
"""
_SCRIPT = """
function draw(id, figure) {
  const line = colour("line");
  const lines = { gridcolor: line, linecolor: colour("muted"), zerolinecolor: line, automargin: true };
  const layout = { ...figure.layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("text"), family: getComputedStyle(document.body).fontFamily },
    xaxis: { ...figure.layout.xaxis, ...lines }, yaxis: { ...figure.layout.yaxis, ...lines } };
  Plotly.react(id, figure.data, layout, { responsive: true, displayModeBar: false, scrollZoom: true });
}
function drawAll() {
  for (const [id, figure] of Object.entries(FIGURES)) {
    const choice = document.getElementById(`${id}-choice`);
    if (choice) choice.onchange = () => draw(id, figure[choice.value]);
    draw(id, choice ? figure[choice.value] : figure);
  }
}
drawAll();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
"""

Figure = dict[str, Any]


def page(breakdowns: Sequence[Breakdown], title: str, decided: Figure | None = None) -> str:
    """Return the HTML page of the steps of one or more runs.

    Args:
        breakdowns: split steps, one for each run.
        title: heading of the page.
        decided: figure of the decisions about codecs; None for none.

    Raises:
        ConfigError: a library is missing that the page needs (:func:`missing`).
    """
    lacking = missing()
    if lacking is not None:
        raise ConfigError(lacking)
    figures: dict[str, Any] = {}
    body = f"<h1>{html.escape(title)}</h1>\n{_STYLE}"
    if decided is not None:
        figures["decided"] = decided
        body += '<h2>What was decided</h2>\n<div class="drawn" id="decided"></div>\n'
    for at, breakdown in enumerate(breakdowns):
        body += _section(breakdown, f"run{at}", figures)
    script = f"const FIGURES = {style.script_data(figures)};\n{style.COLOUR_FUNCTION}{_SCRIPT}"
    body += f"<script>{_plotly()}</script>\n<script>{script}</script>\n"
    return style.page(title, body)


def missing() -> str | None:
    """Name what is missing here to draw a page, or return None."""
    if find_spec("plotly") is None:
        return "the picture needs Plotly: pip install plotly"
    return None


def _plotly() -> str:
    return (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def _section(breakdown: Breakdown, name: str, figures: dict[str, Any]) -> str:
    times = {
        f"an ordinary step ({median_step(breakdown) + 1})": timeline(breakdown, median_step(breakdown)),
        f"the longest step ({longest_step(breakdown) + 1})": timeline(breakdown, longest_step(breakdown)),
    }
    figures[f"{name}-ranks"] = rank_bars(breakdown)
    figures[f"{name}-axes"] = axis_bars(breakdown)
    figures[f"{name}-time"] = times
    options = "".join(f"<option>{html.escape(text)}</option>" for text in times)
    words = "".join(f"<li>{html.escape(text)}</li>" for text in concerns(breakdown))
    return f"""<h2>{html.escape(str(breakdown.folder))}</h2>
<p class="when">{html.escape(said_of(breakdown))}</p>
<ul>{words}</ul>
<p>Compute is all that was no exposed communication. Encode, wire, decode and waiting are what kept the program from
computing; waiting is for other ranks that had nothing to send yet.</p>
<div class="drawn" id="{name}-ranks"></div>
{_ranks_table(breakdown)}
<div class="drawn" id="{name}-axes"></div>
{_axes_table(breakdown)}
<h2>Timeline</h2>
<p><label>Step <select id="{name}-time-choice">{options}</select></label>
The upper row of a rank is its program, the lower one its operations. Scroll to zoom, drag to move, double-click to
see all again, click a name to hide it.</p>
<div class="drawn" id="{name}-time"></div>
"""


def _bar(name: str, colour: str, **more: Any) -> Figure:
    marker: dict[str, Any] = {"color": colour, "line": {"width": 0}}
    if name in PATTERNS:
        marker["pattern"] = {"shape": PATTERNS[name], "size": 5, "fillmode": "overlay", "fgopacity": 0.5}
    return {"type": "bar", "orientation": "h", "name": name, "marker": marker, **more}


def _layout(x: str, rows: int, **more: Any) -> Figure:
    layout: Figure = {
        "barmode": "stack",
        "height": 150 + 26 * rows,
        "margin": {"t": 40, "b": 50, "l": 60, "r": 10},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        "xaxis": {"title": {"text": x}},
        "yaxis": {"autorange": "reversed"},
    }
    return layout | more


def _ms(values: Sequence[float]) -> list[float]:
    return [round(1e3 * value, 4) for value in values]


def rank_bars(breakdown: Breakdown) -> Figure:
    """Return bars of each rank's average step, stacked from its parts."""
    found = columns(breakdown)
    names = [f"rank {one.rank}" for one in breakdown.ranks]
    hover = "%{y}: %{x:.1f} ms<extra>%{fullData.name}</extra>"
    data = [
        _bar(
            kind,
            COLOURS[kind],
            y=names,
            x=_ms([found[kind].of_rank[one.rank] for one in breakdown.ranks]),
            hovertemplate=hover,
        )
        for kind in COLUMNS[1:]
    ]
    return {"data": data, "layout": _layout("ms of a step", len(names))}


def axis_bars(breakdown: Breakdown) -> Figure:
    """Return bars of each axis's communication on an average rank: exposed, stacked from its parts, and hidden."""
    axes = breakdown.axes
    names = [style.plot_text(axis) for axis in axes]
    found = [axis_columns(breakdown, axis) for axis in axes]
    hover = "%{y}: %{x:.1f} ms<extra>%{fullData.name}</extra>"
    data = [
        _bar(kind, COLOURS[kind], y=names, x=_ms([one[kind].mean for one in found]), hovertemplate=hover)
        for kind in KINDS
    ]
    hidden = _bar("hidden behind computing", "rgba(0,0,0,0)", y=names, hovertemplate=hover)
    hidden["x"] = _ms([one["hidden"].mean for one in found])
    hidden["marker"]["line"] = {"width": 1, "color": COLOURS["wire"]}
    return {"data": [*data, hidden], "layout": _layout("ms of a step, of an average rank", len(axes))}


def timeline(breakdown: Breakdown, step: int) -> Figure:
    """Return one step over time: for each rank a row of its program, and one of its operations."""
    rows = [row for row in breakdown.rows if row.step == step]
    start = min(row.began for row in rows)
    bars: list[tuple[str, str, float, float, float, str]] = []  # name, colour, row, began, ended, text
    of_axis = {axis: _OF_AXES[at % len(_OF_AXES)] for at, axis in enumerate(sorted(breakdown.axes))}
    for at, row in enumerate(rows):
        slices = _with_compute(row.slices, row.began, row.ended)
        bars += [
            (
                s.kind,
                COLOURS[s.kind],
                at - 0.2,
                s.began,
                s.ended,
                style.plot_text(f"rank {row.rank} {s.kind} {s.axis}".strip()),
            )
            for s in slices
        ]
        one = next(one for one in breakdown.ranks if one.rank == row.rank)
        bars += [
            (
                style.plot_text(f"{o.axis} operations"),
                of_axis.get(o.axis, style.SERIES[4]),
                at + 0.2,
                max(o.began, row.began),
                min(o.ended, row.ended),
                style.plot_text(f"rank {row.rank} {o.op} {o.axis} number {o.n}"),
            )
            for o in one.operations
            if o.began < row.ended and o.ended > row.began
        ]
    dropped = max(0, len(bars) - _MOST_BARS)
    bars = sorted(bars, key=lambda b: b[4] - b[3], reverse=True)[:_MOST_BARS]
    data = []
    for name in dict.fromkeys((*COLUMNS[1:], *sorted({b[0] for b in bars}))):
        own = [b for b in bars if b[0] == name]
        if own:
            data.append(
                _bar(
                    name,
                    own[0][1],
                    y=[b[2] for b in own],
                    base=_ms([b[3] - start for b in own]),
                    x=_ms([b[4] - b[3] for b in own]),
                    width=0.36,
                    text=[b[5] for b in own],
                    textposition="none",
                    hovertemplate="%{text}: %{x:.2f} ms from %{base:.2f} ms<extra></extra>",
                )
            )
    ticks = {"tickvals": list(range(len(rows))), "ticktext": [f"rank {row.rank}" for row in rows]}
    cut = f" ({dropped} short bars are left out)" if dropped else ""
    layout = _layout(
        f"ms since the step's first rank began{cut}",
        2 * len(rows),
        barmode="overlay",
        yaxis={"autorange": "reversed", "fixedrange": True, **ticks},
        dragmode="pan",
    )
    return {"data": data, "layout": layout}


def _with_compute(slices: Sequence[Slice], began: float, ended: float) -> list[Slice]:
    """Return the parts of a step, with computing in between."""
    found: list[Slice] = []
    at = began
    for one in slices:
        if one.began > at:
            found.append(Slice("", "compute", at, one.began))
        found.append(one)
        at = max(at, one.ended)
    return [*found, Slice("", "compute", at, ended)] if at < ended else found


def _cells(shares: Sequence[Share], which: str | int) -> list[str]:
    values = [s.of_rank[which] if isinstance(which, int) else getattr(s, which) for s in shares]
    return [f"{1e3 * value:,.1f}" for value in values]


def _ranks_table(breakdown: Breakdown) -> str:
    found = list(columns(breakdown).values())
    rows = [["mean", *_cells(found, "mean")], ["most", *_cells(found, "worst")]]
    rows += [[str(one.rank), *_cells(found, one.rank)] for one in breakdown.ranks]
    return style.table(("rank", *(f"{name} ms" for name in COLUMNS)), rows)


def _axes_table(breakdown: Breakdown) -> str:
    rows = []
    for axis in breakdown.axes:
        found = axis_columns(breakdown, axis)
        most = found["exposed"]
        rows.append(
            [axis, *_cells(list(found.values()), "mean"), f"{1e3 * most.worst:,.1f} (rank {most.worst_rank})"]
        )
    headings = ("exposed", *KINDS, "hidden")
    return style.table(("axis", *(f"{name} ms" for name in headings), "most exposed ms"), rows)

"""Show decisions about codecs during a run: as a table, and as a picture over its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from hybridcomp import style

Decisions = Sequence[Mapping[str, Any]]  # lines of kind "decision" in metrics.jsonl
_MOST_ROWS = 30


def show(decisions: Decisions, console: Console) -> None:
    """Print the decisions, the first ones of many."""
    table = Table(title="what was decided", title_justify="left", box=None, pad_edge=False)
    for heading in ("from step", "axis", "operation", "of", "codec", "why"):
        table.add_column(heading, justify="right" if heading == "from step" else "left", overflow="fold")
    for one in decisions[:_MOST_ROWS]:
        table.add_row(
            str(one["step"]), one["axis"], one["op"], one["name"] or "all", one["codec"], one["why"]
        )
    console.print(table)
    if len(decisions) > _MOST_ROWS:
        console.print(f"and {len(decisions) - _MOST_ROWS} more: all are in metrics.jsonl")


def figure(decisions: Decisions, steps: int) -> dict[str, Any]:
    """Return a Plotly figure: the codec over the steps, a line for each axis, operation and tensor.

    Args:
        decisions: at least one.
        steps: steps of the run.
    """
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for one in decisions:
        lines.setdefault(" ".join(filter(None, [one["axis"], one["op"], one["name"]])), []).append(one)
    data = []
    for number, (name, made) in enumerate(lines.items()):
        until = max(steps, made[-1]["step"])
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": style.plot_text(name),
                "line": {"shape": "hv", "color": style.SERIES[number % len(style.SERIES)]},
                "x": [*(one["step"] for one in made), until],
                "y": [style.plot_text(one["codec"]) for one in (*made, made[-1])],
                "text": [*(style.plot_text(one["why"]) for one in made), ""],
                "hovertemplate": "step %{x}: %{y}<br>%{text}<extra>%{fullData.name}</extra>",
            }
        )
    codecs = len({one["codec"] for one in decisions})
    return {
        "data": data,
        "layout": {
            "height": 160 + 30 * codecs,
            "margin": {"t": 40, "b": 50, "l": 60, "r": 10},
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
            "showlegend": True,
            "xaxis": {"title": {"text": "step"}},
            "yaxis": {"type": "category"},
        },
    }

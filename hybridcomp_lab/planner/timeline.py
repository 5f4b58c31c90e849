"""Draw a predicted step as an HTML page: each rank's work over time, and the chain that the step waits for."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridcomp import style
from hybridcomp.files import write_text
from hybridcomp_lab.planner.critical import critical_path, shares
from hybridcomp_lab.planner.step.replay import Span

_STREAMS = {
    "compute": 0,
    "pp": 4,
    "dp": 5,
    "tp": 7,
    "embedding": 3,
}  # colours of style.SERIES, as in other pictures
_GREY = "#7a828c"  # readable on light and on dark
_MOST_BARS = 20000  # bars that a browser draws with ease
_ROW = 26  # pixels


def figure_html(figure: Any) -> str:
    """Return a Plotly figure as part of a page, with the library inside, in the look of the project's pages."""
    figure.update_layout(
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "color": _GREY},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        margin={"l": 90, "r": 10, "t": 30, "b": 50},
    )
    figure.update_xaxes(gridcolor="rgba(128,128,128,0.25)", zeroline=False)
    figure.update_yaxes(gridcolor="rgba(128,128,128,0.25)", zeroline=False)
    config = {"displaylogo": False, "responsive": True}
    text: str = figure.to_html(full_html=False, include_plotlyjs=True, config=config)
    return text


def write_timeline(path: Path, heading: str, spans: Sequence[Span], facts: Mapping[str, str]) -> None:
    """Write the page of a step.

    Args:
        path: path of the page.
        heading: heading of the page.
        spans: spans of all ranks with a program of their own; at most 20,000 are drawn, the longest.
        facts: further facts about the plan, by name.

    Raises:
        ConfigError: the page cannot be written.
        ModuleNotFoundError: plotly is missing.
    """
    path_spans = critical_path(spans)
    drawn = sorted(spans, key=lambda span: span.begin - span.end)[:_MOST_BARS]
    left_out = len(spans) - len(drawn)
    parts = shares(path_spans)
    whole = sum(parts.values())
    words = ", ".join(
        f"{name} {seconds * 1e3:.1f} ms ({seconds / whole:.0%})" for name, seconds in parts.items()
    )
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>" for name, value in facts.items()
    )
    note = f" The {left_out:,} shortest of {len(spans):,} spans are not drawn." if left_out else ""
    body = f"""<h1>{html.escape(heading)}</h1>
<p class="when">Predicted, not measured. Ranks that differ in dp and tp alone do the same: one of them is shown.</p>
<p>The critical path, which the step's end waits for, is the line: {html.escape(words)}.{note}</p>
{figure_html(_figure(drawn, path_spans))}
<div class="wide"><table class="words">{rows}</table></div>
"""
    write_text(path, style.page(heading, body))


def _figure(spans: Sequence[Span], critical: Sequence[Span]) -> Any:
    import plotly.graph_objects as go  # noqa: PLC0415  (of the extra "plan")

    streams = sorted({span.stream for span in spans}, key=lambda stream: (stream != "compute", stream))
    rows = [
        _row(rank, stream)
        for rank in sorted({span.rank for span in spans})
        for stream in streams
        if any(span.rank == rank and span.stream == stream for span in spans)
    ]
    origin = min((span.begin for span in spans), default=0.0)
    figure = go.Figure()
    for stream in streams:
        own = [span for span in spans if span.stream == stream]
        colour = style.SERIES[_STREAMS.get(stream, 6)]
        light = [0.55 if span.name.startswith("forward") else 1.0 for span in own]
        figure.add_bar(
            name=stream,
            orientation="h",
            y=[_row(span.rank, stream) for span in own],
            base=[(span.begin - origin) * 1e3 for span in own],
            x=[(span.end - span.begin) * 1e3 for span in own],
            marker={"color": colour, "opacity": light, "line": {"width": 0}},
            customdata=[span.name for span in own],
            hovertemplate="%{customdata}: %{x:.3f} ms from %{base:.3f} ms<extra>%{y}</extra>",
        )
    figure.add_scatter(
        name="critical path",
        mode="lines",
        x=[(when - origin) * 1e3 for span in critical for when in (span.begin, span.end)],
        y=[_row(span.rank, span.stream) for span in critical for _ in range(2)],
        line={"color": style.SERIES[1], "width": 2},
        hoverinfo="skip",
    )
    figure.update_layout(barmode="overlay", bargap=0.15, height=140 + _ROW * len(rows))
    figure.update_xaxes(title="milliseconds of a step")
    figure.update_yaxes(categoryorder="array", categoryarray=rows[::-1])
    return figure


def _row(rank: int, stream: str) -> str:
    return f"rank {rank} {stream}"

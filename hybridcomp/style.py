"""Define how pages, pictures and the terminal's tables look, and that names from outside are text in all of them.

Pages are reports, the guides' figures, and the documentation's site.

Colours are Okabe and Ito's, which people with any colour vision tell apart; markers and dashes repeat the distinction.
"""

from __future__ import annotations

import base64
import functools
import html
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from hybridcomp.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#8C6D31", "#999999")
"""Colours of the series that a picture compares, in the order in which they are taken."""

PICTURE: dict[Any, Any] = {
    "font.size": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.6,
    "axes.titlesize": 11.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
}
"""Matplotlib's settings for pictures; on white, unless a :class:`Scheme` says otherwise."""

COLOUR_FUNCTION = """
// What a colour of the style is where an element stands: light-dark() is resolved by the browser alone.
function colour(name) {
  const probe = document.createElement("span");
  probe.style.color = `var(--hc-${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
"""
"""JavaScript function for colours of figures drawn in the browser, in a page with :func:`variables`."""

_SERIES_ON_DARK = ("#4DA3E0", "#F07C3E", "#2FC79B", "#E3A1C6", "#8AD0F7", "#F2B84B", "#C9A866", "#B5B5B5")
_SCHEMES = {  # colours on light, on dark
    "text": ("#1a1a1a", "#e3e5e8"),
    "muted": ("#57606a", "#a3abb5"),
    "background": ("#ffffff", "#16191f"),
    "panel": ("#f4f6f8", "#20252d"),
    "line": ("#d5dae0", "#39414c"),
    "accent": ("#00588a", "#6cb8ee"),
}


@dataclass(frozen=True)
class Scheme:
    """Colours of a picture for light screens or for dark ones.

    Attributes:
        series: colours of the series that it compares, in the order in which they are taken.
        ink: colour of its words and lines.
        paper: colour that it is drawn on, a page's.
    """

    series: tuple[str, ...]
    ink: str
    paper: str

    @property
    def settings(self) -> dict[Any, Any]:
        """Return Matplotlib's settings for a picture in these colours."""
        inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
        papers = ("figure.facecolor", "axes.facecolor")
        return PICTURE | dict.fromkeys(inked, self.ink) | dict.fromkeys(papers, self.paper)


LIGHT = Scheme(SERIES, "black", "white")
DARK = Scheme(_SERIES_ON_DARK, _SCHEMES["text"][1], _SCHEMES["background"][1])


def variables() -> str:
    """Return CSS that defines ``--hc-NAME`` for every colour, each for light and for dark pages.

    ``color-scheme`` of the element that uses it says which one holds.
    """
    pairs = _SCHEMES | {
        f"series-{i}": pair for i, pair in enumerate(zip(SERIES, _SERIES_ON_DARK, strict=True))
    }
    colours = "".join(
        f"  --hc-{name}: light-dark({light}, {dark});\n" for name, (light, dark) in pairs.items()
    )
    return f':root {{\n  --hc-font: system-ui, -apple-system, "Segoe UI", sans-serif;\n{colours}}}\n'


_PAGE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 var(--hc-font); color: var(--hc-text); background: var(--hc-background); max-width: 62rem;
       margin: 2rem auto; padding: 0 1rem; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin-top: 2rem; } h3 { font-size: 1rem; }
a { color: var(--hc-accent); }
.when { color: var(--hc-muted); margin-top: 0.2rem; }
/* What can be moved sideways has a shadow at the side where there is more. */
.wide { overflow-x: auto; background-repeat: no-repeat; background-attachment: local, local, scroll, scroll;
        background-position: left, right, left, right; background-size: 3rem 100%, 3rem 100%, 0.8rem 100%, 0.8rem 100%;
        background-image: linear-gradient(to right, var(--hc-background) 30%, transparent),
          linear-gradient(to left, var(--hc-background) 30%, transparent),
          linear-gradient(to right, var(--hc-line), transparent),
          linear-gradient(to left, var(--hc-line), transparent); }
.figures td { white-space: nowrap; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.35rem 0.6rem; border-bottom: 1px solid var(--hc-line); text-align: right; }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; border-bottom: 2px solid var(--hc-muted); }
.words th, .words td { text-align: left; }
img { display: block; max-width: 100%; height: auto; border-radius: 4px; }
pre { background: var(--hc-panel); padding: 0.7rem; white-space: pre-wrap; font-size: 0.85rem; border-radius: 4px; }
summary { cursor: pointer; }
@media (max-width: 44rem) {
  .wide img { max-width: none; width: 40rem; }
  table { font-size: 0.85rem; } th, td { padding: 0.3rem 0.35rem; }
}
"""


def page(title: str, body: str) -> str:
    """Return an HTML page that needs no other file, for light and dark screens.

    Args:
        title: plain text.
        body: HTML.
    """
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>
{variables()}{_PAGE}</style>
</head>
<body>
{body}</body>
</html>
"""


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, kind: str = "figures") -> str:
    """Return a table whose first column is names; ``kind`` is its class in the style of pages."""
    head = "".join(f"<th>{html.escape(text)}</th>" for text in headings)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table class="{kind}"><tr>{head}</tr>{body}</table></div>'


def image(light: bytes, dark: bytes, alternative: str) -> str:
    """Return a picture for a page, the one of two that goes with the reader's screen.

    Args:
        light: PNG for light screens; what takes pictures out of pages gets it, too.
        dark: PNG for dark screens.
        alternative: plain text for those who see no pictures.
    """
    on_light, on_dark = (
        f"data:image/png;base64,{base64.b64encode(drawn).decode()}" for drawn in (light, dark)
    )
    return (
        f'<p class="wide"><picture><source media="(prefers-color-scheme: dark)" srcset="{on_dark}">'
        f'<img src="{on_light}" alt="{html.escape(alternative)}"></picture></p>'
    )


@dataclass(frozen=True)
class Table:
    """Table of text for the terminal, for Markdown and for pages; the first column is names.

    Attributes:
        title: title of the table.
        headings: headings of the columns.
        rows: rows, each of as many cells.
        note: meaning of the columns.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str

    def markdown(self) -> str:
        """Return the table in Markdown, with its note."""
        lines = [
            "| " + " | ".join(self.headings) + " |",
            "|---" + "|---:" * (len(self.headings) - 1) + "|",
            *("| " + " | ".join(row) + " |" for row in self.rows),
        ]
        return f"**{self.title}**\n\n" + "\n".join(lines) + f"\n\n{self.note}\n"

    def show(self, console: Console) -> None:
        """Print the table, without its note."""
        from rich.box import SIMPLE_HEAD  # noqa: PLC0415  (tens of milliseconds, for tables alone)
        from rich.table import Table as Drawn  # noqa: PLC0415

        drawn = Drawn(
            box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold", title=self.title
        )
        for index, heading in enumerate(self.headings):
            drawn.add_column(heading, justify="left" if index == 0 else "right", no_wrap=True)
        for row in self.rows:
            drawn.add_row(*row)
        console.print(drawn)
        console.print()


def script_data(value: Any) -> str:
    """Return a value as JSON that stands inside a page's script element, whatever its texts hold."""
    # "</script" ends a script, and "<!--<script" keeps it from ending.
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def picture_text(text: str) -> str:
    """Return a name for a picture of Matplotlib, which takes what is between two dollars for a formula."""
    return printable(text).replace("$", r"\$")


def plot_text(text: str) -> str:
    """Return a name for a figure of Plotly, which takes some of HTML's tags for its own: links, sizes, line ends."""
    return html.escape(text, quote=False)


def say(text: object, file: IO[str] | None = None) -> None:
    """Print lines for people, at once: what files and programs have put into them cannot act on the terminal.

    Args:
        text: lines, without the last one's end.
        file: stream to print to; None: standard output.
    """
    print(printable(text, keep="\n\t"), file=sys.stdout if file is None else file, flush=True)


def console(
    file: IO[str] | None = None, *, width: int | None = None, terminal: bool | None = None
) -> Console:
    """Return a console for tables: texts in it are shown as they are, without markup, and act on no terminal.

    Args:
        file: stream to print to; None: standard output.
        width: columns; None: as many as the terminal has.
        terminal: whether it is one; None: as the stream says.
    """
    return _console_class()(  # type: ignore[no-any-return]
        file=file, width=width, force_terminal=terminal, markup=False, emoji=False, highlight=False
    )


@functools.cache
def _console_class() -> Any:
    from rich.console import Console  # noqa: PLC0415  (tens of milliseconds, for tables alone)

    class Plain(Console):
        """Console that escapes what it is given as plain strings: cells, headings, lines."""

        def render_str(self, text: str, **options: Any) -> Any:
            """Return a string as text of the console; strings are measured by it, too."""
            return super().render_str(printable(text, keep="\n\t"), **options)

    return Plain

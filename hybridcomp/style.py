"""Define how pages, pictures and the terminal's tables look, and that names from outside are text in all of them.

Pages are reports, the guides' figures, and the documentation's site.

Colours are Okabe and Ito's, which people with any colour vision tell apart; markers and dashes repeat the distinction.
"""

from __future__ import annotations

import functools
import html
import json
import sys
from collections.abc import Sequence
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
"""Matplotlib's settings for pictures, which are drawn on white."""

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
h1 { font-size: 1.6rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin-top: 2rem; }
a { color: var(--hc-accent); }
.when { color: var(--hc-muted); margin-top: 0.2rem; }
.wide { overflow-x: auto; }
.figures td { white-space: nowrap; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.35rem 0.8rem; border-bottom: 1px solid var(--hc-line); text-align: right; }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; border-bottom: 2px solid var(--hc-muted); }
.words th, .words td { text-align: left; }
img { max-width: 100%; height: auto; background: #fff; border-radius: 4px; }
pre { background: var(--hc-panel); padding: 0.7rem; overflow-x: auto; font-size: 0.85rem; border-radius: 4px; }
summary { cursor: pointer; }
@media (max-width: 44rem) { .wide img { max-width: none; width: 40rem; } }
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

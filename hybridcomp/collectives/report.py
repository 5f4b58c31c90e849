"""Show statistics to users: what was compressed, what was not, and why."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import IO, TYPE_CHECKING

from hybridcomp import style
from hybridcomp.collectives.stats import StatRow

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

TITLE = "hybridcomp: what this rank sent"
_MOST_ROWS = 20
_MOST_HINTS = 5
_LEAST_HINT_BYTES = 1 << 16  # below it, compression would have saved nothing that matters
_NO_TERMINAL_WIDTH = 400  # nothing is wrapped there
_LEAST_WIDTH = (
    140  # a narrower terminal breaks lines itself, which reads better than columns of a few letters
)
# Reasons for which a message is uncompressed as it was asked for, so that no hint is due.
_AS_ASKED = frozenset(
    ["the policy says none", "one rank", "never compressed", "as sent", "asked for in the call"]
)
_EXACT = " are exact unless named"


def summary(rows: Iterable[StatRow], title: str = TITLE) -> str:
    """Return the table of :func:`show` as plain text, without a final newline; '' if there are no rows with bytes."""
    text = io.StringIO()
    show(rows, text, title)
    return text.getvalue().rstrip("\n")


def show(rows: Iterable[StatRow], file: IO[str], title: str = TITLE) -> None:
    """Print a table, the kinds that carry most first, with totals; and a hint if nothing was compressed.

    Args:
        rows: rows to show; those without bytes are left out.
        file: output file; if it is a terminal, the table fits its width and has bold headings.
        title: line above the table.
    """
    kept = sorted((row for row in rows if row.raw_bytes), key=lambda row: (-row.plain_bytes, row.key))
    if not kept:
        return
    console = _console(file)
    if console.is_terminal:
        _print(console, title, _table(kept))
    else:
        plain = io.StringIO()
        _print(_console(plain), title, _table(kept))
        # Cells are padded to the width of their column, which is of no use in the last column.
        file.write("".join(f"{line.rstrip()}\n" for line in plain.getvalue().splitlines()))
    told = hint(kept)
    if told is not None:
        style.say(told, file)


def hint(rows: Iterable[StatRow]) -> str | None:
    """Say why nothing was compressed although a policy compresses; return None if there is nothing to say."""
    rows = list(rows)
    if any(row.codec != "none" for row in rows):
        return None
    by_kind: dict[tuple[str, str, str], int] = {}
    for row in rows:
        if row.reason not in _AS_ASKED and not row.reason.endswith(_EXACT):
            kind = (row.op, row.axis, row.reason)
            by_kind[kind] = by_kind.get(kind, 0) + row.plain_bytes
    if sum(by_kind.values()) < _LEAST_HINT_BYTES:
        return None
    lines = ["hybridcomp: the policy compresses, and yet nothing was compressed:"]
    most = sorted(by_kind.items(), key=lambda item: (-item[1], item[0]))
    lines += [
        f"  {op} on axis {axis}, {size(nbytes)}: {reason}"
        for (op, axis, reason), nbytes in most[:_MOST_HINTS]
    ]
    if len(most) > _MOST_HINTS:
        lines.append(f"  and {len(most) - _MOST_HINTS} kinds more")
    return "\n".join(lines)


def size(nbytes: float) -> str:
    """Format a number of bytes for users, in decimal units, with four digits."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while nbytes >= 999.95 and len(units) > 1:
        nbytes /= 1000
        units.pop(0)
    return f"{nbytes:.4g} {units[0]}"


def _console(file: IO[str]) -> Console:
    console = style.console(file)
    console.width = max(console.width, _LEAST_WIDTH) if console.is_terminal else _NO_TERMINAL_WIDTH
    return console


def _print(console: Console, title: str, table: Table) -> None:
    console.print(title)
    console.print(table)


def _table(rows: Sequence[StatRow]) -> Table:
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for heading in ("axis", "operation"):
        table.add_column(heading, no_wrap=True)
    table.add_column("codec", overflow="fold", max_width=32)
    for heading in ("calls", "uncompressed", "on the wire", "ratio", "encode s", "wire s", "decode s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    shown = rows if len(rows) <= _MOST_ROWS else rows[: _MOST_ROWS - 1]
    for row in shown:
        codec = row.codec if row.codec != "none" else "uncompressed"
        table.add_row(row.axis, row.op, codec, *_cells(row), row.reason)
    rest = rows[len(shown) :]
    if rest:
        table.add_row("", f"{len(rest)} kinds more", "", *_cells(_sum(rest)), "")
    table.add_section()
    table.add_row("total", "", "", *_cells(_sum(rows)), "")
    return table


def _sum(rows: Iterable[StatRow]) -> StatRow:
    total = StatRow("", "", "", "")
    for row in rows:
        total.add(row)
    return total


def _cells(row: StatRow) -> tuple[str, ...]:
    ratio = f"{row.plain_bytes / row.wire_bytes:.3g}" if row.wire_bytes else ""
    times = (row.encode_seconds, row.wire_seconds, row.decode_seconds)
    seconds = (f"{t:.3f}" if t < 10 else f"{t:.1f}" for t in times)
    return (f"{row.calls}", size(row.plain_bytes), size(row.wire_bytes), ratio, *seconds)

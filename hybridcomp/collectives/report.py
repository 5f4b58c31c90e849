"""Show statistics to users: what was compressed, what was not, and why."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import IO, TYPE_CHECKING

from hybridcomp import style
from hybridcomp.collectives.stats import StatRow
from hybridcomp.steps import Steps

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

TITLE = "hybridcomp: what this rank sent"
WAITS_MUCH = 0.1  # share of a step from which it is worth to ask what would be gained
ASK = "`hybridcomp compare -- COMMAND` tells what another policy would gain."
_MOST_ROWS = 20
_MOST_HINTS = 5
_LEAST_HINT_BYTES = 1 << 16  # below it, compression would have saved nothing that matters
_MORE = 0.995  # a ratio below it is explained
_SMALL_BYTES = 1 << 16  # mean size of messages, whose time is not that of their bytes
_NO_TERMINAL_WIDTH = 400  # nothing is wrapped there
_LEAST_WIDTH = (
    140  # a narrower terminal breaks lines itself, which reads better than columns of a few letters
)
# Reasons for which a message is uncompressed as it was asked for, so that no hint is due.
_AS_ASKED = frozenset(
    ["the policy says none", "one rank", "never compressed", "as sent", "asked for in the call"]
)
_EXACT = " are exact unless named"


def summary(rows: Iterable[StatRow], title: str = TITLE, steps: Steps | None = None) -> str:
    """Return the table of :func:`show` as plain text, without a final newline; '' if there are no rows with bytes."""
    text = io.StringIO()
    show(rows, text, title, steps)
    return text.getvalue().rstrip("\n")


def show(
    rows: Iterable[StatRow], file: IO[str], title: str = TITLE, steps: Steps | None = None, ranks: int = 1
) -> None:
    """Print a table, the kinds that carry most first, with totals; and a hint if nothing was compressed.

    Args:
        rows: rows to show; those without bytes are left out.
        file: output file; if it is a terminal, the table fits its width and has bold headings.
        title: line above the table.
        steps: steps of training that the rows belong to: the table is then of a step; None shows totals.
        ranks: number of ranks whose totals the rows are; the table is of an average one.
    """
    kept = sorted((row for row in rows if row.raw_bytes), key=lambda row: (-row.plain_bytes, row.key))
    if not kept:
        return
    count = steps.count if steps is not None else 0
    if count:
        title += f" in a step, the mean of {count:,}" if count > 1 else " in one step"
    console = _console(file)
    if console.is_terminal:
        _print(console, title, _table(kept, count, ranks))
    else:
        plain = io.StringIO()
        _print(_console(plain), title, _table(kept, count, ranks))
        # Cells are padded to the width of their column, which is of no use in the last column.
        file.write("".join(f"{line.rstrip()}\n" for line in plain.getvalue().splitlines()))
    if steps is not None and steps.share is not None:
        style.say(_waiting(steps), file)
    told = hint(kept)
    if told is not None:
        style.say(told, file)


def _waiting(steps: Steps) -> str:
    """Return a line on the time that steps waited, as opposed to what was under way meanwhile."""
    assert steps.share is not None
    assert steps.length is not None
    said = (
        f"A step took {1e3 * steps.length:,.4g} ms, of which this rank waited {steps.share:.0%}; what is under way "
        "beside computing costs no time."
    )
    if steps.share > WAITS_MUCH:
        said += f" {ASK}"
    return said


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


def _table(rows: Sequence[StatRow], steps: int, ranks: int) -> Table:
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for heading in ("axis", "operation"):
        table.add_column(heading, no_wrap=True)
    table.add_column("codec", overflow="fold", max_width=32)
    # Several hosts, of several ranks.
    tiers = any(row.inside_bytes for row in rows) and any(row.between_bytes for row in rows)
    sent = ["uncompressed", "on the wire", *(["inside hosts", "between hosts"] if tiers else [])]
    times = [f"{what} {'ms' if steps else 's'}" for what in ("encode", "under way", "decode")]
    for heading in ("calls", *sent, "ratio", *times):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    shown = rows if len(rows) <= _MOST_ROWS else rows[: _MOST_ROWS - 1]
    for row in shown:
        codec = row.codec if row.codec != "none" else "uncompressed"
        table.add_row(row.axis, row.op, codec, *_cells(row, tiers, steps, ranks), _reason(row))
    rest = rows[len(shown) :]
    if rest:
        table.add_row("", f"{len(rest)} kinds more", "", *_cells(_sum(rest), tiers, steps, ranks), "")
    table.add_section()
    table.add_row("total", "", "", *_cells(_sum(rows), tiers, steps, ranks), "")
    return table


def _reason(row: StatRow) -> str:
    """Return why a row's codec was chosen, and where it sent more than uncompressed, why that is."""
    if row.wire_bytes * _MORE <= row.plain_bytes or not row.calls:
        return row.reason
    small = row.raw_bytes < _SMALL_BYTES * row.calls
    more = (
        "small messages: each has a head, and goes to all at once"
        if small
        else "by an algorithm of fewer rounds"
    )
    return f"{row.reason}; sends more, {more}"


def _sum(rows: Iterable[StatRow]) -> StatRow:
    total = StatRow("", "", "", "")
    for row in rows:
        total.add(row)
    return total


def _ms(value: float) -> str:
    return f"{value:,.3g}" if value < 999.5 else f"{value:,.0f}"


def _cells(row: StatRow, tiers: bool, steps: int, ranks: int) -> tuple[str, ...]:
    ratio = f"{row.plain_bytes / row.wire_bytes:.3g}" if row.wire_bytes else ""
    each = row.mean((steps or 1) * ranks)
    inside = [each.inside_bytes, each.between_bytes] if tiers else []
    sent = (size(count) for count in (each.plain_bytes, each.wire_bytes, *inside))
    times = (each.encode_seconds, each.wire_seconds, each.decode_seconds)
    calls = f"{each.calls:.4g}" if each.calls < 1000 else f"{each.calls:.0f}"
    if steps:
        return (calls, *sent, ratio, *(_ms(1e3 * t) for t in times))
    return (calls, *sent, ratio, *(f"{t:.3f}" if t < 10 else f"{t:.1f}" for t in times))

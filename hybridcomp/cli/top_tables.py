"""Draw the tables of ``hybridcomp top``, as wide and as high as the terminal is."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from statistics import mean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from hybridcomp.collectives.report import size
from hybridcomp.steps import Steps
from hybridcomp.top.read import Job
from hybridcomp.top.view import AxisView, JobView, OperationView, RankView, Rates, Slowest

_WIDE = 118  # columns from which on tables show more
_WIRE = "wire"  # operations at once there, on average
_SHOWN_FROM = 0.1  # seconds: operations that end sooner only flit by
_MOST_NAMED, _LEAST_NAMED = 24, 12  # characters of an axis or a list of ranks
_LEAST_ROWS = 3


def about(job: Job) -> dict[str, Any]:
    """Return the facts about a job that the list of jobs shows."""
    first = job.ranks[0].says
    since = min(rank.says.since for rank in job.ranks)
    return {
        "job": job.name,
        "program": first.program,
        "ranks": len(job.ranks),
        "size": job.size,
        "since": since,
    }


def job_list(jobs: Iterable[Job]) -> Group:
    """Return the list of jobs, with a line on how to see one."""
    table = _table(("job",), ("ranks", "for"), ("program",))
    names = []
    for job in jobs:
        one = about(job)
        names.append(job.name)
        ranks = f"{one['ranks']} of {one['size']}"
        table.add_row(*map(Text, (job.name, ranks, _duration(time.time() - one["since"]), one["program"])))
    return Group(table, Text(f"give one of them: hybridcomp top {names[0]}"))


def job_tables(view: JobView, width: int, height: int | None) -> Group:
    """Return the tables of a job.

    Args:
        view: view of the job.
        width: columns.
        height: lines; None for as many as the tables take.
    """
    operations = [one for one in view.operations if one.seconds >= _SHOWN_FROM]
    steps = _of_steps(view)
    # Headings, and blank lines between tables.
    lines: float = float("inf") if height is None else height - len(view.axes) - 12 - (steps is not None)
    shown = int(min(len(operations), max(_LEAST_ROWS, lines - len(view.ranks))))
    ranks = int(min(len(view.ranks), max(_LEAST_ROWS, lines - shown)))
    parts: list[Any] = [
        _head(view, width),
        *([] if steps is None else [steps]),
        Text(),
        _axes(view.axes, width),
    ]
    parts += [Text(), _ranks(view, ranks, width), Text(), _slowest(view.slowest)]
    if operations:
        parts += [Text(), _operations(operations, shown)]
    return Group(*parts)


def _head(view: JobView, width: int) -> Text:
    elsewhere = view.size - len(view.ranks)
    ranks = (
        f"{len(view.ranks)} of {view.size} ranks, the others elsewhere" if elsewhere else f"{view.size} ranks"
    )
    facts = f"job {view.name}, {ranks}, for {_duration(time.time() - view.since)}"
    program = _cut(view.program, max(12, width - len(facts) - 3))
    return Text.assemble((program, "bold"), f"   {facts}", no_wrap=True, overflow="ellipsis")


def _of_steps(view: JobView) -> Text | None:
    """Return a line on the steps, of which the tables' figures are; None where no optimizer has stepped."""
    counts = [rank.steps.count for rank in view.ranks if rank.steps.count]
    if not counts:
        return None
    line = f"in a step, the mean of {max(counts):,}"
    lately = [rank.lately for rank in view.ranks if not rank.ended]
    lengths = [steps.length for steps in lately if steps.length is not None]
    if lengths:
        line += f"; lately one takes {_ms(mean(lengths))} ms"
        shares = [steps.share for steps in lately if steps.share is not None]
        line += f", of which a rank waits {mean(shares):.0%}" if shares else ""
    return Text(line, no_wrap=True, overflow="ellipsis")


def _axes(axes: Sequence[AxisView], width: int) -> Table:
    """Return the table of the axes: what an average rank has sent, in a step where optimizers step."""
    wide = width >= _WIDE
    stepped = any(view.steps for view in axes)
    between_hosts = sum(view.totals.between_bytes for view in axes)
    tiers = 0 < between_hosts < sum(view.totals.wire_bytes for view in axes)
    unit = "ms" if stepped else "s"
    times = (f"encode {unit}", f"under way {unit}", f"decode {unit}") if wide else ()
    # Where hosts have several ranks, what goes between hosts is what costs; the ratio tells the rest.
    sent = ("inside hosts", "between hosts") if tiers else ("uncompressed", "on the wire")
    table = _table(("axis",), ("calls",) * wide + (*sent, "ratio", *times, "sends", _WIRE))

    for view in axes:
        totals, count = view.totals, view.steps or view.ranks
        between = totals.between_bytes
        each = (totals.wire_bytes - between, between) if tiers else (totals.plain_bytes, totals.wire_bytes)
        cells = [_cut(view.axis, _LEAST_NAMED)]
        cells += [f"{totals.calls / count:.4g}" if stepped else f"{totals.calls / count:.0f}"] * wide
        ratio = f"{totals.plain_bytes / totals.wire_bytes:.3g}" if totals.wire_bytes else ""
        cells += [size(nbytes / count) for nbytes in each] + [ratio]
        if wide:
            seconds = (
                one / count for one in (totals.encode_seconds, totals.wire_seconds, totals.decode_seconds)
            )
            cells += [_ms(one) if stepped else f"{one:.1f}" for one in seconds]
        table.add_row(*map(Text, (*cells, *_rates(view.rates, view.ranks, (_WIRE,)))))
    if not axes:
        table.add_row(Text("nothing has been sent yet"))
    return table


def _rates(rates: Rates | None, ranks: int, at_once: Sequence[str]) -> list[str]:
    """Return the cells of rates of so many ranks."""
    if rates is None:
        return [""] * (1 + len(at_once))
    return [f"{size(rates.sent / ranks)}/s", *(_number(getattr(rates, what)) for what in at_once)]


def _ranks(view: JobView, shown: int, width: int) -> Table:
    hosts = width >= _WIDE and len({rank.host for rank in view.ranks}) > 1
    stepped = any(rank.steps.count for rank in view.ranks)
    at_once = (_WIRE,) if stepped else ("encode", _WIRE, "decode")
    steps = ("step ms", "waited") if stepped else ()
    table = _table(
        (),
        ("rank", "pid", *("host",) * hosts, *steps, "sends", *at_once, "in flight", "oldest"),
        ("",),
    )
    slowest = None if view.slowest is None else view.slowest.rank
    ranks = list(view.ranks)
    if shown < len(ranks):  # prefer ranks with something to see
        ranks.sort(key=lambda rank: (not (rank.ended or rank.silent or rank.rank == slowest), rank.rank))
        shown -= 1
    for rank in sorted(ranks[:shown], key=lambda rank: rank.rank):
        oldest = "" if rank.oldest is None else _seconds(rank.oldest)
        cells = [f"{rank.rank}", f"{rank.pid}", *(_cut(rank.host, _MOST_NAMED),) * hosts]
        cells += _lately(rank.lately) if stepped else ()
        cells += _rates(rank.rates, 1, at_once)
        note, style = _note(rank, slowest)
        table.add_row(*map(Text, cells), Text(f"{rank.in_flight}"), Text(oldest), Text(note, style=style))
    if shown < len(ranks):
        table.add_row(Text(f"+{len(ranks) - shown}"))
    return table


def _lately(steps: Steps) -> tuple[str, str]:
    """Return the cells of steps: how long one takes, and the share of it that the rank waits."""
    length, share = steps.length, steps.share
    return ("" if length is None else _ms(length), "" if share is None else f"{share:.0%}")


def _note(rank: RankView, slowest: int | None) -> tuple[str, str]:
    if rank.ended:
        return "has died", "red"
    if rank.silent is not None:
        return f"silent {_seconds(rank.silent)}", "red"
    return ("slowest", "yellow") if rank.rank == slowest else ("", "")


def _slowest(slowest: Slowest | None) -> Text:
    if slowest is None:
        return Text("no rank keeps the others waiting")
    if slowest.seconds is not None:
        what = f"the others have waited for it on {slowest.axis} for {_seconds(slowest.seconds)}"
    else:
        what = f"the others wait for it on {slowest.axis} {_percent(slowest.share or 0.0)} of the time"
    return Text(f"rank {slowest.rank} is slowest: {what}", style="yellow")


def _operations(operations: Sequence[OperationView], shown: int) -> Table:
    table = _table(("in flight", "axis"), ("number", "for"), ("on ranks", "waits for"))
    if shown < len(operations):
        shown -= 1
    for one in operations[:shown]:
        number = f"{one.number}" if one.number else ""
        cells = (_cut(one.op, _MOST_NAMED), _cut(one.axis, _LEAST_NAMED), number, _seconds(one.seconds))
        table.add_row(*map(Text, (*cells, _listed(one.ranks), _awaited(one))))
    if shown < len(operations):
        table.add_row(Text(f"and {len(operations) - shown} more"))
    return table


def _awaited(one: OperationView) -> str:
    if one.missing:
        return f"{_listed(one.missing)}, not there yet"
    if one.awaits:
        return _listed(one.awaits) + ", under way" * bool(one.number)
    return f"{one.elsewhere} elsewhere?" if one.elsewhere else ""


def _listed(ranks: Sequence[int]) -> str:
    """Return ranks as a short text: 0-3, 6."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in spans)
    return _cut(text, _MOST_NAMED)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _table(left: Iterable[str], right: Iterable[str], last: Iterable[str] = ()) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for heading in left:
        table.add_column(heading, no_wrap=True, overflow="ellipsis")
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in last:
        table.add_column(heading, no_wrap=True, overflow="ellipsis")
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3g}" if seconds < 0.9995 else f"{1e3 * seconds:,.0f}"


def _number(operations: float) -> str:
    """Return how many operations there were at once, on average."""
    return f"{operations:.2f}" if operations < 10 else f"{operations:.0f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 600 else _duration(seconds)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days} d {hours:02}:{minutes:02}:{rest:02}" if days else f"{hours}:{minutes:02}:{rest:02}"

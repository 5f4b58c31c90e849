"""Sum up the split steps of a run: mean and maximum over ranks, as tables and as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from hybridcomp.breakdown.split import KINDS, Breakdown, RankStep

FORMAT = 1
COLUMNS = ("step", "compute", *KINDS)
_DIGITS = 7  # decimals of seconds in the JSON: a tenth of a microsecond


@dataclass(frozen=True)
class Share:
    """Seconds of one quantity in an average step, for each rank.

    Attributes:
        of_rank: seconds by rank.
    """

    of_rank: dict[int, float]

    @property
    def mean(self) -> float:
        """Return the mean over the ranks."""
        return fmean(self.of_rank.values())

    @property
    def worst(self) -> float:
        """Return the largest value of any rank."""
        return max(self.of_rank.values())

    @property
    def worst_rank(self) -> int:
        """Return the rank with the largest value."""
        return max(self.of_rank, key=lambda rank: self.of_rank[rank])


def share(breakdown: Breakdown, seconds: Callable[[RankStep], float]) -> Share:
    """Return the mean over the steps of a quantity of each step, for each rank."""
    return Share({one.rank: fmean(map(seconds, breakdown.of_rank(one.rank))) for one in breakdown.ranks})


def columns(breakdown: Breakdown) -> dict[str, Share]:
    """Return the shares of a step's seconds, its computing, and its exposed communication by kind."""

    def of_kind(kind: str) -> Callable[[RankStep], float]:
        return lambda row: row.of_kind(kind)

    whole = {"step": share(breakdown, lambda r: r.seconds), "compute": share(breakdown, lambda r: r.compute)}
    return whole | {kind: share(breakdown, of_kind(kind)) for kind in KINDS}


def axis_columns(breakdown: Breakdown, axis: str) -> dict[str, Share]:
    """Return the shares of an axis's exposed communication, in all and by kind, and of its hidden communication."""

    def exposed(kind: str) -> Callable[[RankStep], float]:
        return lambda row: row.exposed.get(axis, {}).get(kind, 0.0)

    found = {"exposed": share(breakdown, lambda row: row.of_axis(axis))}
    found |= {kind: share(breakdown, exposed(kind)) for kind in KINDS}
    return found | {"hidden": share(breakdown, lambda row: sum(row.hidden.get(axis, {}).values()))}


def said_of(breakdown: Breakdown) -> str:
    """Describe in words what was split."""
    steps = breakdown.steps
    ranks, count = len(breakdown.ranks), len(steps)
    return (
        f"{ranks} rank{'s' * (ranks != 1)}, mean of steps {steps[0] + 1} to {steps[-1] + 1} ({count} step"
        f"{'s' * (count != 1)}, the first {breakdown.skipped} left out; {breakdown.by} said when each ended)"
    )


def concerns(breakdown: Breakdown) -> list[str]:
    """Return caveats on the accuracy of the times."""
    found = []
    if len({one.clock for one in breakdown.ranks}) > 1:
        error = breakdown.clock_error
        most = max(abs(seconds) for seconds in breakdown.offsets.values())
        found.append(
            f"clocks of hosts were {1e3 * most:.3g} ms apart at most, by the messages between them, to within "
            f"{1e3 * error:.3g} ms"
            if math.isfinite(error)
            else "some hosts exchanged no messages: their clocks are taken to agree"
        )
    if breakdown.lost:
        found.append(f"{breakdown.lost} spans are not in the traces, which were full: times are missing")
    return found


def show(breakdown: Breakdown, console: Console) -> None:
    """Print the tables."""
    console.print(f"where a step's time went, of {said_of(breakdown)}", highlight=False, soft_wrap=True)
    console.print(_ranks_table(breakdown))
    console.print(_axes_table(breakdown))
    for concern in concerns(breakdown):
        console.print(concern, highlight=False, soft_wrap=True)


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="", box=None, pad_edge=False)
    for at, heading in enumerate(headings):
        table.add_column(heading, justify="left" if at == 0 else "right", no_wrap=True)
    return table


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else ""


def _ranks_table(breakdown: Breakdown) -> Table:
    table = _table("\nms of a step; encode to waiting: exposed", "rank", *COLUMNS, "exposed")
    found = columns(breakdown)
    exposed = share(breakdown, lambda row: row.communication)
    whole = found["step"]

    def row(name: str, of: Callable[[Share], float]) -> None:
        cells = [_ms(of(found[column])) for column in COLUMNS]
        table.add_row(name, *cells, _percent(of(exposed), of(whole)))

    row("mean", lambda s: s.mean)
    worst = [_ms(found[column].worst) for column in COLUMNS]
    at = max(exposed.of_rank, key=lambda r: exposed.of_rank[r] / (whole.of_rank[r] or 1))
    table.add_row("most", *worst, _percent(exposed.of_rank[at], whole.of_rank[at]))
    for one in breakdown.ranks:
        row(str(one.rank), lambda s, rank=one.rank: s.of_rank[rank])  # type: ignore[misc]
    return table


def _axes_table(breakdown: Breakdown) -> Table:
    table = _table(
        "\nms of a step, of an average rank; hidden: behind computing",
        "axis",
        "exposed",
        "of step",
        *KINDS,
        "hidden",
        "most",
        "rank",
    )
    whole = columns(breakdown)["step"].mean
    for axis in breakdown.axes:
        found = axis_columns(breakdown, axis)
        exposed = found["exposed"]
        table.add_row(
            axis,
            _ms(exposed.mean),
            _percent(exposed.mean, whole),
            *(_ms(found[kind].mean) for kind in KINDS),
            _ms(found["hidden"].mean),
            _ms(exposed.worst),
            str(exposed.worst_rank),
        )
    return table


def as_json(breakdown: Breakdown) -> dict[str, Any]:
    """Return the breakdown in JSON's types; times are seconds."""
    error = breakdown.clock_error
    return {
        "format": FORMAT,
        "folder": str(breakdown.folder),
        "steps_by": breakdown.by,
        "skipped_steps": breakdown.skipped,
        "steps": len(breakdown.steps),
        "hosts": {str(one.rank): one.host for one in breakdown.ranks},
        "clock_offset_seconds": {str(r): round(s, 9) for r, s in breakdown.offsets.items()},
        "clock_error_seconds": error if math.isfinite(error) else None,
        "spans_lost": breakdown.lost,
        "ranks": {name: _shares(found) for name, found in columns(breakdown).items()},
        "axes": {
            axis: {name: _shares(found) for name, found in axis_columns(breakdown, axis).items()}
            for axis in breakdown.axes
        },
        "per_step": [_row(row) for row in sorted(breakdown.rows, key=lambda r: (r.step, r.rank))],
    }


def _shares(of: Share) -> dict[str, Any]:
    by_rank = {str(rank): round(seconds, _DIGITS) for rank, seconds in of.of_rank.items()}
    return {"mean": round(of.mean, _DIGITS), "most": round(of.worst, _DIGITS), "by_rank": by_rank}


def _row(row: RankStep) -> dict[str, Any]:
    def rounded(parts: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
        return {
            axis: {kind: round(seconds, _DIGITS) for kind, seconds in kinds.items()}
            for axis, kinds in parts.items()
        }

    return {
        "step": row.step + 1,
        "rank": row.rank,
        "seconds": round(row.seconds, _DIGITS),
        "compute": round(row.compute, _DIGITS),
        "exposed": rounded(row.exposed),
        "hidden": rounded(row.hidden),
    }


def median_step(breakdown: Breakdown) -> int:
    """Return the median step, by the time of its slowest rank."""
    return _by_length(breakdown)[len(breakdown.steps) // 2]


def longest_step(breakdown: Breakdown) -> int:
    """Return the longest step, by the time of its slowest rank."""
    return _by_length(breakdown)[-1]


def _by_length(breakdown: Breakdown) -> Sequence[int]:
    seconds: dict[int, float] = {}
    for row in breakdown.rows:
        seconds[row.step] = max(row.seconds, seconds.get(row.step, 0.0))
    return sorted(seconds, key=lambda step: seconds[step])

"""Evaluate a comparison's runs: milliseconds, bytes and losses beside the baseline's, and what to take."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridcomp.compare.plan import BASELINE, Candidate
from hybridcomp.compare.runner import Done
from hybridcomp.results.pairs import paired

BLOCKS = 5  # of steps, whose means or medians are taken for independent
WORTH = 1.05  # times the baseline's speed from which a change of the job is worth it
ALIKE = 1.03  # candidates this near to the fastest are as fast: of them the first that was named is taken
COSTLY = (
    0.005  # part of the baseline's loss above which a difference that is told from noise counts as a cost
)
_LATE = 2  # the last half of the steps is where losses are compared


@dataclass(frozen=True)
class Gap:
    """Difference of two losses of the same steps and data, over the last half of the steps.

    Attributes:
        mean: mean over ranks, rounds and steps of the candidate's loss minus the baseline's.
        margin: half of the interval that holds the mean with 95 %, from the means of :data:`BLOCKS` blocks of steps.
        steps: number of steps that are compared in each round.
    """

    mean: float
    margin: float
    steps: int

    @property
    def told(self) -> bool:
        """Tell whether the difference is told from noise."""
        return math.isfinite(self.mean) and abs(self.mean) > self.margin

    @property
    def needed(self) -> int | None:
        """Return how many measured steps would tell a difference of this size from noise; None for no difference."""
        if self.mean == 0 or not math.isfinite(self.margin / self.mean):
            return None
        return math.ceil(_LATE * self.steps * max(1.0, (self.margin / self.mean) ** 2))


@dataclass(frozen=True)
class Row:
    """One candidate, over all its rounds.

    Attributes:
        candidate: the candidate.
        failure: why the program failed under it; None where it did not. It has no figures then.
        step_ms: milliseconds of a step: the median of a round's steps, and of these the median.
        quantiles: the 10th and the 90th percentile of all steps, in milliseconds.
        ratios: the baseline's median over this one's, round by round.
        parts: the same of each of :data:`BLOCKS` blocks of steps, one after the other, over all rounds.
        between_bytes: bytes that left hosts in a step, of all hosts together; None where not known.
        counted: whether these are those of hybridcomp's statistics alone, as no interface counted them.
        waiting: share of a step in which the rank that waits least had nothing to do but to wait; None if not known.
        curve: loss by step: mean over the ranks that have one, and over rounds; None for steps without.
        end_loss: mean of the curve's last half; NaN without losses, or where one is not finite.
        not_finite: measured steps, from 1, at which the loss of a rank was infinite or no number, in any round.
        gap: difference to the baseline's loss; None for the baseline, without losses, or where the baseline's are not
            finite.
        memory_bytes: most resident memory of a rank; ``device_memory_bytes`` on its GPU, None without one.
    """

    candidate: Candidate
    failure: str | None = None
    step_ms: float = math.nan
    quantiles: tuple[float, float] = (math.nan, math.nan)
    ratios: tuple[float, ...] = ()
    parts: tuple[float, ...] = ()
    between_bytes: float | None = None
    counted: bool = False
    waiting: float | None = None
    curve: tuple[float | None, ...] = ()
    end_loss: float = math.nan
    not_finite: tuple[int, ...] = ()
    gap: Gap | None = None
    memory_bytes: int = 0
    device_memory_bytes: int | None = None

    @property
    def ratio(self) -> float:
        """Return how many times as fast as the baseline it is: the median of the rounds."""
        return statistics.median(self.ratios) if self.ratios else math.nan

    @property
    def faster(self) -> bool:
        """Tell whether it is faster than the baseline in every round; of one round, in every block of its steps."""
        shown = self.ratios if len(self.ratios) > 1 else self.parts
        return bool(shown) and min(shown) > 1

    @property
    def diverged(self) -> bool:
        """Tell whether the loss became infinite or no number, where the baseline's did not."""
        return self.gap is not None and not math.isfinite(self.gap.mean)


@dataclass(frozen=True)
class Results:
    """Results of a comparison.

    Attributes:
        rows: a row for each candidate, the baseline's first.
        ranks, hosts: number of ranks and of hosts.
        backend: backend that the program's default group names.
        device: ``cpu``, or the GPU's name.
        take: candidate to take; None where none pays.
        repeatable: whether the baseline's losses were the same in all its rounds; None for one round, or no losses.
        advice: what to take, in one sentence.
        notes: sentences on what limits the figures.
    """

    rows: tuple[Row, ...]
    ranks: int
    hosts: int
    backend: str
    device: str
    take: Candidate | None
    repeatable: bool | None
    advice: str
    notes: tuple[str, ...]

    @property
    def advice_and_line(self) -> tuple[str, str]:
        """Return the advice without the line to take, and that line, which is empty where none pays."""
        line = "" if self.take is None else self.take.line
        return self.advice.removesuffix(line).rstrip(), line


def results_of(candidates: Sequence[Candidate], runs: Sequence[Done], notes: Sequence[str] = ()) -> Results:
    """Evaluate runs.

    Args:
        candidates: candidates in order, the baseline first.
        runs: runs of all rounds; at least one of the baseline.
        notes: sentences on what the lab could not do.
    """
    by_name = {
        one.name: {run.round: run for run in runs if run.candidate.name == one.name} for one in candidates
    }
    base = by_name[BASELINE]
    rows = tuple(_row(one, by_name[one.name], base) for one in candidates)
    first = next(iter(base.values())).records
    hosts = len({record["host"] for record in first})
    curves = [_curve(run.records) for run in base.values()]
    has_loss = any(loss is not None for loss in curves[0])
    repeatable = all(_same(curve, curves[0]) for curve in curves) if len(curves) > 1 and has_loss else None
    said = [*notes, *_notes(rows, hosts, has_loss, repeatable, len(curves))]
    return Results(
        rows,
        len(first),
        hosts,
        first[0]["backend"],
        first[0]["device"],
        None if (taken := best(rows)) is None else taken.candidate,
        repeatable,
        advice(rows, first[0]["backend"], hosts),
        tuple(said),
    )


def _row(candidate: Candidate, mine: Mapping[int, Done], base: Mapping[int, Done]) -> Row:
    failures = [run.failure for run in mine.values() if run.failure is not None]
    if failures or not mine:
        return Row(candidate, failure=failures[0] if failures else "it was not run")
    steps = {number: _step_ms(run.records) for number, run in mine.items()}
    theirs = {number: _step_ms(run.records) for number, run in base.items()}
    every = [ms for one in steps.values() for ms in one]
    medians = {number: statistics.median(one) for number, one in steps.items()}
    sent = [_between(run.records) for run in mine.values()]
    known = [count for count, _ in sent if count is not None]
    waits = [
        min(known_waits)
        for run in mine.values()
        if (known_waits := [record["waiting"] for record in run.records if record["waiting"] is not None])
    ]
    curve = _mean_curve([_curve(run.records) for run in mine.values()])
    late = [loss for loss in curve[-max(1, len(curve) // _LATE) :] if loss is not None]
    records = [record for run in mine.values() for record in run.records]
    lost = {
        step
        for record in records
        for step, loss in enumerate(record["loss"], 1)
        if loss is not None and not math.isfinite(loss)
    }
    on_device = [
        record["device_memory_bytes"] for record in records if record["device_memory_bytes"] is not None
    ]
    return Row(
        candidate,
        step_ms=statistics.median(medians.values()),
        quantiles=_quantiles(every),
        ratios=tuple(statistics.median(theirs[n]) / ms for n, ms in medians.items() if n in theirs),
        parts=_parts(
            [theirs[n] for n in steps if n in theirs], [ms for n, ms in steps.items() if n in theirs]
        ),
        between_bytes=statistics.median(known) if known else None,
        counted=any(counted for _, counted in sent),
        waiting=statistics.median(waits) if waits else None,
        curve=tuple(curve),
        end_loss=statistics.fmean(late) if late else math.nan,
        not_finite=tuple(sorted(lost)),
        gap=None if candidate.name == BASELINE else gap_of(mine, base),
        memory_bytes=max(record["memory_bytes"] for record in records),
        device_memory_bytes=max(on_device, default=None),
    )


def _step_ms(records: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return each step's milliseconds, the mean over the ranks."""
    each = [record["seconds"] for record in records if record["seconds"]]
    return [1e3 * statistics.fmean(step) for step in zip(*each, strict=False)]


def _parts(base: Sequence[Sequence[float]], mine: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the baseline's median over the candidate's, block by block of their steps."""
    size = min((len(one) for one in (*base, *mine)), default=0) // BLOCKS
    if not size:
        return ()

    def medians(runs: Sequence[Sequence[float]]) -> list[float]:
        return [
            statistics.median(ms for run in runs for ms in run[i * size : (i + 1) * size])
            for i in range(BLOCKS)
        ]

    return tuple(theirs / ours for theirs, ours in zip(medians(base), medians(mine), strict=True))


def _quantiles(values: Sequence[float]) -> tuple[float, float]:
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return cuts[0], cuts[-1]


def _between(records: Sequence[Mapping[str, Any]]) -> tuple[float | None, bool]:
    """Return the bytes that left hosts in a step, and whether hybridcomp's statistics alone know them.

    An interface counts what all ranks of its host send: of each host, the first rank's record counts.
    """
    steps = max(1, len(records[0]["seconds"]))
    hosts: dict[str, Mapping[str, Any]] = {}
    for record in records:
        hosts.setdefault(record["host"], record)
    if len(hosts) == 1:
        return 0.0, False
    sent = [record["sent_bytes"] for record in hosts.values()]
    counted = [record["counted_bytes"] for record in records]
    by_interface = None if None in sent else sum(sent)
    by_us = None if None in counted else sum(counted)
    # A network that the system's interfaces do not count, InfiniBand's for one, shows by bytes that we have sent.
    if by_us is not None and (by_interface is None or by_interface < by_us / 2):
        return by_us / steps, True
    return (None if by_interface is None else by_interface / steps), False


def _curve(records: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Return the loss of each step, the mean over the ranks that have one."""
    by_step = zip(*(record["loss"] for record in records), strict=False)
    known = ([loss for loss in losses if loss is not None] for losses in by_step)
    return [statistics.fmean(losses) if losses else None for losses in known]


def _same(mine: Sequence[float | None], other: Sequence[float | None]) -> bool:
    """Tell whether two curves are the same; what is no number is the same as its like."""
    return [repr(loss) for loss in mine] == [repr(loss) for loss in other]


def _mean_curve(curves: Sequence[Sequence[float | None]]) -> list[float | None]:
    return [
        None
        if any(loss is None for loss in losses)
        else statistics.fmean(loss for loss in losses if loss is not None)
        for losses in zip(*curves, strict=False)
    ]


def gap_of(mine: Mapping[int, Done], base: Mapping[int, Done]) -> Gap | None:
    """Return the paired difference of losses: of the same round, rank and step."""
    rounds = [number for number in mine if number in base]
    gaps = [_paired(mine[number].records, base[number].records) for number in rounds]
    count = min((len(one) for one in gaps), default=0) // _LATE
    if count < BLOCKS:
        return None
    late = [statistics.fmean(step) for step in zip(*(one[-count:] for one in gaps), strict=True)]
    ends = [loss for number in rounds for loss in _curve(base[number].records)[-count:]]
    if not all(loss is None or math.isfinite(loss) for loss in ends):
        return None  # there is nothing to compare with
    if not all(map(math.isfinite, late)):
        return Gap(math.nan, math.nan, count)
    size = count // BLOCKS
    blocks = [statistics.fmean(late[i * size : (i + 1) * size]) for i in range(BLOCKS)]
    return Gap(statistics.fmean(late), paired(blocks)[1], count)


def _paired(mine: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]]) -> list[float]:
    by_rank = {record["rank"]: record["loss"] for record in base}
    each = [
        [
            None if a is None or b is None else a - b
            for a, b in zip(r["loss"], by_rank[r["rank"]], strict=False)
        ]
        for r in mine
        if r["rank"] in by_rank
    ]
    known = ([gap for gap in step if gap is not None] for step in zip(*each, strict=False))
    return [statistics.fmean(step) for step in known if step]


def _notes(
    rows: Sequence[Row], hosts: int, has_loss: bool, repeatable: bool | None, rounds: int
) -> list[str]:
    said = []
    if hosts == 1:
        said.append("All ranks are on one host: no bytes leave it, and what counts is its memory's speed.")
    if not has_loss:
        said.append("No loss was seen: backward was called on no scalar.")
    said += [_lost(row) for row in rows if row.not_finite]
    if rounds == 1:
        said.append(
            "One round was run: how far two runs of one candidate lie apart is not known, nor whether the program's "
            f"losses repeat. A candidate counts as faster where it is in each of {BLOCKS} blocks of its steps; whether "
            "it would be in another run cannot be told from noise. --rounds 2 tells both."
        )
    if repeatable is False:
        said.append(
            "The program's losses are not the same from run to run as it is: seed it, or part of each difference is "
            "its own."
        )
    if any(row.counted for row in rows):
        said.append(
            "Bytes marked * are those that hybridcomp's statistics count: the host's interfaces did not see them."
        )
    return said


def _lost(row: Row) -> str:
    """Say at which steps a candidate's loss was not finite."""
    first, count = row.not_finite[0], len(row.not_finite)
    which = (
        f"at step {first}"
        if count == 1
        else f"at {count} of {len(row.curve)} steps, the first of them {first}"
    )
    name = "The program's loss" if row.candidate.name == BASELINE else f"{row.candidate.name}: the loss"
    return f"{name} was not finite {which}{', as it is' if row.candidate.name == BASELINE else ''}."


# -- advice ----------------------------------------------------------------------------------------------


def best(rows: Sequence[Row]) -> Row | None:
    """Return the row of the candidate to take, or None where none pays."""
    base, *others = rows
    worth = [
        row
        for row in others
        if row.failure is None
        and row.ratio >= WORTH
        and row.faster
        and not row.diverged
        and not _costly(row, base)
    ]
    fastest = max((row.ratio for row in worth), default=0.0)
    return next((row for row in worth if row.ratio * ALIKE >= fastest), None)


def advice(rows: Sequence[Row], backend: str, hosts: int) -> str:
    """Say in one sentence which candidate to take and by which line, or that none pays and why."""
    base, *others = rows
    ran = [row for row in others if row.failure is None]
    if not ran:
        return "The program failed under every candidate: run it as it is."
    if (taken := best(rows)) is not None:
        once = " in the one round that was run" if len(taken.ratios) == 1 else ""
        return (
            f"Take {taken.candidate.name}, {taken.ratio:.2f} times as fast as {backend}{once}"
            f"{_loss_said(taken, base)}: {taken.candidate.line}"
        )
    fastest = max(ran, key=lambda row: row.ratio)
    if fastest.ratio < WORTH:
        return f"Compression does not pay here: {_why(fastest, base, hosts)}."
    gains = f"{fastest.candidate.name} is {fastest.ratio:.2f} times as fast"
    if not fastest.faster:
        where, shown = (
            ("rounds", fastest.ratios) if len(fastest.ratios) > 1 else ("parts of one run", fastest.parts)
        )
        return (
            f"Nothing is told from noise here: {gains}, but {min(shown, default=math.nan):.2f} to "
            f"{max(shown, default=math.nan):.2f} times in single {where}. More --rounds, or a machine with nothing "
            "else to do, would tell."
        )
    how = (
        "its loss diverged"
        if fastest.diverged
        else f"its loss ends {_signed(fastest)} higher, more than noise"
    )
    rest = "; no other gains 5 % with a loss that holds" if len(ran) > 1 else ""
    return f"Compression does not pay here: {gains}, but {how}{rest}."


def _costly(row: Row, base: Row) -> bool:
    """Tell whether a candidate's loss is higher than the baseline's, beyond noise, by so much that it counts."""
    return row.gap is not None and row.gap.told and row.gap.mean > COSTLY * abs(base.end_loss)


def _signed(row: Row) -> str:
    assert row.gap is not None
    return f"{row.gap.mean:.2g}"


def _loss_said(row: Row, base: Row) -> str:
    if row.gap is None:
        lost = ", with a loss that is not finite as it is either, so that nothing is told of it"
        return lost if base.not_finite else ""
    if row.gap.mean == 0 and row.gap.margin == 0:
        return ", with the same losses"
    if not row.gap.told:
        return ", with no difference of the loss that is told from noise"
    return f", with a loss that ends {abs(row.gap.mean):.2g} {'higher' if row.gap.mean > 0 else 'lower'}"


def _why(fastest: Row, base: Row, hosts: int) -> str:
    best = f"the fastest, {fastest.candidate.name}, is {fastest.ratio:.2f} times as fast"
    if base.waiting is None:
        return best
    waited = f"waiting for other ranks was {base.waiting:.0%} of a step"
    if base.waiting < 0.1:
        return f"{waited}, so that nothing sent can gain more than {1 / (1 - base.waiting):.2f} times; {best}"
    if hosts == 1:
        return f"all ranks are on one host, where sending costs little beside encoding ({waited}); {best}"
    return f"{waited}, and yet encoding takes what the link would save, or ranks wait for one that is late; {best}"

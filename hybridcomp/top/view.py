"""Compare the ranks' snapshots of a job with earlier ones: rates, which ranks wait for which, and the slowest rank."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from statistics import median

from hybridcomp.steps import NO_STEPS, Steps, between
from hybridcomp.top.read import Job, Rank
from hybridcomp.top.snapshot import AxisTotals, InFlight, Snapshot, total

Process = tuple[str, int, int]
SILENT_SECONDS = 3.0  # seconds without a word from a rank that writes twice a second
_STUCK_SECONDS = 1.0  # for which some ranks have not started an operation: they keep the others waiting
_LEAST_SHARE = 0.05  # share of the time: ranks that wait less for each other do not matter
_MOST_OPERATIONS = 64


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of ranks between the two latest snapshots of each.

    Attributes:
        plain, sent: bytes/s, uncompressed and sent.
        encode, wire, decode: operations that were there at once, on average; an operation in flight is in wire while
            it is in neither of the others.
    """

    plain: float
    sent: float
    encode: float
    wire: float
    decode: float


@dataclass(frozen=True, slots=True)
class AxisView:
    """One axis, summed over the ranks that are shown.

    Attributes:
        axis: name of the axis.
        ranks: number of ranks with operations on it.
        totals: totals since their processes began.
        steps: optimizer steps of these ranks, summed: 10 of two ranks that have made 5 each.
        rates: bytes/s of all of them, and an average rank's shares of the time; None while they are not known.
    """

    axis: str
    ranks: int
    totals: AxisTotals
    steps: int
    rates: Rates | None


@dataclass(frozen=True, slots=True)
class OperationView:
    """Operation in flight: a collective on all its ranks, a send or a receive on one.

    Attributes:
        op, axis, number: as in the ranks' snapshots.
        seconds: time since the first of the ranks started it.
        ranks: ranks that have it in flight.
        missing: ranks known not to have started it.
        awaits: ranks whose messages are waited for, where none is missing.
        elsewhere: number of ranks of its communicator that do not show themselves here.
    """

    op: str
    axis: str
    number: int
    seconds: float
    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    awaits: tuple[int, ...]
    elsewhere: int


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank of a job.

    Attributes:
        rank, pid, host: rank, process id and host of its process.
        ended: whether the process has ended without leaving the job.
        silent: seconds without a snapshot, if that is long.
        rates: rates over all axes; None while they are not known.
        in_flight: number of operations in flight.
        oldest: seconds since the oldest of them started.
        steps: its optimizer steps.
        lately: those between its two latest snapshots, where the length of one is known; else all of them.
    """

    rank: int
    pid: int
    host: str
    ended: bool
    silent: float | None
    rates: Rates | None
    in_flight: int
    oldest: float | None
    steps: Steps
    lately: Steps


@dataclass(frozen=True, slots=True)
class Slowest:
    """Rank that keeps others waiting.

    Attributes:
        rank: number of the rank.
        axis: mesh axis of the collectives in which they wait.
        seconds: seconds they have waited in one that it has not started; None if they wait again and again.
        share: share of the time that the others waited longer in collectives than it did; None if they wait in one.
    """

    rank: int
    axis: str
    seconds: float | None
    share: float | None


@dataclass(frozen=True, slots=True)
class JobView:
    """View of a job.

    Attributes:
        name, program, since: name, command line and start of the job.
        size: number of ranks in all.
        ranks: ranks that are shown.
        axes: axes by bytes, most first.
        operations: operations in flight, the oldest first.
        slowest: the rank that keeps others waiting, if one does.
    """

    name: str
    program: str
    since: float
    size: int
    ranks: tuple[RankView, ...]
    axes: tuple[AxisView, ...]
    operations: tuple[OperationView, ...]
    slowest: Slowest | None


class History:
    """Latest snapshot of each rank, and the one before it."""

    def __init__(self) -> None:
        self._pairs: dict[Process, tuple[Snapshot | None, Snapshot]] = {}

    def add(self, job: Job) -> None:
        """Take the snapshots of a job's ranks now."""
        for rank in job.ranks:
            known = self._pairs.get(rank.process)
            if known is None:
                self._pairs[rank.process] = (None, rank.says)
            elif rank.says.at > known[1].at:
                self._pairs[rank.process] = (known[1], rank.says)

    def before(self, rank: Rank) -> Snapshot | None:
        """Return a rank's snapshot before its present one; None if there is none, or the rank ended meanwhile."""
        known = self._pairs.get(rank.process)
        return None if known is None or rank.ended else known[0]


def look(job: Job, history: History) -> JobView:
    """Return the view of a job whose ranks' snapshots ``history`` has."""
    pairs = [(rank, history.before(rank)) for rank in job.ranks]
    first = job.ranks[0].says
    operations = _operations(job)
    return JobView(
        job.name,
        first.program,
        min(rank.says.since for rank in job.ranks),
        job.size,
        tuple(_rank(rank, before) for rank, before in pairs),
        _axes(pairs),
        operations[:_MOST_OPERATIONS],
        _stuck(operations) or _late([(rank.says, before) for rank, before in pairs]),
    )


Pair = tuple[Rank, Snapshot | None]


def _axes(pairs: Sequence[Pair]) -> tuple[AxisView, ...]:
    by_axis: dict[str, list[tuple[AxisTotals, Pair]]] = defaultdict(list)
    for pair in pairs:
        for totals in pair[0].says.axes:
            by_axis[totals.axis].append((totals, pair))
    views = []
    for axis, found in by_axis.items():
        changes = [change for totals, pair in found if (change := _change(totals, *pair)) is not None]
        rates = _sum(changes)
        if rates is not None:
            n = len(changes)
            rates = replace(rates, encode=rates.encode / n, wire=rates.wire / n, decode=rates.decode / n)
        steps = sum(pair[0].says.steps.count for _, pair in found)
        views.append(AxisView(axis, len(found), total(totals for totals, _ in found), steps, rates))
    return tuple(sorted(views, key=lambda view: (-view.totals.plain_bytes, view.axis)))


def _sum(each: Sequence[Rates]) -> Rates | None:
    if not each:
        return None
    return Rates(*(sum(column) for column in zip(*map(astuple, each), strict=True)))


def _change(now: AxisTotals, rank: Rank, before: Snapshot | None) -> Rates | None:
    """Return the rates of an axis on a rank."""
    if before is None:
        return None
    seconds = rank.says.at - before.at
    old = next((one for one in before.axes if one.axis == now.axis), None)
    wire = _in_flight_seconds(rank.says, now.axis) - _in_flight_seconds(before, now.axis)
    names = ("plain_bytes", "wire_bytes", "encode_seconds", "wire_seconds", "decode_seconds")
    changes = [getattr(now, name) - (0 if old is None else getattr(old, name)) for name in names]
    changes[3] += wire
    return Rates(*(max(0.0, change / seconds) for change in changes))


def _in_flight_seconds(says: Snapshot, axis: str) -> float:
    return sum(max(0.0, says.at - one.since) for one in says.in_flight if one.axis == axis)


def _rank(rank: Rank, before: Snapshot | None) -> RankView:
    says = rank.says
    changes = [change for totals in says.axes if (change := _change(totals, rank, before)) is not None]
    silent = time.time() - says.at
    since = min((one.since for one in says.in_flight), default=None)
    steps = lately = between(NO_STEPS, says.steps)
    if before is not None and says.steps.timed > before.steps.timed:
        lately = between(before.steps, says.steps)
    return RankView(
        says.rank,
        says.pid,
        says.host,
        rank.ended,
        silent if silent > SILENT_SECONDS else None,
        _sum(changes),
        len(says.in_flight) + says.unlisted,
        None if since is None else max(0.0, says.at - since),
        steps,
        lately,
    )


# -- waits of ranks --------------------------------------------------------------------------------------


def _operations(job: Job) -> tuple[OperationView, ...]:
    """Return the operations in flight, the oldest first."""
    together: dict[tuple[str, str, int], list[tuple[Rank, InFlight]]] = defaultdict(list)
    apart: list[OperationView] = []
    for rank in job.ranks:
        for one in () if rank.ended else rank.says.in_flight:
            if one.number:
                together[one.key, one.op, one.number].append((rank, one))
            else:
                seconds = max(0.0, rank.says.at - one.since)
                where = (rank.says.rank,)
                apart.append(OperationView(one.op, one.axis, 0, seconds, where, (), one.awaits, 0))
    common = [_common(job, key, number, found) for (key, _, number), found in together.items()]
    return tuple(sorted([*common, *apart], key=lambda one: -one.seconds))


def _common(job: Job, key: str, number: int, found: Sequence[tuple[Rank, InFlight]]) -> OperationView:
    """Return the view of a collective that some ranks have in flight."""
    since = min(one.since for _, one in found)
    # Operations start in the order of their numbers: a rank that was at a smaller one while others had started this
    # one has not; nor will a rank that has died.
    missing, shown, size = [], 0, 0
    for rank in job.ranks:
        for group in rank.says.groups:
            if group.key == key:
                shown, size = shown + 1, group.size
                if group.latest < number and (rank.ended or rank.says.at > since):
                    missing.append(rank.says.rank)
    awaits = {peer for _, one in found for peer in one.awaits}
    first = found[0][1]
    return OperationView(
        first.op,
        first.axis,
        number,
        max(0.0, max(rank.says.at for rank, _ in found) - since),
        tuple(rank.says.rank for rank, _ in found),
        tuple(missing),
        () if missing else tuple(sorted(awaits)),
        max(0, size - shown),
    )


def _stuck(operations: Iterable[OperationView]) -> Slowest | None:
    """Return the rank that has not started an operation in which others wait, if they do for long."""
    for one in operations:
        if one.missing and one.seconds >= _STUCK_SECONDS:
            return Slowest(one.missing[0], one.axis, one.seconds, None)
    return None


def _late(pairs: Iterable[tuple[Snapshot, Snapshot | None]]) -> Slowest | None:
    """Return the rank that comes last to collectives: it waits least in them, while the others wait.

    Among the others waits differ, too: a rank that differs from the next one by no more than these do is none.
    """
    waits: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
    for now, before in pairs:
        if before is None:
            continue
        old = _waited(before)
        for (key, axis), seconds in _waited(now).items():
            share = (seconds - old.get((key, axis), 0.0)) / (now.at - before.at)
            waits[key, axis].append((share, now.rank))
    found: Slowest | None = None
    for (_, axis), shares in waits.items():
        least, *others = sorted(shares)
        if not others:
            continue
        usual = median(wait for wait, _ in others)
        if others[0][0] - least[0] <= median(abs(wait - usual) for wait, _ in others):
            continue
        share = min(1.0, usual - least[0])
        if share >= (_LEAST_SHARE if found is None else found.share or 0.0):
            found = Slowest(least[1], axis, None, share)
    return found


def _waited(says: Snapshot) -> Mapping[tuple[str, str], float]:
    """Return the seconds of a rank's collectives by communicator, those in flight until now."""
    seconds = {(group.key, group.axis): group.waited for group in says.groups}
    for one in says.in_flight:
        if one.number and (one.key, one.axis) in seconds:
            seconds[one.key, one.axis] += max(0.0, says.at - one.since)
    return seconds

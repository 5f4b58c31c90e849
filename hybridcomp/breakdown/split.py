"""Split each step of each rank into computing and exposed communication."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hybridcomp import trace
from hybridcomp.breakdown.matching import Matches, clock_offsets
from hybridcomp.breakdown.reading import (
    MESSAGES,
    RankTrace,
    TracedOperation,
    Wait,
    check_complete,
    read,
)
from hybridcomp.errors import ConfigError
from hybridcomp.intervals import (
    Interval,
    Intervals,
    difference,
    intersection,
    length,
    union,
)

KINDS = ("encode", "wire", "decode", "waiting")
WARMUP = 3  # steps: allocations, caches, first connections
NO_STEPS = "a step ends with an optimizer's step(), hct.advance_step(), or hc.trace.step_ended()"
_NO_AXIS = "other"  # axis of waits for whatever was in flight, where no recorded operation was


@dataclass(frozen=True)
class Slice:
    """Time of one rank's program in which it could not compute.

    Attributes:
        axis: mesh axis of the operation that the program was in.
        kind: one of :data:`KINDS`: what the rank did meanwhile, for that operation or another one.
        began, ended: start and end in seconds.
    """

    axis: str
    kind: str
    began: float
    ended: float


@dataclass(frozen=True)
class RankStep:
    """One step of one rank, in seconds; ``compute`` and ``exposed`` sum to ``seconds``.

    Attributes:
        rank, step: from 0.
        began, ended: start and end.
        compute: all time without exposed communication.
        exposed: communication that kept the program from computing, by axis and kind.
        hidden: communication behind computing, by axis and kind; ``waiting`` is always 0.
        slices: intervals that sum to ``exposed``, in order of time.
    """

    rank: int
    step: int
    began: float
    ended: float
    compute: float
    exposed: dict[str, dict[str, float]]
    hidden: dict[str, dict[str, float]]
    slices: list[Slice] = field(repr=False)

    @property
    def seconds(self) -> float:
        """Return the length of the step."""
        return self.ended - self.began

    def of_kind(self, kind: str) -> float:
        """Return the exposed communication of one kind, of all axes."""
        return sum(parts[kind] for parts in self.exposed.values())

    def of_axis(self, axis: str) -> float:
        """Return the exposed communication of one axis."""
        return sum(self.exposed.get(axis, {}).values())

    @property
    def communication(self) -> float:
        """Return all exposed communication."""
        return sum(self.of_axis(axis) for axis in self.exposed)


@dataclass(frozen=True)
class Breakdown:
    """Split steps of a run.

    Attributes:
        folder: folder of the traces.
        ranks: traces of the ranks, on one clock.
        by: source that reported the steps' ends.
        skipped: number of steps left out at the start.
        rows: one for each step and rank.
        offsets: seconds that were added to each rank's times.
        clock_error: seconds by which an offset may be wrong, at most.
    """

    folder: Path
    ranks: list[RankTrace]
    by: str
    skipped: int
    rows: list[RankStep]
    offsets: dict[int, float]
    clock_error: float

    @property
    def axes(self) -> list[str]:
        """Return the axes, the most exposed first."""
        total: dict[str, float] = {}
        for row in self.rows:
            for axis in (*row.exposed, *row.hidden):
                total[axis] = total.get(axis, 0.0) + row.of_axis(axis)
        return sorted(total, key=lambda axis: (-total[axis], axis))

    @property
    def steps(self) -> list[int]:
        """Return the steps that are split, from 0."""
        return sorted({row.step for row in self.rows})

    @property
    def lost(self) -> int:
        """Return the number of spans that are missing from the traces."""
        return sum(one.lost for one in self.ranks)

    def of_rank(self, rank: int) -> list[RankStep]:
        """Return the steps of one rank."""
        return [row for row in self.rows if row.rank == rank]


def aligned(folder: Path) -> tuple[list[RankTrace], dict[int, float], float]:
    """Read a folder's traces, and put them on one clock.

    Returns:
        The traces; the seconds that were added to the times of each rank; and the most by which one may be wrong.

    Raises:
        ConfigError: see :func:`~hybridcomp.breakdown.reading.read`.
    """
    ranks = read(folder)
    offsets, error = clock_offsets(ranks, Matches(ranks))
    return [one.later(offsets[one.rank]) for one in ranks], offsets, error


def has_steps(ranks: Iterable[RankTrace]) -> bool:
    """Tell whether any rank has recorded the ends of steps."""
    return any(one.steps for one in ranks)


def has_waits(ranks: Iterable[RankTrace]) -> bool:
    """Tell whether it is known for what a rank waited: of operations of the backend hybridcomp."""
    return any(o.comm is not None for one in ranks for o in one.operations)


def split(
    folder: Path,
    ranks: list[RankTrace],
    offsets: dict[int, float],
    clock_error: float,
    *,
    warmup: int = WARMUP,
) -> Breakdown:
    """Split the steps of a run.

    Args:
        folder: folder of the traces.
        ranks, offsets, clock_error: results of :func:`aligned`.
        warmup: first steps to leave out; fewer where none would be left.

    Raises:
        ConfigError: ranks are missing, or none has a step.
    """
    check_complete(folder, ranks)
    by = next((by for by in trace.STEPS_BY if all(one.steps.get(by) for one in ranks)), None)
    if by is None:
        raise ConfigError(f"{folder}: the traces of some ranks have no step: {NO_STEPS}")
    Matches(ranks).find_waits()
    count = min(len(one.steps[by]) for one in ranks)
    skipped = min(warmup, count - 1)
    rows = [
        row for one in ranks for row in _Rank(one).split(sorted(one.steps[by])[skipped:count], first=skipped)
    ]
    return Breakdown(folder, ranks, by, skipped, rows, offsets, clock_error)


class _Rank:
    """The operations and waits of a rank, to be split by steps."""

    def __init__(self, one: RankTrace) -> None:
        self._rank = one.rank
        self._operations = one.operations
        self._found: dict[tuple[str | None, int, bool], TracedOperation] = {
            (o.comm, o.n, o.op in MESSAGES): o for o in one.operations if o.comm is not None
        }
        self._waits = one.waits

    def split(self, steps: Sequence[Interval], *, first: int) -> list[RankStep]:
        """Return the split steps; the given ones must be sorted and must not overlap."""
        began, ended = [s[0] for s in steps], [s[1] for s in steps]
        operations: list[list[TracedOperation]] = [[] for _ in steps]
        for o in self._operations:
            for at in range(bisect_right(ended, o.began), bisect_left(began, o.ended)):
                operations[at].append(o)
        waits: list[list[Wait]] = [[] for _ in steps]
        for w in self._waits:
            for at in range(bisect_right(ended, w.began), bisect_left(began, w.ended)):
                waits[at].append(w)
        return [self._one(first + at, step, operations[at], waits[at]) for at, step in enumerate(steps)]

    def _one(
        self, number: int, step: Interval, operations: list[TracedOperation], waits: list[Wait]
    ) -> RankStep:
        whole = [step]
        blocked, waited = self._blocked(step, operations, waits)
        encoding = intersection(union(i for o in operations for i in o.encodes), whole)
        decoding = difference(intersection(union(i for o in operations for i in o.decodes), whole), encoding)
        slices: list[Slice] = []
        for axis, times in blocked.items():
            rest = difference(difference(times, encoding), decoding)
            others = intersection(rest, union(waited[axis]))
            kinds = {
                "encode": intersection(times, encoding),
                "decode": intersection(times, decoding),
                "waiting": others,
                "wire": difference(rest, others),
            }
            slices += [Slice(axis, kind, *i) for kind, found in kinds.items() for i in found]
        exposed: dict[str, dict[str, float]] = {}
        for one in slices:
            parts = exposed.setdefault(one.axis, dict.fromkeys(KINDS, 0.0))
            parts[one.kind] += one.ended - one.began
        program = union(i for times in blocked.values() for i in times)
        return RankStep(
            self._rank,
            number,
            *step,
            compute=step[1] - step[0] - length(program),
            exposed=exposed,
            hidden=_hidden(operations, difference(whole, program)),
            slices=sorted(slices, key=lambda s: s.began),
        )

    def _blocked(
        self, step: Interval, operations: list[TracedOperation], waits: list[Wait]
    ) -> tuple[dict[str, Intervals], dict[str, Intervals]]:
        """Return, by axis, when the program was in operations, and the times in which these waited for other ranks."""
        blocked: dict[str, Intervals] = {}
        waited: dict[str, Intervals] = {}
        at = step[0]  # where waits of several threads overlap, the first counts
        for wait in waits:
            began, ended = max(wait.began, at), min(wait.ended, step[1])
            if began >= ended:
                continue
            at = ended
            operation = self._found.get((wait.comm, wait.n, wait.message)) or _in_flight(operations, ended)
            axis = wait.axis or _NO_AXIS if operation is None else operation.axis
            blocked.setdefault(axis, []).append((began, ended))
            until = -math.inf if operation is None else min(operation.until, operation.ended)
            waited.setdefault(axis, [])
            if until > began:
                waited[axis].append((began, min(until, ended)))
        return blocked, waited


def _in_flight(operations: list[TracedOperation], at: float) -> TracedOperation | None:
    """Return the operation that was in flight at a time and ended first."""
    flying = [o for o in operations if o.began <= at <= o.ended]
    return min(flying, key=lambda o: o.ended, default=None)


def _hidden(operations: list[TracedOperation], computing: Intervals) -> dict[str, dict[str, float]]:
    """Return by axis and kind the seconds of operations behind computing."""
    by_axis: dict[str, list[TracedOperation]] = {}
    for o in operations:
        by_axis.setdefault(o.axis, []).append(o)
    hidden: dict[str, dict[str, float]] = {}
    for axis, own in by_axis.items():
        encoding = union(i for o in own for i in o.encodes)
        decoding = difference(union(i for o in own for i in o.decodes), encoding)
        busy = union((*encoding, *decoding))
        wire = difference(union((max(o.began, o.until), o.ended) for o in own), busy)
        kinds = {"encode": encoding, "wire": wire, "decode": decoding}
        parts = {kind: length(intersection(found, computing)) for kind, found in kinds.items()}
        hidden[axis] = parts | {"waiting": 0.0}
    return hidden

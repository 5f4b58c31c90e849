"""Track the elements in buffers and messages of a symbolic run: their ranks, order of sums, and encodings."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from hybridcomp.schedules.topology import Topology

#: A run of elements: their count, the value that they hold (a number of :class:`Values`), and the position of the
#: first of them in the ``SEND`` buffer that they come from.
Run = tuple[int, int, int]
Order = Callable[[tuple[int, ...], Topology], bool]


def any_order(ranks: tuple[int, ...], topology: Topology) -> bool:
    """Accept any order, as of a tree."""
    return True


def rank_order(ranks: tuple[int, ...], topology: Topology) -> bool:
    """Accept the order of the ranks."""
    return list(ranks) == sorted(ranks)


def owner_first(ranks: tuple[int, ...], topology: Topology) -> bool:
    """Accept any rank first, and then the others in order."""
    return list(ranks[1:]) == sorted(ranks[1:])


def host_order(ranks: tuple[int, ...], topology: Topology) -> bool:
    """Accept any host's ranks first and then the other hosts' in order; each host's as in :func:`owner_first`."""
    hosts: list[int] = []
    groups: list[list[int]] = []
    for rank in ranks:
        if not hosts or hosts[-1] != topology.hosts[rank]:
            hosts.append(topology.hosts[rank])
            groups.append([])
        groups[-1].append(rank)
    once = len(set(hosts)) == len(hosts)
    return once and hosts[1:] == sorted(hosts[1:]) and all(owner_first(tuple(g), topology) for g in groups)


#: Function that returns how many errors of encodings add up in a result: of ranks' parts and of sums of some of them,
#: and of the sum of all.
Losses = Callable[[Topology], tuple[int, int]]


def every_message(topology: Topology) -> tuple[int, int]:
    """Count one message of every rank but the owner of the sum, and the sum's own."""
    return len(topology.hosts) - 1, 1


@dataclass(frozen=True, slots=True)
class Promise:
    """Properties that an algorithm promises of its results, beyond their correctness.

    Attributes:
        order: function that tells whether the parts of a sum may have been added in this order of ranks.
        parts: most encodings of a part on its way into the sum of all.
        sums: most encodings of the sum of all.
        losses: function that returns the most encodings whose errors add up in an element of a reduction's result.
    """

    order: Order = owner_first
    parts: int = 1
    sums: int = 1
    losses: Losses = every_message

    def encodings(self, topology: Topology, *, mean: bool) -> Fraction:
        """Return the most errors of encodings in an element of a reduction's result; 1 where nothing is encoded.

        In a mean the errors of parts are divided by the number of ranks, as the parts are; that of the sum is not. So
        there may be less than one.
        """
        parts, sums = self.losses(topology)
        return Fraction(parts, len(topology.hosts) if mean else 1) + sums or Fraction(1)


@dataclass(frozen=True, slots=True)
class Value:
    """Value of an element in a symbolic run.

    Attributes:
        ranks: ranks whose parts make up the sum, in the order in which they were added.
        parts: most encodings of one of the parts before all were summed.
        sums: encodings of the sum of all.
        losses: encodings of parts, and of sums of some of them, whose errors have been added up in it.
        total: whether it is the sum of all ranks' parts, encoded or not.
        divided: whether it was divided by the number of ranks.
    """

    ranks: tuple[int, ...]
    parts: int = 0
    sums: int = 0
    losses: int = 0
    total: bool = False
    divided: bool = False


class Values:
    """Values of one symbolic run, by number; equal numbers are equal bits."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._known: list[Value] = [Value((rank,)) for rank in range(ranks)]
        self._numbers: dict[object, int] = {}

    def __getitem__(self, number: int) -> Value:
        """Return the value of a number."""
        return self._known[number]

    def encoded(self, number: int, step: int) -> int:
        """Return the number of the value to which a message decodes; ``step``, numbered over all ranks, encoded it."""
        key = (number, step)
        if key not in self._numbers:
            old = self._known[number]
            partial = not old.total
            counts = (old.parts + partial, old.sums + old.total, old.losses + partial)
            self._add(key, Value(old.ranks, *counts, old.total, old.divided))
        return self._numbers[key]

    def sizes(self, rank: int, borders: tuple[int, ...]) -> int:
        """Return the number of the value of a rank's message sizes, for regions with these borders."""
        key = ("sizes", rank, borders)
        if key not in self._numbers:
            self._add(key, Value((rank,)))
        return self._numbers[key]

    def sum(self, addends: Sequence[int], divide: bool) -> int:
        """Add values in this order.

        Raises:
            ValueError: the values have a part in common, or were divided already.
        """
        key = (tuple(addends), divide)
        if key in self._numbers:
            return self._numbers[key]
        terms = [self._known[number] for number in addends]
        ranks = tuple(rank for term in terms for rank in term.ranks)
        twice = {rank for rank in ranks if ranks.count(rank) > 1} if len(set(ranks)) < len(ranks) else set()
        if twice:
            raise ValueError(f"the part of rank {min(twice)} is added twice")
        if any(term.divided for term in terms):
            raise ValueError("it sums what was divided by the number of ranks already")
        parts, sums = (max(getattr(t, name) for t in terms) for name in ("parts", "sums"))
        losses = sum(term.losses for term in terms)
        return self._add(key, Value(ranks, parts, sums, losses, len(ranks) == self._ranks, divide))

    def _add(self, key: object, value: Value) -> int:
        self._known.append(value)
        self._numbers[key] = len(self._known) - 1
        return len(self._known) - 1


class Piece:
    """Elements of a buffer that hold one value, and the steps that have used them.

    Attributes:
        start, stop: range of the elements.
        value: number in :class:`Values`; -1 if nothing was written.
        source: position of the first element in its ``SEND`` buffer, as in :data:`Run`.
        users: the step that wrote them, if one did, and the steps that have read them since.
        writer: step that wrote them; -1 for none.
    """

    __slots__ = ("source", "start", "stop", "users", "value", "writer")

    def __init__(self, start: int, stop: int, value: int, source: int, writer: int, users: list[int]) -> None:
        self.start, self.stop = start, stop
        self.value, self.source = value, source
        self.writer, self.users = writer, users


class Content:
    """Content of a buffer."""

    def __init__(self, size: int) -> None:
        """Make a buffer in which nothing was written."""
        self.size = size
        self._pieces = [Piece(0, size, -1, 0, -1, [])] if size else []
        self._starts = [0] if size else []

    def fill(self, start: int, count: int, value: int) -> None:
        """Set the value of a range before the first step."""
        self.write(start, [(count, value, 0)] if count else [], -1)

    def pieces(self, start: int, count: int) -> list[Piece]:
        """Return the pieces of a range, cut at its ends."""
        return self._pieces[self._cut(start) : self._cut(start + count)]

    def runs(self, start: int, count: int) -> list[Run]:
        """Return the runs of values in a range."""
        return joined((p.stop - p.start, p.value, p.source) for p in self.pieces(start, count))

    def write(self, start: int, runs: Iterable[Run], step: int) -> None:
        """Write values to a range."""
        begin, at = self._cut(start), start
        fresh = []
        for count, value, source in runs:
            fresh.append(Piece(at, at + count, value, source, step, [step] if step >= 0 else []))
            at += count
        end = self._cut(at)
        self._pieces[begin:end] = fresh
        self._starts[begin:end] = [piece.start for piece in fresh]

    def _cut(self, at: int) -> int:
        """Return the index of the piece that begins at an element; split the piece around it if none does."""
        i = bisect_left(self._starts, at)
        if at == self.size or self._starts[i : i + 1] == [at]:
            return i
        piece = self._pieces[i - 1]
        rest = Piece(
            at,
            piece.stop,
            piece.value,
            piece.source + at - piece.start,
            piece.writer,
            list(piece.users),
        )
        piece.stop = at
        self._pieces.insert(i, rest)
        self._starts.insert(i, at)
        return i


def joined(runs: Iterable[Run]) -> list[Run]:
    """Join runs that continue one another."""
    result: list[Run] = []
    for count, value, source in runs:
        if result:
            before, last, first = result[-1]
            if last == value and (value < 0 or first + before == source):
                result[-1] = (before + count, value, first)
                continue
        result.append((count, value, source))
    return result


def added(values: Values, addends: Sequence[Sequence[Run]], divide: bool) -> list[Run]:
    """Sum addends in this order; each is a list of runs, with the same number of elements in all.

    Raises:
        ValueError: elements do not belong together; or as in :meth:`Values.sum`.
    """
    if all(len(runs) == 1 for runs in addends):
        counts, numbers, sources = zip(*(runs[0] for runs in addends), strict=True)
        _same_position(sources)
        return [(counts[0], values.sum(numbers, divide), sources[0])]
    edges = sorted({edge for runs in addends for edge in _edges(runs)})
    result = []
    for start, stop in zip([0, *edges], edges, strict=False):
        parts = [_at(runs, start) for runs in addends]
        _same_position([source for _, source in parts])
        result.append((stop - start, values.sum([value for value, _ in parts], divide), parts[0][1]))
    return joined(result)


def _same_position(sources: Sequence[int]) -> None:
    if min(sources) != max(sources):
        raise ValueError(f"elements {min(sources)} and {max(sources)} of the ranks' data are added together")


def _edges(runs: Sequence[Run]) -> list[int]:
    result, at = [], 0
    for count, _, _ in runs:
        at += count
        result.append(at)
    return result


def _at(runs: Sequence[Run], place: int) -> tuple[int, int]:
    """Return the value of an element, and its source."""
    for count, value, source in runs:
        if place < count:
            return value, source + place
        place -= count
    raise AssertionError("runs of different lengths")

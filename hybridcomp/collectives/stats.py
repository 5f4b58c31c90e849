"""Count the calls, bytes and seconds of a communicator, per operation and codec."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from hybridcomp import trace
from hybridcomp.steps import Steps

# Work of the compiled engine: bytes sent, those in shared memory, those to other hosts; seconds to encode and decode.
Tally = tuple[int, int, int, float, float]
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_ZERO: Any = 0
Number = TypeVar("Number", int, float)


@dataclass(slots=True)
class Counters(Generic[Number]):
    """Counters of one kind of message: whole numbers in totals, not in means.

    Attributes:
        axis: mesh axis of the communicator.
        op: name of the operation: ``all_reduce``, ``send``, ...
        codec: spec of the codec; ``none`` where nothing was compressed.
        reason: why that codec was chosen.
        calls: number of operations.
        raw_bytes: bytes of the callers' buffers.
        plain_bytes: bytes that this rank would have sent uncompressed by the usual algorithm.
        wire_bytes: bytes that this rank sent.
        shared_bytes: part of ``wire_bytes`` that ranks of the same host read in place, in shared memory.
        encode_seconds, decode_seconds: seconds in kernels, on this rank.
        wire_seconds: rest of the time between start and end.
        between_bytes: part of ``wire_bytes`` that went to ranks of other hosts. Of MPI's own collectives, whose way MPI
            chooses, it is the share of those among the other ranks.
    """

    axis: str
    op: str
    codec: str
    reason: str
    calls: Number = _ZERO
    raw_bytes: Number = _ZERO
    plain_bytes: Number = _ZERO
    wire_bytes: Number = _ZERO
    shared_bytes: Number = _ZERO
    encode_seconds: float = 0.0
    wire_seconds: float = 0.0
    decode_seconds: float = 0.0
    between_bytes: Number = _ZERO

    @property
    def inside_bytes(self) -> Number:
        """Return the part of ``wire_bytes`` that went to ranks of the same host."""
        return self.wire_bytes - self.between_bytes

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Return the fields that make calls one kind: axis, operation, codec and reason."""
        return (self.axis, self.op, self.codec, self.reason)


class MeanRow(Counters[float]):
    """Means of one kind of message, of a step.

    ``wire_seconds`` are those under way, summed over operations: several may be under way at once, and while the
    program computes. :attr:`Stats.steps` has the time that a step waited.
    """

    __slots__ = ()


class StatRow(Counters[int]):
    """Totals of one kind of message."""

    __slots__ = ()

    @property
    def measured(self) -> tuple[str, str, str, int, int, float]:
        """Return operation, codec, reason, calls, raw bytes, and the seconds of all calls together."""
        seconds = self.encode_seconds + self.wire_seconds + self.decode_seconds
        return self.op, self.codec, self.reason, self.calls, self.raw_bytes, seconds

    def mean(self, count: float) -> MeanRow:
        """Return the row's totals divided by a number: of steps, or of ranks whose totals they are."""
        totals = (getattr(self, field.name) for field in fields(self)[len(self.key) :])
        return MeanRow(*self.key, *(total / count for total in totals))

    def copy(self) -> StatRow:
        """Return a row with the same totals."""
        row = StatRow(self.axis, self.op, self.codec, self.reason)
        row.add(self)
        return row

    def add(self, other: StatRow) -> None:
        """Add another row's totals to this one."""
        self.calls += other.calls
        self.raw_bytes += other.raw_bytes
        self.plain_bytes += other.plain_bytes
        self.wire_bytes += other.wire_bytes
        self.shared_bytes += other.shared_bytes
        self.between_bytes += other.between_bytes
        self.encode_seconds += other.encode_seconds
        self.wire_seconds += other.wire_seconds
        self.decode_seconds += other.decode_seconds

    def subtract(self, other: StatRow) -> None:
        """Subtract another row's totals."""
        self.calls -= other.calls
        self.raw_bytes -= other.raw_bytes
        self.plain_bytes -= other.plain_bytes
        self.wire_bytes -= other.wire_bytes
        self.shared_bytes -= other.shared_bytes
        self.between_bytes -= other.between_bytes
        self.encode_seconds -= other.encode_seconds
        self.wire_seconds -= other.wire_seconds
        self.decode_seconds -= other.decode_seconds


class CallPart(NamedTuple):
    """Part of an operation that is counted as a kind of its own: a hook's parameters of one codec and reason."""

    codec: str
    reason: str
    calls: int
    elements: int


def share_out(total: StatRow, kinds: Sequence[CallPart]) -> list[StatRow]:
    """Return rows of an operation's parts, shared out by elements; bytes and seconds sum to the operation's.

    The table of a hook and the report of its trace both count by it, so that they have the same numbers.

    Args:
        total: totals of the operation.
        kinds: its parts, at least one.
    """
    elements = 0
    for kind in kinds:
        elements += kind.elements
    rows: list[StatRow] = []
    before, at = None, 0
    for number, kind in enumerate(kinds, 1):
        at += kind.elements
        share = at / elements if elements else number / len(kinds)
        until = StatRow(total.axis, total.op, kind.codec, kind.reason, kind.calls)
        until.raw_bytes = round(total.raw_bytes * share)
        until.plain_bytes = round(total.plain_bytes * share)
        until.wire_bytes = round(total.wire_bytes * share)
        until.shared_bytes = round(total.shared_bytes * share)
        until.between_bytes = round(total.between_bytes * share)
        until.encode_seconds = total.encode_seconds * share
        until.wire_seconds = total.wire_seconds * share
        until.decode_seconds = total.decode_seconds * share
        row = until
        if before is not None:
            row = until.copy()
            row.subtract(before)
            row.calls = kind.calls
        rows.append(row)
        before = until
    return rows


class Stats(list[StatRow]):
    """Rows of totals, and the optimizer steps in which they were counted.

    Attributes:
        steps: number and length of the steps, and how much of them their thread waited.
    """

    def __init__(self, rows: Iterable[StatRow], steps: Steps) -> None:
        super().__init__(rows)
        self.steps = steps

    def per_step(self) -> list[MeanRow]:
        """Return the rows' means of a step; none where no optimizer has stepped."""
        return [row.mean(self.steps.count) for row in self] if self.steps.count else []


class Clock:
    """Sum of the time spent inside a block, without the cost of a generator's context manager."""

    __slots__ = ("_began", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began

    def add(self, began: float, ended: float) -> None:
        """Count the interval between two times of :func:`time.perf_counter`."""
        self.seconds += ended - began


class TracedClock(Clock):
    """Clock that also records the intervals."""

    __slots__ = ("_name", "_parts")

    def __init__(self, name: str, parts: list[trace.Part]) -> None:
        super().__init__()
        self._name = name
        self._parts = parts

    def __exit__(self, *_: object) -> None:
        self.add(self._began, time.perf_counter())

    def add(self, began: float, ended: float) -> None:
        """Count and keep the interval between two times."""
        super().add(began, ended)
        self._parts.append((self._name, began, ended))


class Call(StatRow):
    """Counters of one operation while it runs; the algorithms write their bytes and seconds to it.

    Attributes:
        about: other properties that must be alike on all ranks, by name: count, dtype, root, reduction.
        began: start of the operation, by :func:`time.perf_counter`.
        carries: number of calls that it carries as one: a hook's parameters.
        kinds: parts that are counted each as a kind of its own; none where the operation is one kind.
        exchanged: numbers of elements that this rank sends to each rank and receives from each, where ranks give their
            own; None elsewhere.
        place: keys that find a traced operation in the traces of other ranks.
        memory: ``"device"`` where arrays on a device have the operation take another way than arrays in host memory,
            ``"host"`` where it takes theirs, the engine's; None where it goes the same way for both.
    """

    __slots__ = (
        "_decoding",
        "_encoding",
        "_parts",
        "_recorder",
        "about",
        "began",
        "carries",
        "exchanged",
        "kinds",
        "memory",
        "place",
    )

    def __init__(
        self,
        axis: str,
        op: str,
        codec: str,
        reason: str,
        raw_bytes: int,
        plain_bytes: int,
        about: Mapping[str, Any] = _NOTHING,
    ) -> None:
        super().__init__(axis, op, codec, reason, 1, raw_bytes, plain_bytes)
        self._recorder = trace.recorder
        # Where the compiled engine encodes and decodes, as a rule, there is nothing for Python to time.
        self._encoding: Clock | None = None
        self._decoding: Clock | None = None
        if self._recorder is not None:
            self._parts: list[trace.Part] = []
        self.about = about
        self.carries = 1
        self.kinds: Sequence[CallPart] = ()
        self.exchanged: tuple[Sequence[int], Sequence[int]] | None = None
        self.place: dict[str, Any] | None = None
        self.memory: str | None = None
        self.began = time.perf_counter()

    @property
    def traced(self) -> bool:
        """Tell whether the operation is recorded in a trace."""
        return self._recorder is not None

    def starts(self, began: float) -> None:
        """Set the start of an operation that began before this object was made; it is not traced."""
        self.began = began
        self._recorder = None

    def encoding(self) -> Clock:
        """Count the time inside as encoding."""
        if self._encoding is None:
            self._encoding = self._clock("encode")
        return self._encoding

    def decoding(self) -> Clock:
        """Count the time inside as decoding."""
        if self._decoding is None:
            self._decoding = self._clock("decode")
        return self._decoding

    def _clock(self, name: str) -> Clock:
        return Clock() if self._recorder is None else TracedClock(name, self._parts)

    def tally(self, counts: Tally, intervals: Sequence[tuple[str, float, float]]) -> None:
        """Count the work of the compiled engine."""
        wire, shared, between, encoding, decoding = counts
        self.wire_bytes += wire
        self.shared_bytes += shared
        self.between_bytes += between
        self.encode_seconds += encoding
        self.decode_seconds += decoding
        if self._recorder is not None:
            self._parts.extend(intervals)
            self._parts.sort(key=itemgetter(1))  # among the intervals of Python's encoding and decoding

    def close(self) -> None:
        """End the operation: add up its seconds, and record it where it is traced."""
        ended = time.perf_counter()
        if self._encoding is not None:
            self.encode_seconds += self._encoding.seconds
        if self._decoding is not None:
            self.decode_seconds += self._decoding.seconds
        self.wire_seconds = max(0.0, ended - self.began - self.encode_seconds - self.decode_seconds)
        if self._recorder is not None:
            root = self.about.get("root")
            place = {} if self.place is None else self.place
            more = place if root is None else place | {"root": root}
            if self.carries > 1:
                more = {**more, "calls": self.carries}
            if len(self.kinds) > 1 or (self.kinds and self.kinds[0][:2] != (self.codec, self.reason)):
                more = {**more, "kinds": [kind._asdict() for kind in self.kinds]}
            record(self._recorder, self, self.began, ended, self._parts, self.about.get("name"), more)


def record(
    recorder: trace.Recorder,
    row: StatRow,
    began: float,
    ended: float,
    parts: Sequence[trace.Part] = (),
    name: str | None = None,
    place: Mapping[str, Any] = _NOTHING,
) -> None:
    """Record one operation, whose bytes alone ``row`` holds.

    Args:
        recorder: recorder of the trace.
        row: kind and bytes of the operation.
        began, ended: times by :func:`time.perf_counter`.
        parts: intervals of encoding and decoding.
        name: name of the data that the operation carries.
        place: keys that find the operation in the traces of other ranks: ``comm``, ``n``, for a message also ``peer``
            and ``tag``, for other operations ``root`` where they have one; ``calls`` where they carry several, and
            ``kinds`` where these are counted as other kinds than the operation.
    """
    args: dict[str, Any] = {
        "axis": row.axis,
        "codec": row.codec,
        "why": row.reason,
        "bytes": row.raw_bytes,
        "uncompressed_bytes": row.plain_bytes,
        "wire_bytes": row.wire_bytes,
        "shared_bytes": row.shared_bytes,
        "between_bytes": row.between_bytes,
        **place,
    }
    if row.wire_bytes:
        args["ratio"] = round(row.plain_bytes / row.wire_bytes, 3)
    if name is not None:
        args["name"] = name
    recorder.operation(row.axis, row.op, began, ended, parts, args)


class StatTable:
    """Table of statistics by kind; safe to use from several threads."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str, str, str], StatRow] = {}
        self._lock = threading.Lock()

    def add(self, call: Call) -> None:
        """Close a call and add it to the totals of its kind."""
        call.close()
        key = (call.axis, call.op, call.codec, call.reason)
        with self._lock:
            row = self._rows.get(key)
            if row is None:
                row = self._rows[key] = StatRow(*key)
            row.add(call)

    def row(self, call: Call) -> StatRow:
        """Return the row of totals for a call's kind."""
        with self._lock:
            row = self._rows.get(call.key)
            if row is None:
                row = self._rows[call.key] = StatRow(*call.key)
            return row

    def count(
        self,
        row: StatRow,
        calls: int,
        raw: int,
        plain: int,
        seconds: float,
        tally: Tally | None = None,
        between: int = 0,
    ) -> None:
        """Count operations in ``row``, one of this table's.

        Args:
            row: row of the operations' kind.
            calls: number of operations.
            raw, plain: raw and plain bytes of each operation.
            seconds: seconds of all operations together.
            tally: work of the engine in all; None where MPI sent ``plain`` bytes in each.
            between: bytes in all that MPI sent to other hosts.
        """
        wire, shared, between, encoding, decoding = tally or (calls * plain, 0, between, 0.0, 0.0)
        with self._lock:
            row.calls += calls
            row.raw_bytes += calls * raw
            row.plain_bytes += calls * plain
            row.wire_bytes += wire
            row.shared_bytes += shared
            row.between_bytes += between
            row.encode_seconds += encoding
            row.decode_seconds += decoding
            row.wire_seconds += max(0.0, seconds - encoding - decoding)

    def count_all(self, row: StatRow, calls: int, raw: int, plain: int, seconds: float, between: int) -> None:
        """Count operations of MPI's in ``row``; ``raw``, ``plain`` and ``between`` are the bytes of all together."""
        with self._lock:
            row.calls += calls
            row.raw_bytes += raw
            row.plain_bytes += plain
            row.wire_bytes += plain
            row.between_bytes += between
            row.wire_seconds += seconds

    def rows(self) -> list[StatRow]:
        """Return copies of the rows, sorted by axis, operation and codec."""
        with self._lock:
            return [row.copy() for _, row in sorted(self._rows.items()) if row.calls]


def leaving(nbytes: int, away: Sequence[bool], peer: int | None = None) -> int:
    """Return the bytes of one of MPI's operations that leave a host.

    Args:
        nbytes: bytes that this rank sends.
        away: for each rank, whether it is on another host.
        peer: rank that gets them, negative for none; None for all ranks, by a way that MPI chooses.
    """
    if peer is not None:
        return nbytes if 0 <= peer < len(away) and away[peer] else 0
    return nbytes * sum(away) // max(1, len(away) - 1)


@functools.lru_cache(4096)
def allreduce_bytes(nbytes: int, ranks: int) -> int:
    """Return the bytes that a rank sends in an uncompressed all-reduce by the usual algorithms."""
    return 2 * (ranks - 1) * nbytes // ranks


def merge(tables: Iterable[Iterable[StatRow]]) -> list[StatRow]:
    """Sum the rows of several communicators by kind."""
    merged: dict[tuple[str, str, str, str], StatRow] = {}
    for row in (row for table in tables for row in table):
        key = row.key
        if key in merged:
            merged[key].add(row)
        else:
            merged[key] = row.copy()
    return [row for _, row in sorted(merged.items())]


def since(before: Iterable[StatRow], now: Iterable[StatRow]) -> list[StatRow]:
    """Return the rows ``now`` minus those ``before``, without kinds that have no new call."""
    old = {row.key: row for row in before}
    new = [row.copy() for row in now]
    for row in new:
        if row.key in old:
            row.subtract(old[row.key])
    return [row for row in new if row.calls]

"""Read the traces of a run's ranks, and check that they are from one run and complete."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hybridcomp import trace, variables
from hybridcomp.errors import ConfigError
from hybridcomp.intervals import Interval

MESSAGES = ("send", "recv")
_SHOWN = 6  # ranks that a message names


@dataclass
class TracedOperation:
    """An operation of one rank. Times are seconds since the first rank's trace began.

    Attributes:
        axis, op: mesh axis of the communicator, and kind of operation.
        began, ended: start and end.
        encodes, decodes: intervals of encoding and decoding, in order of time.
        comm: key of the communicator; the same on all ranks. None where the trace does not name it.
        n: number of the operation on its communicator, the same on all ranks; collectives and messages count apart.
        peer, tag: other rank of a message, by its number in the job, and the message's tag.
        root: root's rank in the communicator.
        until: time until which this rank could only wait for others.
    """

    axis: str
    op: str
    began: float
    ended: float
    encodes: list[Interval] = field(default_factory=list)
    decodes: list[Interval] = field(default_factory=list)
    comm: str | None = None
    n: int = 0
    peer: int | None = None
    tag: int = 0
    root: int | None = None
    until: float = 0.0

    @property
    def ready(self) -> float:
        """Return when this rank had something to send: at the end of its first encoding, if it begins with one."""
        first = self.encodes[0] if self.encodes else None
        if first is None or (self.decodes and self.decodes[0][0] < first[0]):
            return self.began
        return first[1]


@dataclass(frozen=True)
class Wait:
    """Time in which a thread of the program was in an operation, and could not compute.

    Attributes:
        began, ended: start and end in seconds.
        axis, comm, n, message: the operation; ``comm`` is None where the thread waited for whatever was in flight.
    """

    began: float
    ended: float
    axis: str
    comm: str | None
    n: int
    message: bool


@dataclass(frozen=True)
class RankTrace:
    """Record of one rank.

    Attributes:
        path: file of the trace.
        rank, host, clock: place of the process; ``clock`` is equal where clocks are the same.
        groups: ranks of each communicator.
        operations, waits: sorted by start.
        steps: intervals of the steps, by the source that reported their ends.
        lost: number of spans that the trace had no room for.
    """

    path: Path
    rank: int
    host: str
    clock: str
    groups: Mapping[str, tuple[int, ...]]
    operations: list[TracedOperation]
    waits: list[Wait]
    steps: Mapping[str, list[Interval]]
    lost: int

    def later(self, seconds: float) -> RankTrace:
        """Return the trace with its times so many seconds later."""
        if not seconds:
            return self

        def moved(given: list[Interval]) -> list[Interval]:
            return [(a + seconds, b + seconds) for a, b in given]

        return replace(
            self,
            operations=[
                replace(
                    one,
                    began=one.began + seconds,
                    ended=one.ended + seconds,
                    encodes=moved(one.encodes),
                    decodes=moved(one.decodes),
                )
                for one in self.operations
            ],
            waits=[replace(one, began=one.began + seconds, ended=one.ended + seconds) for one in self.waits],
            steps={by: moved(steps) for by, steps in self.steps.items()},
        )


def read(folder: Path) -> list[RankTrace]:
    """Read the traces of a folder, sorted by rank.

    Raises:
        ConfigError: a file is cut off or no trace of ours, two are from one rank, or they are from different runs.
    """
    found = [(path, *trace.read(path)) for path in trace.files(folder)]
    if not found:
        raise ConfigError(f"{folder} has no traces: run the program with {variables.TRACE}={folder}")
    origin = min(about["started_ns"] for _, about, _ in found)
    ranks: dict[int, RankTrace] = {}
    for path, about, events in found:
        try:
            one = _rank_trace(path, about, events, (about["started_ns"] - origin) / 1e9)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} is damaged: {type(error).__name__}: {error}") from error
        if one.rank in ranks:
            raise ConfigError(f"{path} and {ranks[one.rank].path} are both of rank {one.rank}: of two runs")
        ranks[one.rank] = one
    result = [ranks[rank] for rank in sorted(ranks)]
    _check_one_run(result)
    return result


def check_complete(folder: Path, ranks: Sequence[RankTrace]) -> None:
    """Check that the traces of all ranks are there.

    Raises:
        ConfigError: some are missing.
    """
    here = {one.rank for one in ranks}
    missing = sorted({r for one in ranks for group in one.groups.values() for r in group if r >= 0} - here)
    if missing:
        raise ConfigError(
            f"{folder} has traces of {_names(sorted(here))} but not of {_names(missing)}, which took part: "
            "what a rank waited for is seen with the traces of all"
        )


def _names(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
    return f"rank{'s' * (len(ranks) != 1)} {shown}"


def _check_one_run(ranks: Sequence[RankTrace]) -> None:
    for one in ranks:
        for other in ranks:
            both = {key for key, group in one.groups.items() if other.rank in group}
            theirs = {key for key, group in other.groups.items() if one.rank in group}
            if both and theirs and not both & theirs:
                raise ConfigError(
                    f"{one.path} and {other.path} are of different runs: ranks {one.rank} and {other.rank} have "
                    "no communicator in common; take a new folder for each run"
                )


def _rank_trace(path: Path, about: Mapping[str, Any], events: list[trace.Event], late: float) -> RankTrace:
    operations: list[TracedOperation] = []
    waits: list[Wait] = []
    steps: dict[str, list[Interval]] = {}
    for category, began, ended, event in _spans(events, late):
        args = event.get("args", {})
        if category == "operation":
            operations.append(_operation(event["name"], began, ended, args))
        elif category in ("encode", "decode") and operations:
            of = operations[-1]
            (of.encodes if category == "encode" else of.decodes).append((began, ended))
        elif category == "wait":
            message = args.get("op") in MESSAGES
            waits.append(
                Wait(began, ended, args.get("axis", ""), args.get("comm"), int(args.get("n", 0)), message)
            )
        elif category == "step":
            steps.setdefault(str(args["by"]), []).append((began, ended))
    host = str(about.get("host", ""))
    return RankTrace(
        path,
        about["rank"],
        host,
        str(about.get("clock", host)),
        {str(one["comm"]): tuple(map(int, one["ranks"])) for one in about.get("groups", [])},
        sorted(operations, key=lambda o: o.began),
        sorted(waits, key=lambda w: w.began),
        steps,
        about["spans_lost"],
    )


def _spans(events: list[trace.Event], late: float) -> Iterator[tuple[str, float, float, dict[str, Any]]]:
    """Yield category, beginning and end of each span; the parts of an operation follow it."""
    for event in events:
        if event.get("ph") == "X":
            ts, seconds = float(event["ts"]), float(event["dur"])
            if not (math.isfinite(ts) and math.isfinite(seconds) and seconds >= 0):
                raise ValueError(f"a span of {seconds} us at {ts}")
            if not isinstance(event.get("args", {}), dict):
                raise TypeError(f"a span with args {event['args']!r}")
            began = late + ts / 1e6
            yield str(event.get("cat")), began, began + seconds / 1e6, event


def _operation(op: str, began: float, ended: float, args: Mapping[str, Any]) -> TracedOperation:
    for name in ("codec", "why", "bytes", "uncompressed_bytes", "wire_bytes"):
        args[name]
    if not isinstance(args.get("calls", 1), int):
        raise TypeError(f"an operation that carries {args['calls']!r} calls")
    peer, root = args.get("peer"), args.get("root")
    return TracedOperation(
        str(args["axis"]),
        op,
        began,
        ended,
        comm=args.get("comm"),
        n=int(args.get("n", 0)),
        peer=None if peer is None else int(peer),
        tag=int(args.get("tag", 0)),
        root=None if root is None else int(root),
        until=began,
    )

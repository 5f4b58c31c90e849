"""Record operations and their times as a Chrome trace: https://ui.perfetto.dev and chrome://tracing open it.

``HYBRIDCOMP_TRACE=FOLDER`` has every rank write ``FOLDER/trace.RANK.json`` at exit; :func:`start` and :func:`stop` do
so for a part of a program. :func:`merge` makes one file of those of all ranks, by the wall clock that each noted at
its start.

A rank is a process of the trace. Its tracks are the axes of its communicators; operations of an axis that overlap are
on tracks beside each other. Within an operation are its spans of encoding and decoding, and of the wire, which is the
rest. Beside them are tracks of steps, and of the times in which a thread of the program waited for an operation.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import threading
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hybridcomp import variables
from hybridcomp.errors import ConfigError, printable
from hybridcomp.files import checked, decoded, listed, parse_json, read_bytes, tell_failure, writing

STEPS_BY = ("hybridcomp train", "the program", "an optimizer")  # the most exact first
WAITS = "waits"  # name of the track
MERGED = "trace.json"
LIMIT = 1_000_000  # spans: some 200 MB of memory, and as much of a file
_PATTERN = "trace.*.json"
_LEAST_WIRE_NS = 2_000  # shorter times lie between two encodings, and are on no wire

Part = tuple[str, float, float]  # name, start and end by time.perf_counter()
Event = dict[str, Any]


class _Span(NamedTuple):
    track: str
    name: str
    began: float
    ended: float
    parts: Sequence[Part] | None  # None: shares its track with spans that lie within it
    args: Mapping[str, Any]
    category: str = "span"


class Recorder:
    """Recorder of the spans of this process.

    All times are :func:`time.perf_counter`'s, in seconds.

    Attributes:
        folder: folder that they are written to.
        limit: number of spans that are kept; later ones are only counted.
    """

    def __init__(self, folder: Path, limit: int = LIMIT) -> None:
        self.folder = folder
        self.limit = limit
        self._spans: list[_Span] = []
        self._kept = 0
        self._lost = 0
        self._full_at = 0.0
        self._groups: dict[Hashable, dict[str, Any]] = {}
        self._step_ends: dict[str, float] = {}
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._started_ns = time.time_ns()
        self._origin = time.perf_counter()

    def span(self, track: str, name: str, began: float, ended: float, /, **args: Any) -> None:
        """Record a span; within it, its track shows the spans that lie in its time.

        Args:
            track: row that shows it.
            name: name of the span.
            began, ended: start and end in seconds.
            args: values shown beside it, in JSON's types.
        """
        self._keep(_Span(track, name, began, ended, None, args), 1)

    def operation(
        self,
        track: str,
        name: str,
        began: float,
        ended: float,
        parts: Sequence[Part],
        args: Mapping[str, Any],
    ) -> None:
        """Record a span, which shares its row with none that it overlaps, and its parts in order of time.

        Times outside all parts are shown as ``wire``.
        """
        self._keep(_Span(track, name, began, ended, parts, args, "operation"), 2 + len(parts))

    def waited(self, name: str, began: float, ended: float, /, **args: Any) -> None:
        """Record that a thread of the program has waited for an operation, which ``args`` name."""
        self._keep(_Span(WAITS, name, began, ended, None, args, "wait"), 1)

    def step(self, by: str, began: float | None = None) -> None:
        """Record a training step that ends now.

        Args:
            by: source of the step; ``hybridcomp report`` takes the first of :data:`STEPS_BY` that a trace has.
            began: start in seconds; None is the end of the step before, by the same source.
        """
        ended = time.perf_counter()
        if began is None:
            began = self._step_ends.get(by, self._origin)
        self._step_ends[by] = ended
        self._keep(_Span(f"steps, by {by}", "step", began, ended, None, {"by": by}, "step"), 1)

    def group(self, key: int, ranks: Sequence[int]) -> None:
        """Note the ranks of a communicator, in its order, by their numbers in the job."""
        if key not in self._groups:
            self._groups[key] = {"comm": f"{key:x}", "ranks": list(ranks)}

    def _keep(self, span: _Span, count: int) -> None:
        with self._lock:
            if self._lost or self._kept + count > self.limit:
                self._full_at = self._full_at or span.ended
                self._lost += count
            else:
                self._spans.append(span)
                self._kept += count

    def write(self, rank: int) -> Path:
        """Write the recorded spans; return the file's path.

        Raises:
            ConfigError: the file cannot be written.
        """
        path = self.folder / f"trace.{rank}.json"
        about = {"rank": rank, "host": socket.gethostname(), "started_ns": self._started_ns}
        about |= {"clock": _clock(), "groups": list(self._groups.values())}
        with self._lock:
            write_events(path, self._events(rank), about | {"spans_lost": self._lost})
        return path

    def in_this_process(self) -> bool:
        """Tell whether this process made it, and not one that it was forked from."""
        return os.getpid() == self._pid

    # -- to events -----------------------------------------------------------------------------------

    def _events(self, rank: int) -> Iterator[Event]:
        yield from named("process_name", rank, 0, name=f"rank {rank} ({socket.gethostname()})")
        yield from named("process_sort_index", rank, 0, sort_index=rank)
        by_track: dict[str, list[_Span]] = {}
        for span in self._spans:
            by_track.setdefault(span.track, []).append(span)
        tid = 0
        for track, spans in sorted(by_track.items()):
            lanes = _Lanes()
            for span in sorted(spans, key=lambda s: (s.began, -s.ended)):
                lane = lanes.place(span)
                yield from self._span_events(span, {"pid": rank, "tid": tid + lane})
            for lane in range(len(lanes)):
                label = track if lane == 0 else f"{track} ({lane + 1})"
                yield from named("thread_name", rank, tid + lane, name=label)
                yield from named("thread_sort_index", rank, tid + lane, sort_index=tid + lane)
            tid += len(lanes)
        if self._lost:
            note = f"the trace is full: {self._lost} spans from here on are not in it"
            yield {
                "ph": "i",
                "s": "p",
                "name": note,
                "ts": self._ns(self._full_at) / 1e3,
                "pid": rank,
                "tid": 0,
            }

    def _span_events(self, span: _Span, where: Event) -> Iterator[Event]:
        began, ended = self._ns(span.began), self._ns(span.ended)
        yield _complete(span.name, span.category, began, ended, where) | {"args": dict(span.args)}
        if span.parts is None:
            return
        at = began
        for name, part_began, part_ended in span.parts:
            start, end = max(self._ns(part_began), at), min(self._ns(part_ended), ended)
            if end < start:
                continue
            if start - at >= _LEAST_WIRE_NS:
                yield _complete("wire", "wire", at, start, where)
            yield _complete(name, name, start, end, where)
            at = end
        if ended - at >= _LEAST_WIRE_NS or at == began:
            yield _complete("wire", "wire", at, ended, where)

    def _ns(self, seconds: float) -> int:
        return max(0, round((seconds - self._origin) * 1e9))


class _Lanes:
    """Rows of one track, each with its open spans; spans are placed in the order in which they begin."""

    def __init__(self) -> None:
        self._open: list[list[_Span]] = []

    def place(self, span: _Span) -> int:
        """Return the number of the first row with room for a span."""
        for lane, stack in enumerate(self._open):
            while stack and stack[-1].ended <= span.began:
                stack.pop()
            inside = stack and stack[-1].parts is None and span.parts is None
            if not stack or (inside and span.ended <= stack[-1].ended):
                stack.append(span)
                return lane
        self._open.append([span])
        return len(self._open) - 1

    def __len__(self) -> int:
        return len(self._open)


def _clock() -> str:
    """Return an identity that processes with the same clock share: that of one running kernel."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def _complete(name: str, category: str, began_ns: int, ended_ns: int, where: Event) -> Event:
    """Return a "complete" event; its times are in microseconds."""
    times = {"ts": began_ns / 1e3, "dur": (ended_ns - began_ns) / 1e3}
    return {"ph": "X", "name": name, "cat": category, **times, **where}


def named(what: str, pid: int, tid: int, **args: Any) -> Iterator[Event]:
    """Yield the event that names or orders a process or a thread: ``process_name``, ``thread_sort_index``, ..."""
    yield {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def write_events(path: Path, events: Iterable[Event], about: Mapping[str, Any]) -> None:
    """Write events as a Chrome trace, whole or not at all.

    Args:
        path: path of the file, which https://ui.perfetto.dev opens.
        events: events of all processes.
        about: facts that the trace holds about itself.

    Raises:
        ConfigError: the file cannot be written.
    """
    with writing(path, what="the trace") as file:
        head = '{"displayTimeUnit": "ms", "otherData": ' + json.dumps(about) + ', "traceEvents": ['
        file.write(head.encode())
        comma = "\n"
        for event in events:
            try:
                text = comma + json.dumps(event, separators=(",", ":"))
            except (TypeError, ValueError, RecursionError) as error:
                raise ConfigError(f"cannot write the trace {printable(path)}: {error}") from error
            file.write(text.encode())
            comma = ",\n"
        file.write(b"\n]}\n")


# -- this process's recorder -----------------------------------------------------------------------------

recorder: Recorder | None = None  # None while nothing is recorded; hot paths read it directly
_rank = 0
_asked = False


def active() -> Recorder | None:
    """Return the recorder, None while nothing is recorded."""
    return recorder


def start(folder: str | os.PathLike[str], *, limit: int = LIMIT) -> Recorder:
    """Begin to record; :func:`stop` or the exit writes ``trace.RANK.json`` to ``folder``.

    Args:
        folder: folder to write to; made if it does not exist.
        limit: number of spans that are kept, about 200 bytes each; the file says how many more there were.

    Raises:
        RuntimeError: a trace is being recorded.
        ConfigError: the folder cannot be made.
        ValueError: ``limit`` is less than 1.
    """
    global recorder  # noqa: PLW0603  (one per process by nature)
    if recorder is not None:
        raise RuntimeError(f"a trace is being recorded for {recorder.folder}: stop it first")
    if limit < 1:
        raise ValueError(f"limit must be at least 1 span, not {limit}")
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {path} for a trace: {error.strerror}") from error
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)
    recorder = Recorder(path, limit)
    return recorder


def stop() -> Path | None:
    """Stop recording and write the file; return its path, None if nothing was being recorded.

    Raises:
        ConfigError: the file cannot be written.
    """
    global recorder
    ended, recorder = recorder, None
    return ended.write(_rank) if ended is not None and ended.in_this_process() else None


def step_ended() -> None:
    """Say that a training step ends here, if a trace is being recorded: the next one begins.

    ``hct.advance_step()`` says so, too. In programs without it, a step ends after the step of a torch optimizer.
    """
    if recorder is not None:
        recorder.step("the program")


def joined(rank: int) -> None:
    """Set the rank of this process.

    The first call that succeeds reads ``HYBRIDCOMP_TRACE``, and begins a trace if it is set.

    Raises:
        ConfigError: the folder in it cannot be made.
    """
    global _rank, _asked  # noqa: PLW0603
    _rank = rank
    if not _asked:
        folder = variables.TRACE.read()
        if folder and recorder is None:
            start(folder)
        _asked = True


def _at_exit() -> None:
    tell_failure(stop)


def files(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the traces of single ranks in a folder."""
    return listed(folder, _PATTERN)


def merge(folder: str | os.PathLike[str], late_ns: Mapping[int, float] | None = None) -> Path:
    """Write one trace from those of all ranks in ``folder``; return its path, ``trace.json`` beside them.

    Args:
        folder: folder with the traces.
        late_ns: nanoseconds to add to the times of a rank, whose clock is behind by as much.

    Raises:
        ConfigError: there are none, one is no trace of ours, or the file cannot be written.
    """
    found = [(path, *read(path)) for path in files(folder)]
    if not found:
        raise ConfigError(f"{folder} has no trace.RANK.json: run the program with {variables.TRACE}={folder}")
    ranks = sorted(found, key=lambda one: one[1]["rank"])
    added = {} if late_ns is None else late_ns
    starts = [about["started_ns"] + round(added.get(about["rank"], 0.0)) for _, about, _ in ranks]
    origin = min(starts)

    def events() -> Iterator[Event]:
        for (_, _, own), started in zip(ranks, starts, strict=True):
            late = (started - origin) / 1e3
            for event in own:
                yield event | {"ts": event["ts"] + late} if "ts" in event else event

    merged = Path(folder) / MERGED
    lost = sum(about["spans_lost"] for _, about, _ in ranks)
    about = {"ranks": [one["rank"] for _, one, _ in ranks], "started_ns": origin, "spans_lost": lost}
    write_events(merged, events(), about)
    return merged


_WHOLE = {
    "otherData": {
        **dict.fromkeys(("rank", "started_ns", "spans_lost"), int),
        **dict.fromkeys(("host?", "clock?"), str),
        "groups?": list,
    },
    "traceEvents": list,
}
_GROUP = {"comm": str, "ranks": [int]}
_EVENT = {"ph": str, "ts?": float, "args?": dict}
_SPAN = {"name": str, "cat": str, "ts": float, "dur": float, "args?": dict}
_OF_CATEGORY: dict[str, Any] = {
    "operation": {
        "args": {
            **dict.fromkeys(("axis", "codec", "why"), str),
            **dict.fromkeys(("bytes", "uncompressed_bytes", "wire_bytes"), int),
            **dict.fromkeys(("shared_bytes?", "between_bytes?", "calls?", "n?", "tag?"), int),
            **dict.fromkeys(("peer?", "root?"), int | None),
            "comm?": str | None,
            "kinds?": [{"codec": str, "reason": str, "calls": int, "elements": int}],
        }
    },
    "wait": {"args?": {"op?": str, "axis?": str, "n?": int, "comm?": str | None}},
    "step": {"args": {"by": str}},
}
_MOST_US = 1e15  # microseconds in a time, at most: thirty years


def read(path: Path) -> tuple[dict[str, Any], list[Event]]:
    """Return a rank trace's facts about itself, and its events.

    Raises:
        ConfigError: the file cannot be read, is cut off, or is no trace of ours; names the place in it.
    """
    data = read_bytes(path, what="the trace")
    name, foreign = printable(path), f"{printable(path)} is no trace of hybridcomp"
    cut_off = f"{name} is cut off, or damaged"
    started = data.startswith(b'{"displayTimeUnit"')
    whole = parse_json(decoded(data, name), cut_off if started else foreign)
    checked(whole, _WHOLE, foreign)
    about, events = whole["otherData"], whole["traceEvents"]
    for number, group in enumerate(about.get("groups", ())):
        checked(group, _GROUP, f"{name} is damaged: otherData.groups", number)
    where = f"{name} is damaged: traceEvents"
    for number, event in enumerate(events):
        if not isinstance(event, dict) or event.get("ph") != "X":
            checked(event, _EVENT, where, number)
            continue
        checked(event, _SPAN, where, number)
        if not (-_MOST_US < event["ts"] < _MOST_US and 0 <= event["dur"] < _MOST_US):
            raise ConfigError(f"{where}[{number}]: a span of {event['dur']} us at {event['ts']} us")
        kind = _OF_CATEGORY.get(event["cat"])
        if kind is not None:
            checked(event, kind, where, number)
    return about, events

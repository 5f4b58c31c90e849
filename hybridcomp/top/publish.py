"""Keep this process's file: the totals of its communicators, and their operations in flight.

A thread of its own looks once a second whether somebody watches, and writes only then. It starts with the first
communicator. All its errors are passed over: a job must not fail by being looked at.
"""

from __future__ import annotations

import _thread
import atexit
import functools
import os
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from heapq import nsmallest
from pathlib import Path
from typing import NamedTuple, Protocol

from hybridcomp.steps import NO_STEPS, clock
from hybridcomp.top.folder import WATCHED, file_name, machine, make_folder, started_at, switched_off
from hybridcomp.top.read import tidy
from hybridcomp.top.snapshot import AxisTotals, CommunicatorState, InFlight, Snapshot, to_bytes, total

_LOOK_SECONDS = 1.0  # seconds between looks for watchers
_WRITE_SECONDS = 0.5  # seconds between writes while somebody watches
_WATCHED_SECONDS = 10.0  # seconds for which a touch of the file counts as watching
_STOP_SECONDS = 1.0  # seconds that the exit waits: the folder may be on a disk that does not answer
_MOST_AXES, _MOST_GROUPS, _MOST_IN_FLIGHT = 64, 256, 64
_MOST_TEXT = 64
_MESSAGES = ("send", "recv")  # operations in which not all ranks of a communicator take part


class Row(Protocol):
    """Totals of a kind of operation; see :class:`~hybridcomp.collectives.stats.StatRow`."""

    axis: str
    op: str
    calls: int
    plain_bytes: int
    wire_bytes: int
    shared_bytes: int
    between_bytes: int
    encode_seconds: float
    wire_seconds: float
    decode_seconds: float


Rows = Callable[[], Sequence[Row]]


class Activity(NamedTuple):
    """State of a communicator.

    Attributes:
        key: number that is the same on all its ranks, and no other communicator's.
        axis: mesh axis.
        size: number of ranks.
        latest: number of the latest collective that this rank has started.
        rows: totals by kind of operation.
        in_flight: operations in flight.
    """

    key: int
    axis: str
    size: int
    latest: int
    rows: Sequence[Row]
    in_flight: Sequence[InFlight]


class Source(Protocol):
    """Source of a communicator's state."""

    def activity(self) -> Activity:
        """Return the communicator's state; called by a thread of its own."""


class Entry:
    """Communicator that is shown but not kept alive; its totals are kept until they are added to the past ones."""

    def __init__(self, source: Source, rows: Rows) -> None:
        self.source = weakref.ref(source)
        self.rows = rows
        self.past = False


class Publisher:
    """Writer of this process's file, with its thread.

    Nothing here takes a lock: communicators are made and freed in threads, and in signals' handlers, that must not
    wait for a disk.
    """

    def __init__(self, rank: int, size: int) -> None:
        """Set up the file of a rank in a job of so many ranks."""
        self._rank, self._size = rank, size
        self._since = time.time()
        self._entries: dict[Entry, None] = {}
        self._ended: deque[Entry] = deque()
        self._past: dict[str, AxisTotals] = {}
        self._stopping = threading.Event()
        self._done = threading.Event()
        self._thread: int | None = None
        self._file = (0, 0)
        self._seen: int | None = None  # time of the last touch by a watcher, by the file system
        self._until = 0.0

    def start(self) -> None:
        """Start the thread, if there is one to be had; does not wait until it runs, as threading does."""
        with suppress(RuntimeError):
            self._thread = _thread.start_new_thread(self._run, ())

    def add(self, entry: Entry) -> None:
        """Show a communicator."""
        self._entries[entry] = None

    def remove(self, entry: Entry) -> None:
        """Keep only the totals of a communicator that ends."""
        if self._entries.pop(entry, entry) is None:  # one caller alone takes it out, and hands it on
            self._ended.append(entry)

    def stop(self) -> None:
        """End the thread, which removes the file."""
        self._stopping.set()
        if self._thread is not None:
            self._done.wait(_STOP_SECONDS)

    # -- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        with suppress(Exception):
            self._keep()
        self._done.set()

    def _keep(self) -> None:
        """Keep the file until the process ends."""
        path = watched = ""
        pause = 0.0
        while not self._stopping.wait(pause):
            with suppress(Exception):
                if not os.path.exists(path):  # not yet, or no longer: some systems remove old files
                    folder = make_folder()
                    if folder is None:
                        return
                    path = str(folder / file_name(self._about.pid, self._about.started))
                    watched = str(folder / WATCHED)
                    self._create(path)
                    tidy(folder)
                elif self._watched(watched):
                    self._write(path)
                else:
                    self._living()
            pause = _WRITE_SECONDS if time.monotonic() < self._until else _LOOK_SECONDS
        with suppress(OSError):
            os.unlink(path)

    def _watched(self, path: str) -> bool:
        """Tell whether somebody watches, by a change of the file's time: clocks of hosts and file systems differ."""
        touched = 0
        with suppress(FileNotFoundError):
            touched = os.stat(path).st_mtime_ns
        if touched != self._seen and self._seen is not None:
            self._until = time.monotonic() + _WATCHED_SECONDS
        self._seen = touched
        return time.monotonic() < self._until

    def _create(self, path: str) -> None:
        """Create the file in the place of any other one there."""
        with suppress(FileNotFoundError):
            os.unlink(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(path, flags, 0o600)
        try:
            self._file = _identity(file)
            os.pwrite(file, to_bytes(self.snapshot()), 0)
        finally:
            os.close(file)

    def _write(self, path: str) -> None:
        """Write into the existing file: to replace it would take a hundred times as long on some disks."""
        file = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if _identity(file) == self._file:
                os.pwrite(file, to_bytes(self.snapshot()), 0)
        finally:
            os.close(file)

    # -- contents of the file ------------------------------------------------------------------------

    @functools.cached_property
    def _about(self) -> Snapshot:
        """Return the constant part of a snapshot; the thread finds it out, where errors do not matter."""
        pid = os.getpid()
        return Snapshot(
            rank=self._rank,
            size=self._size,
            pid=pid,
            started=started_at(pid),
            host=socket.gethostname(),
            machine=machine(),
            program=_program(),
            launcher=_launcher(),
            since=self._since,
            at=0.0,
            steps=NO_STEPS,
            axes=(),
            groups=(),
            in_flight=(),
            unlisted=0,
        )

    def snapshot(self) -> Snapshot:
        """Return a snapshot of this process now."""
        axes: dict[str, AxisTotals] = {}
        groups: list[CommunicatorState] = []
        in_flight: list[InFlight] = []
        for source in self._living():
            state = None
            with suppress(Exception):  # the others are shown even so
                state = source.activity()
            if state is None:
                continue
            _add(axes, state.rows)
            waited = sum(row.wire_seconds for row in state.rows if row.op not in _MESSAGES)
            axis = state.axis[:_MOST_TEXT]
            groups.append(CommunicatorState(f"{state.key:x}", axis, state.size, state.latest, waited))
            in_flight += state.in_flight
        for axis, totals in self._past.items():
            axes[axis] = total([axes[axis], totals]) if axis in axes else totals
        if len(groups) > _MOST_GROUPS:  # keep those with something in flight, then the latest
            busy = {one.key for one in in_flight}
            groups = sorted(groups, key=lambda group: group.key in busy)[-_MOST_GROUPS:]
        shown = nsmallest(_MOST_IN_FLIGHT, in_flight, key=lambda one: one.since)
        return replace(
            self._about,
            at=time.time(),
            steps=clock.totals,
            axes=tuple(sorted(axes.values(), key=lambda one: -one.plain_bytes)[:_MOST_AXES]),
            groups=tuple(groups),
            in_flight=tuple(shown),
            unlisted=len(in_flight) - len(shown),
        )

    def _living(self) -> list[Source]:
        """Return the living communicators; add the totals of the others to the past ones."""
        entries = list(self._entries)
        for entry in entries:
            if entry.source() is None:
                self.remove(entry)
        while self._ended:
            ended = self._ended.popleft()
            ended.past = True
            _add(self._past, ended.rows())
        found = (entry.source() for entry in entries if not entry.past)
        return [source for source in found if source is not None]


def _identity(file: int) -> tuple[int, int]:
    info = os.fstat(file)
    return (info.st_dev, info.st_ino)


def _add(axes: dict[str, AxisTotals], rows: Iterable[Row]) -> None:
    for row in rows:
        axis = row.axis[:_MOST_TEXT]
        one = AxisTotals(
            axis,
            row.calls,
            row.plain_bytes,
            row.wire_bytes,
            row.shared_bytes,
            row.between_bytes,
            row.encode_seconds,
            row.wire_seconds,
            row.decode_seconds,
        )
        axes[axis] = total([axes[axis], one]) if axis in axes else one


def _program() -> str:
    """Return the command line of this process, without folders."""
    name, *arguments = sys.argv or [""]
    path = Path(name)
    called = path.parent.name if path.name == "__main__.py" else path.name  # for python -m
    return " ".join([called or "python", *arguments])[: 4 * _MOST_TEXT]


def _launcher() -> str:
    job, step = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_STEP_ID", "")
    return f"{job}.{step}"[:_MOST_TEXT] if job and step else ""


# -- this process ---------------------------------------------------------------------------------------

_publishers: dict[str, Publisher] = {}  # one, of this process
_OWN = "own"


def show(source: Source, rows: Rows, rank: int, size: int) -> Entry | None:
    """Show a communicator to watchers, unless ``HYBRIDCOMP_TOP=0``.

    Args:
        source: source of its state; not kept alive.
        rows: function that returns its totals, also once it is gone.
        rank, size: rank of this process and number of ranks in its job.

    Returns:
        The entry that :func:`hide` takes.
    """
    if switched_off():
        return None
    entry = Entry(source, rows)
    publisher = _publishers.get(_OWN)
    if publisher is None:
        made = Publisher(rank, size)
        publisher = _publishers.setdefault(_OWN, made)
        if publisher is made:
            made.add(entry)
            atexit.register(made.stop)
            made.start()
            return entry
    publisher.add(entry)
    return entry


def hide(entry: Entry | None) -> None:
    """Show only the totals of a communicator that ends."""
    publisher = _publishers.get(_OWN)
    if publisher is not None and entry is not None:
        publisher.remove(entry)


# The file belongs to the parent process.
os.register_at_fork(after_in_child=_publishers.clear)

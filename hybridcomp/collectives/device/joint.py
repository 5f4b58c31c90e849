"""Put the work of operations that travel together on one stream pair, and start it together.

Work is recorded until all operations wait. Then launches of one kernel that do not depend on each other become one
launch, over a table of their arguments (:file:`kernels/cuda/common/table.cuh`), whatever operation, message or
parameter they belong to; copies to the host follow in one order, and one event tells that all of it is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridcomp.arrays import ByteArray
from hybridcomp.collectives.device.streams import StreamPair, stream_pool
from hybridcomp.device import Argument, DeviceArray, Event, Queue, Runtime

_BLOCK = ("encode_q", "feedback_q", "decode_plain", "decode_sum")
# Kernels that have a form with a table, by module: beginnings of their names.
TABLE_FORMS: dict[str, tuple[str, ...]] = {
    "message": ("message_seal", "message_open"),
    "convert": ("copy_bytes", "convert_", "sum_"),
    "sums": ("divide_",),
    "block8": _BLOCK,
    "block4": _BLOCK,
    "block2": _BLOCK,
    "feedback": (
        "feedback_add_",
        "feedback_blend_",
        "feedback_subtract_",
        "feedback_lose_",
        "feedback_divide_",
        "feedback_commit",
        "feedback_exchange",
    ),
    "sparse_select": ("sparse_sample_", "sparse_filter_", "sparse_reach_", "sparse_search_"),
    "sparse_limit": ("sparse_limit", "sparse_mean_square_"),
    "sparse_fit": ("sparse_fit_sample_", "sparse_fit_", "sparse_begin", "sparse_refine_"),
    "sparse_write": ("sparse_count_", "sparse_write_", "sparse_seal", "sparse_place", "sparse_length"),
    "sparse_read": ("sparse_sections", "sparse_check", "sparse_scatter_", "sparse_add_"),
}
_ZEROS = 1024  # words of zeros that are made at a time
_ALIKE = 16  # operations and shards for which zeros are made at a time, where one wants many
_SHOWN = 1 << 14  # bytes that the host reads, of many operations and messages, and that are copied together
_STATUS_BYTES = 4
_TABLE_ROOM = 1 << 13  # bytes for a table beside what the host gives
_SHOWN_ALIGNMENT = 8

Kind = tuple[str, str, int, int]
"""Module, kernel, threads of a block, and bytes of shared memory; of other work, its name."""


@dataclass(slots=True, eq=False)
class _Work:
    """A launch or another piece of work on the stream.

    Attributes:
        kind: kind of work that may become one launch.
        start: function that starts it alone.
        blocks, args: of a launch.
        held: memory that must live until it is started.
        left: number of pieces before it that have not started.
        then: pieces that follow it.
    """

    kind: Kind
    start: Callable[[], None]
    blocks: int
    args: list[int]
    held: object
    left: int = 0
    then: list[_Work] = field(default_factory=list)
    started: bool = False


class JointEvent:
    """A point after work that is recorded; it comes once that has started, and the device has reached it."""

    def __init__(self, joint: Joint) -> None:
        self._joint = joint
        self._event: Event | None = None
        self._after: Callable[[], None] | None = None

    def begin(self, event: Event, after: Callable[[], None]) -> None:
        """Take the device's event, and a function to call once it has come."""
        self._event, self._after = event, after

    def done(self) -> bool:
        """Tell whether the device has reached the point; False while the work has not started.

        Raises:
            HybridcompError: something of what has come by then is wrong.
        """
        if self._event is None or not self._event.done():
            return False
        self._joint.come(self)
        return True

    def wait(self) -> None:
        """Wait until the device has reached the point; raises as :meth:`done`."""
        self._joint.start()
        assert self._event is not None
        self._event.wait()
        self._joint.come(self)

    def tell(self) -> None:
        """Call the function that follows the point, once."""
        after, self._after = self._after, None
        if after is not None:
            after()


class JointQueue(Queue):
    """Work of one operation, or of one of its messages, in its order.

    The next work of a queue follows all of its forks; of these, the ones of one kind do not follow each other.
    """

    def __init__(self, joint: Joint, runtime: Runtime, stream: int, order: tuple[int, int]) -> None:
        super().__init__(runtime, stream)
        self._joint, self._recorded = joint, joint.recorded
        self._order = order
        self._last: list[_Work] = []
        self._forks: list[tuple[str, JointQueue]] = []

    @property
    def order(self) -> tuple[int, int]:
        """See :attr:`Queue.order`."""
        return self._order

    @property
    def status(self) -> DeviceArray:
        """See :attr:`Queue.status`."""
        if self._status is None:
            self._status = self._joint.new_status()
        return self._status

    def fork(self, kind: str) -> JointQueue:
        """See :meth:`Queue.fork`."""
        child = JointQueue(self._joint, self.runtime, self.stream, self._order)
        child._status = self.status
        child._last = self._ends(but=kind) if self._forks else self._last  # replaced, and never changed
        self._forks.append((kind, child))
        return child

    def after(self, other: Queue) -> None:
        """See :meth:`Queue.after`."""
        assert isinstance(other, JointQueue)
        self._last = [*self._last, *other._ends()]

    def start(self) -> None:
        """See :meth:`Queue.start`."""
        self._joint.start()

    def launch(
        self,
        module: str,
        kernel: str,
        blocks: int,
        threads: int,
        *args: Argument,
        shared: int = 0,
        held: object = None,
    ) -> None:
        """See :meth:`Queue.launch`."""
        if not blocks:
            return
        values = [0 if a is None else a.ptr if isinstance(a, DeviceArray) else int(a) for a in args]
        runtime, stream = self.runtime, self.stream
        self._put(
            (module, kernel, threads, shared),
            lambda: runtime.launch(module, kernel, blocks, threads, values, shared, stream),
            (args, held),
            blocks,
            values,
        )

    def copy(self, to: DeviceArray, source: DeviceArray) -> None:
        """See :meth:`Queue.copy`."""
        if source.nbytes:
            self._put(("copy", "", 0, 0), lambda: Queue.copy(self, to, source), (to, source))

    def upload(self, to: DeviceArray, source: ByteArray) -> None:
        """See :meth:`Queue.upload`."""
        if source.size:
            self._put(("upload", "", 0, 0), lambda: Queue.upload(self, to, source), (to, source))

    def uploaded(self, source: ByteArray) -> DeviceArray:
        """See :meth:`Queue.uploaded`."""
        found = self._joint.arrived(source)
        return super().uploaded(source) if found is None else found

    def fill(self, array: DeviceArray, byte: int = 0) -> None:
        """See :meth:`Queue.fill`."""
        if array.nbytes:
            self._put(("fill", "", 0, 0), lambda: Queue.fill(self, array, byte), array)

    def matmul(
        self,
        a: DeviceArray,
        b: DeviceArray,
        out: DeviceArray,
        shape: tuple[int, int, int],
        *,
        transposed: bool = False,
    ) -> None:
        """See :meth:`Queue.matmul`."""
        self._put(
            ("matmul", "", 0, 0),
            lambda: Queue.matmul(self, a, b, out, shape, transposed=transposed),
            (a, b, out),
        )

    def zero_words(self, n: int) -> DeviceArray:
        """See :meth:`Queue.zero_words`."""
        return self._joint.zero_words(n)

    def shown(self, nbytes: int) -> DeviceArray:
        """See :meth:`Queue.shown`."""
        found = self._joint.shown(nbytes)
        return super().shown(nbytes) if found is None else found

    def counters(self) -> DeviceArray:
        """See :meth:`Queue.counters`."""
        return self._joint.zero_words(2)  # messages are sealed and opened beside each other

    def read(self, source: DeviceArray) -> npt.NDArray[Any]:
        """See :meth:`Queue.read`."""
        self.start()
        return super().read(source)

    def write(self, to: DeviceArray, values: npt.NDArray[Any]) -> None:
        """See :meth:`Queue.write`."""
        self.start()
        super().write(to, values)

    def _put(
        self,
        kind: Kind,
        start: Callable[[], None],
        held: object,
        blocks: int = 0,
        args: list[int] | None = None,
    ) -> None:
        work = _Work(kind, start, blocks, args or [], held)
        for each in self._ends() if self._forks else self._last:
            if not each.started:
                each.then.append(work)
                work.left += 1
        self._last, self._forks = [work], []
        self._recorded.append(work)

    def _ends(self, but: str = "") -> list[_Work]:
        """Return the work that comes last, less that of forks of a kind."""
        ends = list(self._last)
        for kind, fork in self._forks:
            if kind != but:
                ends += fork._ends() if fork._forks else fork._last
        return ends


class _Room:
    """Pinned memory for bytes that come together, and their copy on the device once they are here."""

    def __init__(self, whole: ByteArray, part: ByteArray) -> None:
        self.whole, self.bytes, self.begin = whole, part, part.ctypes.data
        self.mirror: DeviceArray | None = None


class JointPair(StreamPair):
    """An operation's part of a stream pair that it has together with others."""

    def __init__(self, joint: Joint, pair: StreamPair, queue: JointQueue) -> None:
        self.pool = pair.pool
        self.queue: Queue = queue
        self._joint = joint

    def record(self) -> Event:
        """See :meth:`StreamPair.record`."""
        return self._joint.event()

    def download(
        self, copies: Sequence[tuple[ByteArray, DeviceArray]], then: Callable[[], None] | None = None
    ) -> Event:
        """See :meth:`StreamPair.download`, and :meth:`Joint.download`."""
        return self._joint.download(copies, then)

    def give(self) -> None:
        """See :meth:`StreamPair.give`."""
        self._joint.ended()


class Joint:
    """Work of operations that travel together, on one stream pair of a device. Used by one thread at a time.

    Attributes:
        recorded: work to start.
    """

    def __init__(self) -> None:
        self._pair: StreamPair | None = None
        self._lanes = 0
        self._left = 0  # operations that have not ended
        self.recorded: list[_Work] = []  # the same list for good
        self._downs: list[tuple[ByteArray, DeviceArray]] = []
        self._wanted: JointEvent | None = None
        self._tables: list[ByteArray] = []  # of started launches
        self._zeros: DeviceArray | None = None
        self._shown: DeviceArray | None = None
        self._given = 0  # bytes of what is shown
        self._rooms: list[_Room] = []
        self._said: list[tuple[ByteArray, int]] = []  # where bytes of what is shown are wanted, and which
        self._then: list[Callable[[], None]] = []  # to be called when what is recorded is done
        self._flying: deque[tuple[JointEvent, bool]] = deque()  # not seen to have come; whether one has to be
        # What is copied with the next table: its bytes, where they go, and how many are used.
        self._from_host: tuple[ByteArray, DeviceArray, int] | None = None

    def pair(self, runtime: Runtime, after: Iterable[Event]) -> StreamPair:
        """Return the stream pair of one more operation, whose work begins after these events."""
        if self._pair is None:
            self._pair = stream_pool(runtime).pair_after(after)
        else:
            for event in after:
                runtime.follow(self._pair.queue.stream, event)
        stream = self._pair.queue.stream
        queue = JointQueue(self, runtime, stream, (stream, self._lanes))
        self._lanes += 1
        self._left += 1
        return JointPair(self, self._pair, queue)

    @property
    def pending(self) -> bool:
        """Tell whether there is work to start."""
        return bool(self.recorded) or self._wanted is not None

    @property
    def settled(self) -> bool:
        """Tell whether all functions have been called that were to follow copies to the host; raises what they do."""
        wanted = [event for event, asked in self._flying if asked]
        return not self._then and (not wanted or wanted[-1].done())

    # -- recording ---------------------------------------------------------------------------------------

    def event(self) -> JointEvent:
        """Return an event after all that is recorded now."""
        if self._wanted is None:
            self._wanted = JointEvent(self)
        return self._wanted

    def download(
        self, copies: Sequence[tuple[ByteArray, DeviceArray]], then: Callable[[], None] | None = None
    ) -> JointEvent:
        """Copy to pinned bytes after all that is recorded now: see :meth:`StreamPair.download`.

        Args:
            copies: as there.
            then: function that is called once they are there, before the event or a later one says so.
        """
        if then is not None:
            self._then.append(then)
        shown = self._shown
        for to, source in copies:
            at = -1 if shown is None else source.ptr - shown.ptr
            if shown is not None and 0 <= at < shown.nbytes:
                self._said.append((to, at))
            elif to.size:
                self._downs.append((to, source))
        return self.event()

    def zero_words(self, n: int) -> DeviceArray:
        """Return new words of 4 bytes, all zero; an even number of them are aligned to 8 bytes."""
        taken = -(-n // 2) * 2
        if self._zeros is None or self._zeros.size < taken:
            assert self._pair is not None
            # Filled ahead of what is recorded, which cannot use it yet.
            made = 4 * max(_ZEROS, _ALIKE * taken)
            self._zeros = self._pair.queue.zeros(made).view(np.uint32)
        found, self._zeros = self._zeros[:n], self._zeros[taken:]
        return found

    def new_status(self) -> DeviceArray:
        """Return the status of an operation, a word that is zero, among what is shown."""
        found = self.shown(_STATUS_BYTES)
        return self.zero_words(1) if found is None else found.view(np.uint32)

    def shown(self, nbytes: int) -> DeviceArray | None:
        """Return bytes, all zero, that are copied together with others that are shown; None if there is no room."""
        if self._shown is None:
            self._shown, self._given = self.zero_words(_SHOWN // 4).view(np.uint8), 0
        begin = -(-self._given // _SHOWN_ALIGNMENT) * _SHOWN_ALIGNMENT
        if begin + nbytes > _SHOWN:
            return None
        self._given = begin + nbytes
        return self._shown[begin : begin + nbytes]

    def given(self, nbytes: int) -> tuple[ByteArray, DeviceArray]:
        """Return pinned bytes, and where the device finds them: by one copy, with the table of what is recorded next.

        The caller writes them before anything starts, and asks once until then.
        """
        assert self._pair is not None
        assert self._from_host is None
        pinned = self._pair.pool.pinned.take(nbytes + _TABLE_ROOM)
        self._tables.append(pinned)
        there = self._pair.queue.empty(nbytes + _TABLE_ROOM)
        self._from_host = pinned, there, nbytes
        return pinned[:nbytes], there[:nbytes]

    def pinned(self, nbytes: int) -> ByteArray:
        """Return pinned bytes that are good until all operations have ended."""
        assert self._pair is not None
        self._tables.append(self._pair.pool.pinned.take(nbytes))
        return self._tables[-1][:nbytes]

    # -- what has come -----------------------------------------------------------------------------------

    def room(self, nbytes: int) -> ByteArray | None:
        """Return pinned memory for what comes to all operations together; None if none of them is on a device."""
        if self._pair is None:
            return None
        whole = self._pair.pool.pinned.take(nbytes)
        self._rooms.append(_Room(whole, whole[:nbytes]))
        return self._rooms[-1].bytes

    def arrived(self, source: ByteArray) -> DeviceArray | None:
        """Return bytes of such a room in the device's memory, where all of the room is copied once."""
        at = source.ctypes.data
        for room in self._rooms:
            offset = at - room.begin
            if offset >= 0 and offset + source.size <= room.bytes.size:
                if room.mirror is None:
                    assert self._pair is not None
                    # Ahead of what is recorded, which cannot use it yet.
                    room.mirror = self._pair.queue.uploaded(room.bytes)
                return room.mirror[offset : offset + source.size]
        return None

    # -- starting ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all that is recorded."""
        if not self.pending:
            return
        assert self._pair is not None
        self._start_work(self._pair)
        event, self._wanted = self._wanted, None
        downs, self._downs = self._downs, []
        said, self._said = self._said, []
        then, self._then = self._then, []
        mirror: ByteArray | None = None
        first = min((at for _, at in said), default=0)
        if said:
            assert self._shown is not None
            last = max(at + to.size for to, at in said)
            mirror = self._pair.pool.pinned.take(last - first)
            downs.append((mirror[: last - first], self._shown[first:last]))
        if event is not None:
            come = self._pair.download(downs) if downs else self._pair.record()
            event.begin(come, lambda: self._tell(said, first, mirror, then))
            self._flying.append((event, bool(then)))

    def come(self, event: JointEvent) -> None:
        """Take notice that the device has reached a point, and so all before it, which are told first."""
        while any(each is event for each, _ in self._flying):
            self._flying.popleft()[0].tell()

    def ended(self) -> None:
        """Take notice that an operation has ended, of whose work the device has done all."""
        self._left -= 1
        if not self._left and self._pair is not None:
            if self.pending:  # what nobody has waited for
                self.start()
                self._pair.record().wait()
            pair, self._pair = self._pair, None
            self._zeros = self._shown = None
            for table in self._tables:
                pair.pool.pinned.give(table)
            self._tables = []
            for room in self._rooms:
                pair.pool.pinned.give(room.whole)
            self._rooms = []
            self._flying.clear()
            pair.give()

    def _tell(
        self,
        said: list[tuple[ByteArray, int]],
        first: int,
        mirror: ByteArray | None,
        then: list[Callable[[], None]],
    ) -> None:
        if mirror is not None:
            for to, at in said:
                to[:] = mirror[at - first : at - first + to.size]
            if self._pair is not None:
                self._pair.pool.pinned.give(mirror)
        for call in then:
            call()

    def _start_work(self, pair: StreamPair) -> None:
        """Start the recorded work, as few launches."""
        recorded = list(self.recorded)
        self.recorded.clear()
        together: list[tuple[list[_Work], int]] = []
        words: list[int] = []
        ends: dict[int, int] = {}  # blocks of the launch of the rows from a word on
        for group in _grouped(recorded):
            at = len(words)
            if len(group) > 1 and _has_table(group[0].kind):
                end = 0
                for work in group:
                    end += work.blocks
                    words += [end, work.blocks, *work.args]
                ends[at] = end
            together.append((group, at if len(words) > at else -1))
        table = self._uploaded_table(pair, words)
        for group, at in together:
            if at < 0:
                for work in group:
                    work.start()
            else:
                module, kernel, threads, shared = group[0].kind
                assert table is not None
                rows = table[8 * at :]
                blocks = ends[at]
                pair.queue.launch(module, f"{kernel}_table", blocks, threads, rows, len(group), shared=shared)
            for work in group:
                work.started = True

    def _uploaded_table(self, pair: StreamPair, words: list[int]) -> DeviceArray | None:
        """Copy a table to the device, and what the host gives; return the table, None if it has no words."""
        given, self._from_host = self._from_host, None
        nbytes = 8 * len(words)
        if given is not None:
            staged, there, used = given
            at = -(-used // _SHOWN_ALIGNMENT) * _SHOWN_ALIGNMENT
            if nbytes > there.size - at:
                pair.queue.upload(there, staged[:used])
                given = None
        if given is None:
            if not words:
                return None
            at, staged, there = 0, self.pinned(nbytes), pair.queue.empty(nbytes)
        staged[at : at + nbytes] = np.array(words, np.uint64).view(np.uint8)
        pair.queue.upload(there, staged[: at + nbytes])
        return there[at:] if words else None


def _has_table(kind: Kind) -> bool:
    return kind[1].startswith(TABLE_FORMS.get(kind[0], ("-",)))


def _grouped(recorded: Sequence[_Work]) -> list[list[_Work]]:
    """Divide work into groups of one kind that follow each other; within a group nothing depends on anything."""
    counts: dict[Kind, int] = {}
    ready: dict[Kind, list[_Work]] = {}
    for work in recorded:
        counts[work.kind] = counts.get(work.kind, 0) + 1
        if not work.left:
            ready.setdefault(work.kind, []).append(work)
    groups = []
    while ready:
        # That kind of which the fewest pieces still wait for others.
        kind = min(ready, key=lambda one: counts[one] - len(ready[one]))
        group = ready.pop(kind)
        counts[kind] -= len(group)
        groups.append(group)
        for work in group:
            for each in work.then:
                each.left -= 1
                if not each.left:
                    ready.setdefault(each.kind, []).append(each)
            work.then = []
    return groups


def pair_for(joint: Joint | None, runtime: Runtime, after: Iterable[Event]) -> StreamPair:
    """Return the stream pair of an operation: one of its own, or of a joint's.

    Args:
        joint: joint work of the operations that it travels with; None if there are none.
        runtime: the device.
        after: events that all of its work follows.
    """
    return stream_pool(runtime).pair_after(after) if joint is None else joint.pair(runtime, after)

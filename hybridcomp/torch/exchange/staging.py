"""Copy messages to and from the buffers of exchanges: in host memory, or in the memory of a device.

A backend that carries tensors of a device alone (NCCL) gets them there, and gives them there: of what the device has
encoded only tables of lengths, and what the host reads of each message, come to host memory. The host waits for none
of it: the stream that the backend's work is called from follows the one that gathers messages, and what reads them
where they came follows the backend's.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hybridcomp.arrays import ByteArray
from hybridcomp.codecs.device.messages import copy_bytes
from hybridcomp.collectives.device.joint import Joint
from hybridcomp.collectives.device.streams import stream_pool
from hybridcomp.collectives.transport.pools import Pool
from hybridcomp.device import ALIGNMENT, DeviceArray, Event, Queue, Runtime

GATHERS = "gather"  # forks of a batch's queue that copy to, or from, an exchange's buffers
Copies = Sequence[tuple[Any, Any]]
"""Targets and sources of one length each."""


class Staging(abc.ABC):
    """Memory that exchanges take their bytes from, and leave them in."""

    @abc.abstractmethod
    def room(self, nbytes: int) -> Any:
        """Return a buffer for an exchange."""

    @abc.abstractmethod
    def give(self, buffer: Any) -> None:
        """Return a buffer that nothing uses any more."""

    @abc.abstractmethod
    def copy(self, copies: Copies) -> None:
        """Copy bytes; they are there on return. A rest of the target stays as it is."""

    @abc.abstractmethod
    def read(self, parts: Sequence[Any]) -> list[ByteArray]:
        """Return the bytes of parts of exchanges' buffers in host memory."""


class HostStaging(Staging):
    """Host memory, of a pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def room(self, nbytes: int) -> ByteArray:
        """See :meth:`Staging.room`."""
        return self._pool.take(nbytes)

    def give(self, buffer: ByteArray) -> None:
        """See :meth:`Staging.give`."""
        self._pool.give(buffer)

    def copy(self, copies: Copies) -> None:
        """See :meth:`Staging.copy`."""
        for to, source in copies:
            to[: source.size] = source

    def read(self, parts: Sequence[ByteArray]) -> list[ByteArray]:
        """See :meth:`Staging.read`."""
        return list(parts)


class DeviceStaging(Staging):
    """The memory of a device.

    Attributes:
        runtime: the device.
        stream: stream that the backend's work begins and ends in: it starts after what the stream has by then, and
            what follows it there finds the bytes that came. All buffers are allocated in its order.
    """

    def __init__(self, runtime: Runtime, make: Callable[[int, int], DeviceArray]) -> None:
        """Take buffers from a function.

        Args:
            runtime: the device.
            make: function that returns an array of so many bytes, allocated in a stream's order.
        """
        self._make = make
        self._pinned = stream_pool(runtime).pinned
        self.stream, self._owner = runtime.new_stream()
        self.runtime, self._queue = runtime, Queue(runtime, self.stream)

    def room(self, nbytes: int) -> DeviceArray:
        """See :meth:`Staging.room`."""
        return self._make(nbytes, self.stream)

    def give(self, buffer: DeviceArray) -> None:
        """Do nothing: the library that has made it frees it."""

    def gather(self, out: DeviceArray, copies: Copies, joint: Joint, queue: Queue) -> None:
        """Start to copy bytes to an exchange's buffer, and zeros to all that is between them.

        Nothing waits: the backend's work, which is called in the order of :attr:`stream`, finds them there.

        Args:
            out: the buffer.
            copies: parts of it in their order, at multiples of 16 bytes, and what goes there: the device's bytes, or
                the host's, which may change on return.
            joint: work of the batch.
            queue: queue of it.
        """
        if not out.size:
            return
        # The buffer's memory may still be used by earlier work of the stream that it was allocated in.
        self.runtime.follow(queue.stream, self.runtime.record(self.stream))
        if any(isinstance(source, DeviceArray) for _, source in copies):
            _scatter(out, copies, joint, queue)
        else:
            whole = joint.pinned(out.size)
            whole[:] = 0
            for to, source in copies:
                whole[to.ptr - out.ptr :][: source.size] = source
            queue.upload(out, whole)
        joint.start()
        self.runtime.follow(self.stream, self.runtime.record(queue.stream))

    def arrive(self, queue: Queue) -> None:
        """Have later work of a queue follow the backend's, where it has been called for."""
        self.runtime.follow(queue.stream, self.runtime.record(self.stream))

    def fetch(self, parts: Sequence[DeviceArray], joint: Joint) -> list[ByteArray]:
        """Return pinned memory that parts are copied to after what is recorded: see :meth:`.Joint.download`.

        What lies side by side crosses at once.
        """
        nothing = np.empty(0, np.uint8)
        found: dict[int, ByteArray] = {}
        copies = []
        for run in _side_by_side([(part, nothing) for part in parts]):
            begin, nbytes = _extent(run)
            pinned, first = joint.pinned(nbytes), run[0][0]
            copies.append((pinned, DeviceArray(first.runtime, begin, nbytes, np.uint8, first.owner)))
            found |= {part.ptr: pinned[part.ptr - begin :][: part.size] for part, _ in run}
        joint.download(copies)
        return [found[part.ptr] for part in parts]

    def copy(self, copies: Copies) -> None:
        """See :meth:`Staging.copy`.

        What lies side by side in the device's memory crosses at once; of targets there, padding between them is zeroed.
        """
        up: list[tuple[DeviceArray, ByteArray]] = []
        down: list[tuple[DeviceArray, ByteArray]] = []
        for to, source in copies:
            if not source.size:
                continue
            if not isinstance(to, DeviceArray):
                down.append((source, to))
            elif isinstance(source, DeviceArray):
                self._queue.copy(to, source)
            else:
                up.append((to, source))
        held: list[ByteArray] = []
        late: list[tuple[ByteArray, ByteArray]] = []
        for run in _side_by_side(up):
            begin, nbytes = _extent(run)
            pinned = self._pinned.take(nbytes)
            pinned[:nbytes] = 0
            for there, source in run:
                pinned[there.ptr - begin :][: source.size] = source
            self.runtime.copy(begin, pinned.ctypes.data, nbytes, self._queue.stream)
            held.append(pinned)
        for run in _side_by_side(down):
            begin, nbytes = _extent(run)
            pinned = self._pinned.take(nbytes)
            self.runtime.copy(pinned.ctypes.data, begin, nbytes, self._queue.stream)
            late += [(to, pinned[there.ptr - begin :][: there.size]) for there, to in run]
            held.append(pinned)
        self._end().wait()
        for to, part in late:
            to[: part.size] = part
        for pinned in held:
            self._pinned.give(pinned)

    def read(self, parts: Sequence[DeviceArray]) -> list[ByteArray]:
        """See :meth:`Staging.read`."""
        found = [np.empty(part.size, np.uint8) for part in parts]
        self.copy(list(zip(found, parts, strict=True)))
        return found

    def _end(self) -> Event:
        return self.runtime.record(self._queue.stream)


def _scatter(out: DeviceArray, copies: Copies, joint: Joint, queue: Queue) -> None:
    """Record copies to a buffer as rows of one launch; what comes from the host crosses at once, with their table."""
    held = [(to, source) for to, source in copies if not isinstance(source, DeviceArray)]
    staged, there = joint.given(sum(_padded(source.size) for _, source in held))
    staged[:] = 0
    rows, at = [], 0
    for to, source in held:
        staged[at : at + source.size] = source
        rows.append((to, there[at : at + source.size]))
        at += _padded(source.size)
    rows += [(to, source) for to, source in copies if isinstance(source, DeviceArray)]
    zeros = joint.zero_words(ALIGNMENT // 4).view(np.uint8)
    ends = [*(to.ptr for to, _ in copies[1:]), _end_of(out)]
    for (to, _), end in zip(copies, ends, strict=True):
        if _end_of(to) < end:  # padding must not carry what its memory held before
            gap = out[_end_of(to) - out.ptr : end - out.ptr]
            rows.append((gap, zeros[: gap.size]))
    for to, source in rows:
        row = queue.fork(GATHERS)
        copy_bytes(row, source, to, source.size)


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


Run = list[tuple[DeviceArray, ByteArray]]


def _side_by_side(parts: Run) -> list[Run]:
    """Divide parts of the device's memory, and bytes of the host's, into runs with padding at most between them."""
    runs: list[Run] = []
    for part in parts:
        last = runs[-1][-1][0] if runs else None
        if last is not None and last.owner is part[0].owner and 0 <= part[0].ptr - _end_of(last) < ALIGNMENT:
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _extent(run: Run) -> tuple[int, int]:
    """Return a run's address and number of bytes."""
    return run[0][0].ptr, _end_of(run[-1][0]) - run[0][0].ptr


def _end_of(array: DeviceArray) -> int:
    return array.ptr + array.nbytes

"""Copy messages to and from the buffers of exchanges: in host memory, or in the memory of a device.

A backend that carries tensors of a device alone (NCCL) gets them there, and gives them there: of what the device has
encoded only tables of lengths, and what the host reads of each message, come to host memory. Its streams and a
message's are not the same, so the host waits for copies, once before messages leave and once when they have come.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import numpy as np

from hybridcomp.arrays import ByteArray
from hybridcomp.collectives.device.streams import callers_events, stream_pool
from hybridcomp.collectives.transport.pools import Pool
from hybridcomp.device import ALIGNMENT, DeviceArray, Event, Queue, Runtime

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
    """The memory of a device."""

    def __init__(self, runtime: Runtime, make: Any) -> None:
        """Take buffers from a function.

        Args:
            runtime: the device.
            make: function that returns a :class:`DeviceArray` of so many bytes, in the order of its library's stream.
        """
        self._make = make
        self._pinned = stream_pool(runtime).pinned
        stream, self._owner = runtime.new_stream()
        self._runtime, self._queue = runtime, Queue(runtime, stream)

    def room(self, nbytes: int) -> DeviceArray:
        """See :meth:`Staging.room`."""
        made: DeviceArray = self._make(nbytes)
        # Its memory may still be used by earlier work of the stream that it was allocated in.
        for event in callers_events([made]):
            self._runtime.follow(self._queue.stream, event)
        return made

    def give(self, buffer: DeviceArray) -> None:
        """Do nothing: the library that has made it frees it."""

    def clear(self, buffer: DeviceArray) -> None:
        """Fill a buffer with zeros."""
        if buffer.size:
            self._runtime.fill(buffer.ptr, 0, buffer.size, self._queue.stream)

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
            self._runtime.copy(begin, pinned.ctypes.data, nbytes, self._queue.stream)
            held.append(pinned)
        for run in _side_by_side(down):
            begin, nbytes = _extent(run)
            pinned = self._pinned.take(nbytes)
            self._runtime.copy(pinned.ctypes.data, begin, nbytes, self._queue.stream)
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
        return self._runtime.record(self._queue.stream)


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

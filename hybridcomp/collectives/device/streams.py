"""Pool a device's streams and staging memory for operations in flight.

Each operation has a stream pair of its own, so that one which waits for gradients that are still being computed holds
up no other. What the device is still using is used again only after an event says that it is done.

Pools are safe to use from several threads: steps of operations over MPI run in one at a time, those over a process
group of torch's in a thread of that group's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from hybridcomp.arrays import ByteArray
from hybridcomp.device import DeviceArray, Event, Queue, Runtime

_KEPT = 1 << 30  # bytes of free buffers in a pool
Buffer = TypeVar("Buffer", ByteArray, DeviceArray)


class Pool(Generic[Buffer]):
    """A pool of buffers of a few sizes, reused: to allocate pinned memory takes milliseconds."""

    def __init__(self, make: Callable[[int], Buffer]) -> None:
        self._make: Callable[[int], Buffer] = make
        self._free: dict[int, list[Buffer]] = {}
        self._kept = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Buffer:
        """Return a buffer of at least ``nbytes`` that nobody uses; the caller may slice it, and gives it back whole."""
        step = 1 << max(12, (nbytes - 1).bit_length() - 3)
        size = -(-max(nbytes, 1) // step) * step
        with self._lock:
            free = self._free.get(size)
            if free:
                self._kept -= size
                return free.pop()
        return self._make(size)

    def give(self, buffer: Buffer) -> None:
        """Return a buffer to the pool that neither the device nor MPI uses any more."""
        with self._lock:
            if self._kept + buffer.size <= _KEPT:
                self._kept += buffer.size
                self._free.setdefault(buffer.size, []).append(buffer)


class StreamPool:
    """The pool of stream pairs and buffers of one device.

    Attributes:
        runtime: the device.
        pinned: host memory.
        memory: of the device, for MPI to receive in: in no stream's order.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.pinned: Pool[ByteArray] = Pool(runtime.pinned)
        # Memory that a stream's earlier work may still use is no place to receive in; on this stream there is none.
        idle, self._idle_owner = runtime.new_stream()
        self.memory: Pool[DeviceArray] = Pool(Queue(runtime, idle).empty)
        self._free: list[StreamPair] = []
        self._lock = threading.Lock()

    def pair_after(self, events: Iterable[Event]) -> StreamPair:
        """Return a stream pair whose work begins after these events."""
        with self._lock:
            pair = self._free.pop() if self._free else None
        pair = pair or StreamPair(self)
        pair.begin(events)
        return pair

    def give(self, pair: StreamPair) -> None:
        """Return a stream pair to the pool whose operation has ended well."""
        self._free.append(pair)


class StreamPair:
    """Two streams: one for kernels and for copies to the device, one for copies from it, which run beside them.

    Attributes:
        pool: the pool that it belongs to.
        queue: of the first stream, with a status of the operation's own.
    """

    def __init__(self, pool: StreamPool) -> None:
        self.pool = pool
        self._runtime = pool.runtime
        self._main, self._main_owner = pool.runtime.new_stream()
        self._down, self._down_owner = pool.runtime.new_stream()
        self.queue = Queue(pool.runtime, self._main)

    def begin(self, events: Iterable[Event]) -> None:
        """Order all later work of this pair after ``events``."""
        self.queue = Queue(self._runtime, self._main)
        for event in events:
            self._runtime.follow(self._main, event)

    def record(self) -> Event:
        """Return an event after all kernels and copies to the device up to now."""
        return self._runtime.record(self._main)

    def upload(self, to: DeviceArray, source: ByteArray) -> None:
        """Start to copy pinned bytes to the device."""
        if source.size:
            self._runtime.copy(to.ptr, source.ctypes.data, source.size, self._main)

    def download(self, copies: Sequence[tuple[ByteArray, DeviceArray]]) -> Event:
        """Start to copy, after the work that the streams have now, from the device to as many pinned bytes.

        Args:
            copies: target and source of each; both must live until the event that is returned is done.
        """
        self._runtime.follow(self._down, self.record())
        for to, source in copies:
            if to.size:
                self._runtime.copy(to.ctypes.data, source.ptr, to.size, self._down)
        return self._runtime.record(self._down)


def callers_events(buffers: Iterable[DeviceArray]) -> list[Event]:
    """Return events after what the streams that the buffers' owners are using have now."""
    streams = {(b.runtime, b.runtime.current_stream(b.owner)) for b in buffers}
    return [runtime.record(stream) for runtime, stream in streams]


_pools: dict[int, StreamPool] = {}


def stream_pool(runtime: Runtime) -> StreamPool:
    """Return the process's pool of streams and buffers of a device."""
    found = _pools.get(id(runtime))
    if found is None:
        found = _pools[id(runtime)] = StreamPool(runtime)
    return found

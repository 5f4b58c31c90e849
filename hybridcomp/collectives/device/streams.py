"""Pool a device's streams and staging memory for operations in flight.

Each operation has its own stream pair, so that an operation that waits for gradients still being computed holds up no
other. Memory that the device is using is used again only after an event says that the device is done.

Pools are safe to use from several threads: steps of operations over MPI run in one thread at a time, steps over a
process group of torch's in a thread of that group.
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
    """Pool of reused buffers of a few sizes: to allocate pinned memory takes milliseconds."""

    def __init__(self, make: Callable[[int], Buffer]) -> None:
        self._make: Callable[[int], Buffer] = make
        self._free: dict[int, list[Buffer]] = {}
        self._kept = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Buffer:
        """Return an unused buffer of at least ``nbytes``; the caller may slice it, and gives it back whole."""
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
    """Pool of stream pairs and buffers of one device.

    Attributes:
        runtime: runtime of the device.
        pinned: pool of pinned host memory.
        memory: pool of the device's memory for MPI to receive in, which is in no stream's order.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.pinned: Pool[ByteArray] = Pool(runtime.pinned)
        # MPI must not receive in memory that a stream's earlier work may still use; this stream has no work.
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
        """Return a stream pair to the pool."""
        self._free.append(pair)


class StreamPair:
    """Pair of streams: one for kernels and copies to the device, one for copies from it, which run beside them.

    Attributes:
        pool: pool that it belongs to.
        queue: queue of the first stream, with a status for the operation alone.
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

    def give(self) -> None:
        """Return the pair to the pool: its operation has ended well."""
        self.pool.give(self)

    def record(self) -> Event:
        """Return an event after all kernels and copies to the device up to now."""
        return self._runtime.record(self._main)

    def upload(self, to: DeviceArray, source: ByteArray) -> None:
        """Start to copy pinned bytes to the device."""
        self.queue.upload(to, source)

    def download(
        self, copies: Sequence[tuple[ByteArray, DeviceArray]], then: Callable[[], None] | None = None
    ) -> Event:
        """Start to copy from the device to pinned bytes, after the work that the streams have now.

        Args:
            copies: target and source of each copy, equally long; both must live until the returned event is done.
            then: function to call once they are there; of a joint's pair alone, whose events are looked at in order.
        """
        assert then is None
        self._runtime.follow(self._down, self.record())
        for to, source in copies:
            if to.size:
                self._runtime.copy(to.ctypes.data, source.ptr, to.size, self._down)
        return self._runtime.record(self._down)


def callers_events(buffers: Iterable[DeviceArray]) -> list[Event]:
    """Return events after the present work of the streams that the buffers' owners are using."""
    streams = {(b.runtime, b.runtime.current_stream(b.owner)) for b in buffers}
    return [runtime.record(stream) for runtime, stream in streams]


_pools: dict[int, StreamPool] = {}


def stream_pool(runtime: Runtime) -> StreamPool:
    """Return the process's pool of streams and buffers of a device."""
    found = _pools.get(id(runtime))
    if found is None:
        found = _pools[id(runtime)] = StreamPool(runtime)
    return found

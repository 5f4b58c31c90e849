"""Stage a batch's messages between a device and the host: few copies, and one wait for each phase.

Tasks launch all that they encode or decode, and nothing waits. Then the batch does, once to learn how long messages
are whose lengths only the device knows, and once until their bytes are in pinned memory; over a link whose exchanges
may start in any order, other batches go on meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridcomp import native
from hybridcomp.arrays import ByteArray
from hybridcomp.codecs.device import Encoded
from hybridcomp.collectives.device.streams import StreamPair, StreamPool
from hybridcomp.device import DeviceArray, Event, Queue, Runtime
from hybridcomp.errors import WireError
from hybridcomp.torch.hook.links import Link
from hybridcomp.torch.hook.reduce_tasks import DeviceReduceTask, ReduceTask
from hybridcomp.torch.hook.summing import ALIGN, Buffers, Staging, Summing, aligned

Array = npt.NDArray[Any]


class HookDevice:
    """The streams and buffers of a device for a hook; for one thread.

    Attributes:
        pool: of its stream pairs: each bucket has one of its own, so that none waits for another's gradients.
        buffers: host memory that the device copies to and from by itself.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.pool = StreamPool(runtime)
        self.buffers = Buffers(runtime.pinned)


class DeviceStaging(Staging):
    """The staging of one batch's messages between a device and the host.

    Attributes:
        queue: where its tasks work; the status is the batch's own.
        busy: something was put there that :meth:`settle` has to wait for.
        first: what to wait for before anything is encoded.
    """

    def __init__(self, streams: StreamPair, buffers: Buffers, link: Link) -> None:
        self.queue = Queue(streams.queue.runtime, streams.queue.stream)
        self.busy = False
        self.first: list[Event] = []
        self._streams, self._buffers, self._link = streams, buffers, link
        self._block: DeviceArray | None = None
        self._placed = 0
        self._unknown: list[Encoded] = []
        self._events: list[Event] = []
        self._then: list[Callable[[], None]] = []
        self._fetched: list[tuple[ByteArray, DeviceArray]] = []
        self._there: dict[int, DeviceArray] = {}
        self._brought: list[tuple[ByteArray, DeviceArray]] = []
        self._staged: ByteArray | None = None

    # -- the phases (summing.Staging) ----------------------------------------------------------------

    def start_encode(self, tasks: Sequence[ReduceTask], ranks: Sequence[int], nbytes: int) -> Summing:
        """Launch the encoding of all messages, in the order in which they will be packed."""
        device_tasks = _device_tasks(tasks)
        first, self.first = self.first, []
        yield from self.landed(first)
        self._load(nbytes if device_tasks else 0)
        for rank in ranks:
            for task in device_tasks:
                began = time.perf_counter()
                task.start_encode(rank)
                task.seconds[0] += time.perf_counter() - began
        yield from self._known()

    def start_reduce(
        self,
        tasks: Sequence[ReduceTask],
        messages: Sequence[list[ByteArray]],
        ranks: Sequence[int],
        nbytes: int,
    ) -> Summing:
        """Launch the sums and their encoding."""
        device_tasks = _device_tasks(tasks)
        self._load(nbytes if device_tasks else 0)
        self.start_decode(tasks, messages)
        for task, column in zip(device_tasks, zip(*messages, strict=True), strict=False):
            began = time.perf_counter()
            task.start_reduce(list(column), ranks)
            task.seconds[0] += time.perf_counter() - began
        yield from self._known()

    def start_decode(self, tasks: Sequence[ReduceTask], messages: Sequence[list[ByteArray]]) -> None:
        """Start to copy messages to the device: in one piece those of each rank, which lie one after another."""
        count = len(_device_tasks(tasks))
        for found in messages:
            self._upload(found[:count])

    def _load(self, nbytes: int) -> None:
        """Make room for messages. All of it is zero: what lies between them crosses with them."""
        if nbytes:
            self._block, self._placed = self.queue.zeros(nbytes), 0
            self.busy = True

    # -- from the device -----------------------------------------------------------------------------

    def place(self, nbytes: int) -> DeviceArray:
        """Return memory for a message, a multiple of :data:`~.summing.ALIGN` bytes after the last one.

        Messages lie one after another, in the order of these calls, as they do on the wire.
        """
        assert self._block is not None
        part = self._block[self._placed : self._placed + nbytes]
        self._placed += aligned(nbytes)
        return part

    def written(self, message: Encoded) -> Encoded:
        """Record a message that the device is writing, whose length the host may still have to learn; return it."""
        if message.size is None:
            self._unknown.append(message)
        return message

    def wait_for(self, event: Event) -> None:
        """Pack messages only after an event."""
        self._events.append(event)

    def then(self, call: Callable[[], None]) -> None:
        """Call a function before messages are packed, once all that has to be waited for is there."""
        self._then.append(call)

    def _known(self) -> Summing:
        """Wait for what has to be known before messages can be packed; often that is nothing."""
        unknown, self._unknown = self._unknown, []
        events, self._events = self._events, []
        if unknown:
            words = self._buffers.take(8 * len(unknown))
            totals = [message.total for message in unknown if message.total is not None]
            places = [words[8 * i : 8 * i + 8] for i in range(len(unknown))]
            events.append(self._streams.download(list(zip(places, totals, strict=True))))
        yield from self.landed(events)
        if unknown:
            for message, length in zip(unknown, words[: 8 * len(unknown)].view(np.uint64), strict=True):
                message.size = min(int(length), message.buffer.size)
            self._buffers.give(words)
        calls, self._then = self._then, []
        for call in calls:
            call()

    def fetch(self, message: Encoded, out: ByteArray) -> int:
        """Schedule a copy of a message to the beginning of ``out`` by :meth:`settle`; return its bytes."""
        assert message.size is not None
        source = message.buffer[: message.size]
        if self._fetched:
            to, before = self._fetched[-1]
            step = source.ptr - before.ptr
            # One copy for what lies alike on both sides.
            if before.nbytes <= step < before.nbytes + ALIGN and _address(out) - _address(to) == step:
                size = step + source.nbytes
                self._fetched[-1] = to, DeviceArray(source.runtime, before.ptr, size, np.uint8, before.owner)
                return message.size
        self._fetched.append((out, source))
        return message.size

    def settle(self) -> Summing:
        """Wait until the device has done all that was put on the queue, and what is fetched is here.

        Raises:
            WireError: a payload is malformed, or a message damaged.
        """
        if not self.busy:
            return
        word = self._buffers.take(4)
        copies = [(to[: source.nbytes], source) for to, source in self._fetched]
        event = self._streams.download([*copies, (word[:4], self.queue.status.view(np.uint8))])
        yield from self.landed([event])
        self._fetched.clear()
        self._there.clear()
        self.busy = False
        code = int(word[:4].view(np.uint32)[0])
        self._buffers.give(word)
        if self._staged is not None and not self._brought:
            self._buffers.give(self._staged)
            self._staged = None
        if code:
            raise WireError(f"malformed payload: {native.kernels().status_text(code)}")

    def landed(self, events: Sequence[Event]) -> Summing:
        """Return when the device has come to ``events``."""
        if events and not self._link.ordered:
            yield self._link.after(events)
        for event in events:  # where exchanges have one order, nothing may come between
            event.wait()

    def drain(self) -> None:
        """Drain the stream after a failure: let all started work end, whose buffers others will use."""
        with suppress(Exception):  # a device that fails at this has said so before
            self._streams.drain()
        self._fetched.clear()
        self._there.clear()
        self._unknown.clear()
        self._events.clear()
        self._then.clear()

    # -- to the device -------------------------------------------------------------------------------

    def _upload(self, messages: Sequence[ByteArray]) -> None:
        """Start to copy messages that lie one after another in pinned memory."""
        if not messages:
            return
        addresses = [_address(message) for message in messages]
        first, size = addresses[0], addresses[-1] + messages[-1].size - addresses[0]
        there = self.queue.empty(size)
        self.queue.runtime.copy(there.ptr, first, size, self.queue.stream)
        self.busy = True
        for message, address in zip(messages, addresses, strict=True):
            self._there[address] = there[address - first : address - first + message.size]

    def there(self, message: ByteArray) -> DeviceArray:
        """Return the device memory of an uploaded message."""
        return self._there[_address(message)]

    # -- arrays, as they are -------------------------------------------------------------------------

    def bring(self, sources: Sequence[DeviceArray]) -> list[Array]:
        """Start to copy arrays to pinned memory, where they are when messages are packed."""
        staged = self._buffers.take(sum(aligned(source.nbytes) for source in sources))
        arrays: list[Array] = []
        at = 0
        for source in sources:
            arrays.append(staged[at : at + source.nbytes].view(source.dtype))
            at += aligned(source.nbytes)
        copies = [(a.view(np.uint8), s.view(np.uint8)) for a, s in zip(arrays, sources, strict=True)]
        self.wait_for(self._streams.download(copies))
        self._brought = [(to, source) for source, (to, _) in zip(sources, copies, strict=True)]
        self._staged = staged
        return arrays

    def take_back(self) -> None:
        """Start to copy the arrays that :meth:`bring` brought to where they came from, with their new values."""
        for data, target in self._brought:
            self._streams.upload(target, data)
            self.busy = True
        self._brought = []


def _device_tasks(tasks: Sequence[ReduceTask]) -> list[Any]:
    """Return the tasks whose work a device does; they come first."""
    return [task for task in tasks if isinstance(task, DeviceReduceTask)]


def _address(data: ByteArray) -> int:
    address: int = data.__array_interface__["data"][0]
    return address

"""Send and receive the messages of an operation on a device's memory, each when it is ready.

An encoded message becomes ready when an event says so: then its bytes are in pinned memory, and may be sent. A message
that arrives is pinned, too, and the host reads its header and the beginning of its payload there. A transport that
takes device pointers sends from the device's memory and receives in it; only the bytes that the host reads are copied.

    encode -> event -> copy -> event -> send        receive -> copy -> decode -> event -> buffers given back

Nothing here waits: the engine polls, and :meth:`DeviceMailbox.poll` does the work that has become possible.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from hybridcomp import native, wire
from hybridcomp.arrays import ByteArray
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.device.driver import HOLDERS, driver_of
from hybridcomp.codecs.device.messages import (
    HEAD_BYTES,
    OPENED_BYTES,
    Encoded,
    head_of,
    open_message,
    parse_opened,
)
from hybridcomp.collectives.device.streams import StreamPair, StreamPool
from hybridcomp.collectives.execution.steps import Pending, Ready, Steps
from hybridcomp.collectives.stats import Call
from hybridcomp.collectives.transport.mailbox import Incoming, Mailbox
from hybridcomp.collectives.transport.transport import Transport
from hybridcomp.device import DeviceArray, Event, Queue
from hybridcomp.errors import WireError
from hybridcomp.wire import Header

DECODES = "decode"  # forks of an operation's queue that read messages
_NOTHING = np.zeros(1, np.uint8)
# Bytes: a message of unknown length is copied with its length up to here, or if its room is hardly more; else after.
_AT_ONCE = 1 << 16


class Outgoing:
    """Outgoing message that the device is writing.

    Attributes:
        buffer: room for the message in the device's memory.
        nbytes: bytes of the message; None until they are known.
        odd: whether to send one byte more where their number is even.
        then: functions called once the message is ready, after it was sent.
        fault: fault that the device had found in the messages it is made of, once it is ready; 0 for none.
    """

    def __init__(self, streams: StreamPair, encoded: Encoded, codec: Codec, *, direct: bool) -> None:
        """Copy a message of a codec to pinned memory when the device has written it.

        If ``direct``, copy only the bytes that the host reads, in case the message is decoded here: none if it knows
        them.
        """
        self.buffer = encoded.buffer
        self.nbytes = encoded.size
        self.odd = False
        self.then: list[Callable[[], None]] = []
        self.fault = 0
        self._streams, self._direct = streams, direct
        self._status = streams.pool.pinned.take(4)
        self._total = encoded.total  # kept until it is copied, if it is
        self._word: ByteArray | None = None
        self._host: ByteArray | None = None
        self._ready = False
        self._known = encoded.size is not None and driver_of(codec.wire_id).head(codec) is not None
        queue, opens = streams.queue, direct and codec.wire_id in HOLDERS
        self._opened = open_message(queue, encoded.buffer, queue.shown(OPENED_BYTES)) if opens else None
        room = encoded.buffer.size
        if encoded.total is None or direct or room <= _AT_ONCE or driver_of(codec.wire_id).fills_bound(codec):
            self._event = self._fetch(room if encoded.size is None else encoded.size)
        else:
            self._word = streams.pool.pinned.take(8)
            self._event = streams.download([(self._word[:8], encoded.total)])

    def done(self) -> bool:
        """Tell whether :meth:`wire` can be sent."""
        if self._ready:
            return True
        if not self._event.done():
            return False
        if self._word is not None:
            self.nbytes = min(int(self._word[:8].view(np.uint64)[0]), self.buffer.size)
            self._streams.pool.pinned.give(self._word)
            self._word = self._total = None
            self._event = self._fetch(self.nbytes)
            return False
        if self.nbytes is None:  # the device has written the header, too
            assert self._host is not None
            head = self._host if self._opened is None else self._host[8:]
            self.nbytes = wire.HEADER_BYTES + wire.peek(head[: wire.HEADER_BYTES], self.buffer.size).payload
        self._ready = True
        self.fault = int(self._status[:4].view(np.uint32)[0])
        return True

    @property
    def here(self) -> bool:
        """Tell whether what the host reads of the message is in its memory."""
        return self._ready and self._host is not None

    @property
    def events(self) -> Sequence[Ready]:
        """Return the events that :meth:`wire` has to wait for."""
        return (self,)

    def wire(self) -> Any:
        """Return the bytes in the form that transports take."""
        assert self.nbytes is not None
        size, buffer = self.nbytes | self.odd, self.buffer
        if self._direct:  # behind the message there is room for the byte that makes it odd
            return DeviceArray(buffer.runtime, buffer.ptr, size, np.uint8, buffer.owner)
        assert self._host is not None
        return self._host[:size]

    def head(self, header: Header) -> bytes:
        """Return the beginning of the payload, which drivers read."""
        assert self._host is not None
        if self._opened is not None:
            return parse_opened(self._host, self.buffer.size)[1]
        return head_of(header, self._host)

    def release(self) -> None:
        """Release the buffers of a message that has been sent."""
        if self._host is not None:
            self._streams.pool.pinned.give(self._host)
        self._streams.pool.pinned.give(self._status)
        self._host = None

    def _fetch(self, nbytes: int) -> Event:
        source, want = self.buffer, nbytes
        status = (self._status[:4], self._streams.queue.status.view(np.uint8))
        if self._direct and self._known:
            return self._streams.download([status])
        if self._opened is not None:
            source, want = self._opened, OPENED_BYTES
        elif self._direct:
            want = min(HEAD_BYTES, nbytes)
        self._host = self._streams.pool.pinned.take(want + 1)  # one for an odd message
        return self._streams.download([(self._host[:want], source), status])


@dataclass(slots=True)
class Arriving(Incoming):
    """Incoming message of an operation on a device's memory.

    Attributes:
        whole: buffer of the pool that ``buffer`` is the beginning of: pinned, or the device's; None for a part of what
            has come with it.
        opened: copied result of :func:`open_message` for a message in the device's memory; None until it is there, and
            for others.
        foreseen: header and beginning of the payload that it must have, where these are known before it comes; what
            has come is compared with them before anything of it leaves, or the operation ends.
        compare: function that compares such a message, of which ``opened`` is there, with them.
        opening: queue of the kernel that checks it in the device's memory.
        users: number of uses that still need the buffer: the decoder, and each time that it is sent on.
    """

    buffer: Any
    whole: Any = None
    opened: ByteArray | None = None
    foreseen: tuple[Header, bytes] | None = None
    compare: Callable[[], None] | None = None
    opening: Queue | None = None
    users: int = 1

    def wire(self) -> Any:
        """Return the buffer in the form that transports take."""
        return self.buffer

    def come(self, transport: Transport) -> None:
        """Take a message that has come to where it lies."""
        if self.whole is None:
            self.buffer = transport.received(self.request, self.buffer)
        if self.foreseen is not None and self.buffer.size != wire.HEADER_BYTES + self.foreseen[0].payload:
            self.foreseen = None  # its header says what it is

    def see(self) -> tuple[Header, bytes]:
        """Return the header and the beginning of the payload, which drivers read, of a message that has arrived.

        Raises:
            WireError: as in :func:`hybridcomp.wire.peek`; or the message, in the device's memory, is damaged.
        """
        if self.foreseen is not None:
            return self.foreseen
        if self.opened is not None:
            return parse_opened(self.opened, self.buffer.size)
        header = wire.peek(self.buffer)
        return header, head_of(header, self.buffer)


@dataclass(slots=True)
class Passing:
    """Received message that is sent on."""

    source: Arriving
    nbytes: int
    then: list[Callable[[], None]] = field(default_factory=list)

    def done(self) -> bool:
        """Return True: the message is ready."""
        return True

    def wire(self) -> Any:
        """Return the bytes in the form that transports take."""
        return self.source.buffer[: self.nbytes]


@dataclass(slots=True)
class Own:
    """This rank's own message, to be summed: its buffer, and, once it is sent, its header and head."""

    buffer: DeviceArray
    header: Header | None = None
    head: bytes = b""

    def done(self) -> bool:
        """Tell whether the message can be summed: its header is known."""
        return self.header is not None

    @property
    def events(self) -> Sequence[Ready]:
        """Return the events that the sum has to wait for."""
        return (self,)


class _Opening:
    """Event that received messages' CRCs are checked on the device, and their beginnings copied to the host.

    Messages that are foreseen are not waited for: they may be read in the device's order, and are compared later.
    """

    def __init__(
        self,
        streams: StreamPair,
        transport: Transport,
        messages: list[Arriving],
        drop: Callable[[Arriving], None],
    ) -> None:
        self._streams, self._transport, self._messages, self._drop = streams, transport, messages, drop
        self._event: Event | None = None
        self._waits = True

    def done(self) -> bool:
        if self._event is None:
            copies, later = [], []
            for message in self._messages:
                message.come(self._transport)
                message.opened = self._streams.pool.pinned.take(OPENED_BYTES)
                queue = self._streams.queue.fork(DECODES)
                opened = open_message(queue, message.buffer, queue.shown(OPENED_BYTES))
                message.opening = queue
                copies.append((message.opened[:OPENED_BYTES], opened))
                if message.foreseen is not None:
                    message.users += 1  # until it is compared
                    later.append(message)
            self._event = self._streams.download(copies, partial(self._compare, later) if later else None)
            self._copies = copies  # keeps sources and targets alive until they are copied
            self._waits = len(later) < len(self._messages)
        return not self._waits or self._event.done()

    def _compare(self, messages: Sequence[Arriving]) -> None:
        for message in messages:
            assert message.compare is not None
            message.compare()
            self._drop(message)


class DeviceMailbox(Mailbox):
    """Messages of one operation on a device's memory; owns the operation's stream pair until :meth:`finish`."""

    def __init__(self, transport: Transport, call: Call, streams: StreamPair, *, direct: bool) -> None:
        super().__init__(transport, call)
        self.streams = streams
        self.direct = direct
        self._requests: list[Any] = []
        self._peers: list[int] = []
        self._waiting: deque[tuple[Outgoing | Passing, list[int], int]] = deque()
        self._sent: deque[tuple[list[Any], Outgoing | Passing]] = deque()
        self._read: list[Arriving] = []
        self._retiring: deque[tuple[Event, list[Arriving]]] = deque()

    # -- sends ---------------------------------------------------------------------------------------

    def send(self, message: Any, peers: list[int], tag: int, *, keep: bool = False) -> None:
        """Send a message when it is ready."""
        self._transport.announce(len(peers))
        self._waiting.append((message, peers, tag))

    def forward(self, message: Any, peers: list[int], tag: int) -> None:
        """Send on a message that arrived."""
        message.source.users += 1
        self._transport.announce(len(peers))
        self._waiting.append((message, peers, tag))

    # -- receives ------------------------------------------------------------------------------------

    def inbox(self, nbytes: int) -> Arriving:
        """Return a buffer for a message of at most ``nbytes``."""
        pool = self.streams.pool
        whole: Any = pool.memory.take(nbytes) if self.direct else pool.pinned.take(nbytes)
        if not self.direct:
            whole[: wire.HEADER_BYTES] = 0  # as in the base class
        return Arriving(-1, whole[:nbytes], whole=whole)

    def receive(self, nbytes: int, peer: int, tag: int) -> Arriving:
        """Start to receive a message of at most ``nbytes``."""
        if self._transport.joint is not None:
            # It is read where it comes with others: on the device, or in pinned memory that is copied there at once.
            nothing: Any = np.broadcast_to(_NOTHING, nbytes)
            if self.direct:
                nothing = DeviceArray(self.streams.pool.runtime, 0, nbytes, np.uint8, None)
            message = Arriving(peer, nothing)
            message.request = self._transport.irecv(message.buffer, peer, tag, elsewhere=True)
            return message
        message = self.inbox(nbytes)
        message.peer = peer
        message.request = self._transport.irecv(message.wire(), peer, tag)
        return message

    def arrival(self, messages: Sequence[Any]) -> Pending:
        """Return the conditions to wait for until all of ``messages`` are here and their headers can be read."""
        events: list[Ready] = []
        if messages and self.direct:
            events.append(_Opening(self.streams, self._transport, list(messages), self._drop))
        return super().arrival(messages)._replace(events=events, poll=self.poll)

    def used(self, message: Any) -> None:
        """Mark a message as read for the last time by the stream's work up to now."""
        if message.whole is None:
            self._drop(message)  # what has come together is kept until the end
        else:
            self._read.append(message)

    # -- progress ------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Post the sends that have become ready, in order, and give back buffers that are no longer in use."""
        moved = False
        for message, *_ in self._waiting:
            message.done()  # all bytes whose length is known by now are fetched beside each other
        while self._waiting and self._waiting[0][0].done():
            message, peers, tag = self._waiting.popleft()
            if isinstance(message, Outgoing):
                self._check(message.fault)  # no rank gets a sum of damaged messages
            data = message.wire()
            assert message.nbytes is not None
            self._call.wire_bytes += message.nbytes * len(peers)
            self._call.between_bytes += message.nbytes * sum(self._transport.away[peer] for peer in peers)
            requests = [self._transport.isend(data, peer, tag) for peer in peers]
            self._transport.announce(-len(peers))
            self._requests += requests
            self._peers += peers
            self._sent.append((requests, message))
            for follow in message.then:
                follow()
            message.then.clear()
            moved = True
        if self._read:
            self._retiring.append((self.streams.record(), self._read))
            self._read = []
        while self._retiring and self._retiring[0][0].done():
            for arrived in self._retiring.popleft()[1]:
                self._drop(arrived)
        while self._sent and _tested(self._sent[0][0]):
            self._gone(self._sent.popleft()[1])
        return moved

    def finish(self) -> Steps:
        """Wait until all is sent and decoded, give all buffers back, and check the decoders' status.

        Raises:
            WireError: a message was damaged.
        """
        yield Pending([], [], events=[_Empty(self._waiting)], poll=self.poll)
        yield Pending(self._requests, self._peers, poll=self.poll, sends=True)
        word = self.streams.pool.pinned.take(4)
        queue = self.streams.queue
        last = self.streams.download([(word[:4], queue.status.view(np.uint8))])
        yield Pending([], [], events=[last], poll=self.poll)
        # All sends and all of the device's work are done, also where poll has not seen that yet.
        for _, message in self._sent:
            self._gone(message)
        for _, arrived in self._retiring:
            for one in arrived:
                self._drop(one)
        code = int(word[:4].view(np.uint32)[0])
        pool = self.streams.pool
        pool.pinned.give(word)
        self.streams.give()
        self._check(code)

    def _check(self, fault: int) -> None:
        """Raise WireError if the device has found a fault."""
        if fault:
            raise WireError(
                f"{self._call.op} on axis {self._call.axis!r}: rank {self._transport.rank} got a damaged "
                f"message: its CRC is wrong, or {native.kernels().status_text(fault)}"
            )

    def _gone(self, message: Outgoing | Passing) -> None:
        if isinstance(message, Passing):
            self._drop(message.source)
        else:
            message.release()

    def _drop(self, message: Arriving) -> None:
        message.users -= 1
        if message.users:
            return
        pool: StreamPool = self.streams.pool
        if isinstance(message.whole, DeviceArray):
            pool.memory.give(message.whole)
        elif message.whole is not None:
            pool.pinned.give(message.whole)
        if message.opened is not None:
            pool.pinned.give(message.opened)
            message.opened = None


def _tested(requests: Sequence[Any]) -> bool:
    """Tell whether all requests have ended; without a generator, since it is asked often."""
    for request in requests:  # noqa: SIM110
        if not request.Test():
            return False
    return True


class _Empty:
    """Event that no message waits to be sent any more."""

    def __init__(self, waiting: deque[Any]) -> None:
        self._waiting = waiting

    def done(self) -> bool:
        return not self._waiting

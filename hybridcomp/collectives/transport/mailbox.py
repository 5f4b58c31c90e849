"""Hold the messages in flight of one operation, and the buffers that they use."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hybridcomp import wire
from hybridcomp.arrays import ByteArray
from hybridcomp.collectives.execution.steps import Pending, Ready, Steps
from hybridcomp.collectives.failure.watchdog import inside_mpi
from hybridcomp.collectives.stats import Call
from hybridcomp.collectives.transport.transport import Transport


class Sealed(NamedTuple):
    """Encoded message in a pool buffer. A message that a device encodes has the same methods, and is ready later."""

    buffer: ByteArray
    nbytes: int

    def wire(self) -> ByteArray:
        """Return the message's bytes in the form that transports take."""
        return self.buffer[: self.nbytes]

    @property
    def events(self) -> Sequence[Ready]:
        """Return the events that :meth:`wire` has to wait for: none."""
        return ()


@dataclass(slots=True)
class Incoming:
    """Incoming message.

    Attributes:
        peer: rank that sends it.
        buffer: room for the message.
        request: request of the transport; None where another party receives the message.
        kept: whether it is sent on from its place.
        used: whether it was read for the last time.
    """

    peer: int
    buffer: ByteArray
    request: Any = None
    kept: bool = field(default=False, kw_only=True)
    used: bool = field(default=False, kw_only=True)

    def wire(self) -> ByteArray:
        """Return the buffer in the form that transports take."""
        return self.buffer


class Mailbox:
    """Messages of one operation: sends and receives in flight, and the buffers that they use.

    Buffers go back to the pool as soon as they are not needed: a few that stay in the cache serve a large transfer.
    """

    def __init__(self, transport: Transport, call: Call) -> None:
        self._transport = transport
        self._call = call
        self._sends: deque[_Sent] = deque()
        self._kept: list[_Sent] = []
        self._inbox: list[Incoming] = []

    def send(self, message: Sealed, peers: list[int], tag: int, *, keep: bool = False) -> None:
        """Send a message to each of ``peers``; its buffer goes back to the pool.

        A caller that reads the message after sending another one has to ``keep`` it until :meth:`finish`.
        """
        sent = self._post(message, peers, tag, message.buffer)
        (self._kept if keep else self._sends).append(sent)
        while self._sends and self._settled(self._sends[0]):
            self._sends.popleft()

    def forward(self, message: Sealed, peers: list[int], tag: int) -> None:
        """Send bytes of a buffer that this mailbox already keeps."""
        self._kept.append(self._post(message, peers, tag, None))

    def _post(self, message: Sealed, peers: list[int], tag: int, buffer: ByteArray | None) -> _Sent:
        data = message.wire()
        self._call.wire_bytes += data.size * len(peers)
        self._call.between_bytes += data.size * sum(self._transport.away[peer] for peer in peers)
        if self._transport.near:
            self._call.shared_bytes += data.size * len(self._transport.near.intersection(peers))
        return _Sent([self._transport.isend(data, peer, tag) for peer in peers], peers, buffer)

    def _settled(self, sent: _Sent) -> bool:
        """Return a buffer to the pool if its message has been sent; tell whether that was so."""
        for request in sent.requests:
            with inside_mpi():
                if not request.Test():
                    return False
        if sent.buffer is not None:
            self._transport.give(sent.buffer)
        return True

    def inbox(self, nbytes: int) -> Incoming:
        """Return a buffer for a message of at most ``nbytes``, which another party receives into it."""
        buffer = self._transport.take(nbytes)
        # Otherwise a message too short for a header would leave an earlier header to be read.
        buffer[: wire.HEADER_BYTES] = 0
        message = Incoming(-1, buffer)
        self._inbox.append(message)
        return message

    def receive(self, nbytes: int, peer: int, tag: int) -> Incoming:
        """Start to receive a message of at most ``nbytes``."""
        message = self.inbox(nbytes)
        message.peer = peer
        message.request = self._transport.irecv(message.wire(), peer, tag, elsewhere=True)
        return message

    def arrival(self, messages: Sequence[Incoming]) -> Pending:
        """Return the conditions to wait for until all of ``messages`` are here and can be opened."""
        coming = [message for message in messages if message.request is not None]
        return Pending([message.request for message in coming], [message.peer for message in coming])

    def read(self, message: Incoming) -> ByteArray:
        """Return the bytes of a message that is here; they are valid until it is :meth:`used`."""
        data: ByteArray = self._transport.received(message.request, message.buffer)
        return data

    def used(self, message: Incoming) -> None:
        """Release a message that will not be read again, except to be sent on."""
        if not message.kept:
            self._put_back(message)

    def _put_back(self, message: Incoming) -> None:
        message.used = True
        self._transport.give(message.buffer)

    def finish(self) -> Steps:
        """Wait until all messages are sent, and give the buffers back."""
        sends = [*self._sends, *self._kept]
        requests = [request for s in sends for request in s.requests]
        yield Pending(requests, [peer for s in sends for peer in s.peers], sends=True)
        for message in self._inbox:
            if not message.used:
                self._put_back(message)
        self._inbox.clear()
        for sent in sends:
            if sent.buffer is not None:
                self._transport.give(sent.buffer)
        self._sends.clear()
        self._kept.clear()


class _Sent(NamedTuple):
    """Message in flight, and the buffer to give back when it has arrived."""

    requests: list[Any]
    peers: list[int]
    buffer: ByteArray | None

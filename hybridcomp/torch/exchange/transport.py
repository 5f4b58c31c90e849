"""Collect the messages of operations that travel together, until an exchange takes them."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from typing import Any

from hybridcomp.arrays import ByteArray
from hybridcomp.collectives.transport.pools import Pool
from hybridcomp.collectives.transport.transport import Transport
from hybridcomp.errors import MismatchError, RemoteError
from hybridcomp.schedules.topology import Topology
from hybridcomp.torch.exchange.packing import FAILED, pack, pack_failure, packed_size, unpack


@dataclass(slots=True, eq=False)
class _Message:
    """A message to be sent, or room for one; a request with MPI's ``Test``."""

    tag: int
    data: ByteArray
    done: bool = False
    elsewhere: bool = False

    def Test(self, status: Any = None, /) -> bool:
        """Tell whether it was packed, or is here."""
        return self.done


class BatchTransport(Transport):
    """The messages of one batch of operations.

    Attributes:
        unwritten: messages that follow when a device has written them.
    """

    def __init__(self, topology: Topology, rank: int, pool: Pool) -> None:
        super().__init__(topology, rank, pool=pool)
        self.unwritten = 0
        self._numbers = itertools.count(1)
        self._sends: list[list[_Message]] = [[] for _ in topology.hosts]
        self._receives: list[dict[int, deque[_Message]]] = [{} for _ in topology.hosts]

    def tag(self) -> int:
        """Return the next tag: the same on all ranks, which start the operations of a batch in one order."""
        return next(self._numbers)

    def isend(self, data: ByteArray, peer: int, tag: int) -> _Message:
        """Queue bytes for the next exchange, which must stay unchanged until then."""
        message = _Message(tag, data)
        self._sends[peer].append(message)
        return message

    def irecv(self, data: ByteArray, peer: int, tag: int, *, elsewhere: bool = False) -> _Message:
        """Wait for at most as many bytes as ``data`` has: see :meth:`Transport.irecv`."""
        message = _Message(tag, data, elsewhere=elsewhere)
        self._receives[peer].setdefault(tag, deque()).append(message)
        return message

    def received(self, request: _Message, data: ByteArray) -> ByteArray:
        """Return where the bytes of a message are: among those that came with it."""
        return request.data

    def announce(self, messages: int) -> None:
        """Take notice that as many messages follow when a device has written them; negative: that they have come."""
        self.unwritten += messages

    # -- an exchange ---------------------------------------------------------------------------------

    def counts(self) -> list[int]:
        """Return the bytes that the queued messages to each rank take."""
        return [sum(packed_size(message.data.size) for message in messages) for messages in self._sends]

    def rooms(self) -> list[int]:
        """Return the most bytes that each rank may send for the messages that this one waits for."""
        return [
            sum(packed_size(message.data.size) for queue in tags.values() for message in queue)
            for tags in self._receives
        ]

    def pack(self, out: ByteArray) -> None:
        """Write the queued messages, those to rank 0 first, and take them for sent."""
        at = 0
        for messages, nbytes in zip(self._sends, self.counts(), strict=True):
            pack([(message.tag, message.data) for message in messages], out[at : at + nbytes])
            at += nbytes
            for message in messages:
                message.done = True
            messages.clear()

    def pack_failure(self, text: str, counts: list[int], out: ByteArray) -> None:
        """Write an error's text for each rank, in place of the queued messages."""
        at = 0
        for messages, nbytes in zip(self._sends, counts, strict=True):
            pack_failure(text, out[at : at + nbytes])
            at += nbytes
            messages.clear()

    def deliver(self, peer: int, data: ByteArray) -> None:
        """Hand the bytes of a rank to the receives that wait for them; their views of it are good until the batch ends.

        Raises:
            WireError: the bytes are no packed messages.
            MismatchError: no receive waits for a message, or it has less room.
            RemoteError: the rank has failed.
        """
        waiting = self._receives[peer]
        for tag, raw in unpack(data):
            if tag == FAILED:
                raise RemoteError(f"rank {peer} has failed: {bytes(raw).decode(errors='replace')}")
            queue = waiting.get(tag)
            if not queue or raw.size > queue[0].data.size:
                room = f"has room for {queue[0].data.size}" if queue else "expects none"
                raise MismatchError(
                    f"rank {peer} sent a message of {raw.size} bytes by tag {tag}, rank {self.rank} {room}"
                )
            message = queue.popleft()
            if message.elsewhere:
                message.data = raw
            else:
                message.data[: raw.size] = raw
            message.done = True

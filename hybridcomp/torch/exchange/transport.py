"""Collect the messages of operations that travel together, until an exchange takes them."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hybridcomp.arrays import ByteArray
from hybridcomp.codecs.device.messages import copy_bytes
from hybridcomp.collectives.device.joint import Joint
from hybridcomp.collectives.device.streams import StreamPair
from hybridcomp.collectives.transport.pools import Pool
from hybridcomp.collectives.transport.transport import Transport
from hybridcomp.device import DeviceArray, Queue
from hybridcomp.errors import MismatchError, RemoteError, WireError
from hybridcomp.schedules.topology import Topology
from hybridcomp.torch.exchange.lanes import Parcel
from hybridcomp.torch.exchange.packing import (
    FAILED,
    pack_failure,
    packed_size,
    padded,
    table_of,
    table_size,
    unpack,
)
from hybridcomp.torch.exchange.staging import GATHERS, DeviceStaging, HostStaging, Staging

_COMPILED = 1 << 32  # tag of what compiled operations send a rank, packed in the same way


@dataclass(slots=True, eq=False)
class _Message:
    """A message to be sent, or room for one; a request with MPI's ``Test``."""

    tag: int
    data: Any
    done: bool = False
    elsewhere: bool = False

    def Test(self, status: Any = None, /) -> bool:
        """Tell whether it was packed, or is here."""
        return self.done


class _Turn:
    """Wait for a number of exchanges; a request with MPI's ``Test``."""

    def __init__(self, transport: BatchTransport, exchanges: int) -> None:
        self._transport, self._exchanges = transport, exchanges

    def Test(self, status: Any = None, /) -> bool:
        """Tell whether there have been so many."""
        return self._transport.exchanges >= self._exchanges


class BatchTransport(Transport):
    """The messages of one batch of operations.

    Attributes:
        exchanges: exchanges that have taken messages.
        unwritten: messages that follow when a device has written them.
        staging: memory of exchanges.
        joint: work of the operations on a device.
        near: ranks whose messages go by parcels.
        compiled: the compiled operations of the batch; None where it has none.
    """

    joint: Joint

    def __init__(
        self,
        topology: Topology,
        rank: int,
        pool: Pool,
        staging: Staging | None = None,
        near: Collection[int] = (),
        compiled: Any = None,
    ) -> None:
        """Take messages from the buffers of exchanges, and copy them there, by ``staging``; None for the pool's.

        What ranks that are ``near`` send, and are sent, goes by parcels, and takes no room in these buffers.
        """
        super().__init__(topology, rank, direct=isinstance(staging, DeviceStaging), pool=pool)
        self.near = frozenset(near)
        self.compiled = compiled
        self.staging: Staging = staging or HostStaging(pool)
        self.joint = Joint()
        self.exchanges = 0
        self.unwritten = 0
        self._pair: StreamPair | None = None
        self._numbers = itertools.count(1)
        self._compiled_bytes = [0] * len(
            topology.hosts
        )  # bytes that compiled operations send each rank in the next exchange
        self._most = self._compiled_bytes  # and may get from it
        self._sends: list[list[_Message]] = [[] for _ in topology.hosts]
        self._receives: list[dict[int, deque[_Message]]] = [{} for _ in topology.hosts]

    def tag(self) -> int:
        """Return the next tag: the same on all ranks, which start the operations of a batch in one order."""
        return next(self._numbers)

    def isend(self, data: Any, peer: int, tag: int) -> _Message:
        """Queue bytes for the next exchange, which must stay unchanged until then."""
        message = _Message(tag, data)
        self._sends[peer].append(message)
        return message

    def irecv(self, data: Any, peer: int, tag: int, *, elsewhere: bool = False) -> _Message:
        """Wait for at most as many bytes as ``data`` has: see :meth:`Transport.irecv`."""
        message = _Message(tag, data, elsewhere=elsewhere)
        self._receives[peer].setdefault(tag, deque()).append(message)
        return message

    def received(self, request: _Message, data: Any) -> Any:
        """Return where the bytes of a message are: among those that came with it."""
        return request.data

    def announce(self, messages: int) -> None:
        """Take notice that as many messages follow when a device has written them; negative: that they have come."""
        self.unwritten += messages

    def turn(self, exchanges: int) -> _Turn:
        """Return a request that ends once there have been so many exchanges, on all ranks alike."""
        return _Turn(self, exchanges)

    # -- an exchange ---------------------------------------------------------------------------------

    def collect(self) -> None:
        """Queue what the compiled operations send in the next exchange, and what they wait for."""
        if self.compiled is None:
            return
        self._compiled_bytes, self._most = self.compiled.collect()

    def counts(self) -> list[int]:
        """Return the bytes that the queued messages to each rank take in the exchange's buffer."""
        return [
            packed_size([message.data.size for message in messages], compiled)
            if (messages or compiled) and peer not in self.near
            else 0
            for peer, (messages, compiled) in enumerate(zip(self._sends, self._compiled_bytes, strict=True))
        ]

    def rooms(self) -> list[int]:
        """Return the most bytes in an exchange's buffer that each rank may send for the messages waited for here."""
        return [
            0
            if peer in self.near
            else packed_size([message.data.size for queue in tags.values() for message in queue], compiled)
            for peer, (tags, compiled) in enumerate(zip(self._receives, self._most, strict=True))
        ]

    def parcels(self) -> dict[int, Parcel]:
        """Return the queued messages to each rank that is near, to be handed over before :meth:`pack`."""
        return {peer: [(message.tag, message.data) for message in self._sends[peer]] for peer in self.near}

    def pack(self, out: Any, counts: Sequence[int]) -> None:
        """Write the queued messages, those to rank 0 first, and take all for sent.

        Those to one rank go in the order of their tags: devices make them ready in any, and where their sizes are the
        same each time, all of the layout is.

        Args:
            out: buffer of as many bytes as ``counts`` say.
            counts: what :meth:`counts` has returned.
        """
        self.exchanges += 1
        at, copies = 0, []
        for peer, (messages, nbytes) in enumerate(zip(self._sends, counts, strict=True)):
            if nbytes:
                messages.sort(key=_tag_of)
                entries = [(message.tag, message.data.size) for message in messages]
                if self._compiled_bytes[peer]:
                    entries.append((_COMPILED, self._compiled_bytes[peer]))
                table, extents = table_of(entries)
                copies.append((out[at : at + len(table)], np.frombuffer(table, np.uint8)))
                if self._compiled_bytes[peer]:
                    _, begin, end = extents.pop()
                    self.compiled.pack(peer, out[at + begin : at + end], end - begin)
                for message, (_, begin, end) in zip(messages, extents, strict=True):
                    copies.append((out[at + begin : at + end], message.data))
                    if not self.direct:
                        out[at + end : at + begin + padded(end - begin)] = 0
            at += nbytes
        if isinstance(self.staging, DeviceStaging):
            self.staging.gather(out, copies, self.joint, self._queue(self.staging))
        elif copies:
            self.staging.copy(copies)
        for messages in self._sends:
            for message in messages:
                message.done = True
            messages.clear()
        if self.compiled is not None:
            self.compiled.sent()

    def pack_failure(self, text: str, counts: list[int], out: Any) -> None:
        """Write an error's text for each rank, in place of the queued messages."""
        self.exchanges += 1
        said = np.zeros(sum(counts), np.uint8)
        at = 0
        for messages, nbytes in zip(self._sends, counts, strict=True):
            pack_failure(text, said[at : at + nbytes])
            at += nbytes
            messages.clear()
        self.staging.copy([(out, said)])

    def deliver(
        self,
        arrived: Sequence[Any],
        parcels: Mapping[int, Parcel] | None = None,
        heads: Sequence[ByteArray] | None = None,
    ) -> Sequence[ByteArray]:
        """Hand the bytes of all ranks to the receives that wait for them; views of them are good until the batch ends.

        Bytes in a device's memory are ordered after the backend's work, and messages that stay there can be read in
        that order at once. Messages for the host come with what the device does next, and so do tables that are known.

        Args:
            arrived: bytes of each rank in the exchange's buffer.
            parcels: messages of each rank that is near.
            heads: what the beginning of each rank's bytes has to be, with its table; None to read it first.

        Returns:
            The beginnings.

        Raises:
            WireError: the bytes are no packed messages.
            MismatchError: no receive waits for a message, or it has less room.
            RemoteError: a rank has failed.
        """
        known, fetched = heads is not None, dict[int, ByteArray]()
        if isinstance(self.staging, DeviceStaging):
            self.staging.arrive(self._queue(self.staging))
            if heads is not None:
                fetched = self._expect(heads, arrived, self.staging)
        if heads is None:
            heads = self.staging.read(
                [data[: self._head_bytes(peer, data.size)] for peer, data in enumerate(arrived)]
            )
        found: list[ByteArray] = []
        placed: list[tuple[_Message, Any, bool]] = []
        for peer, (head, data) in enumerate(zip(heads, arrived, strict=True)):
            here = (parcels or {}).get(peer)
            if here is None:
                whole = fetched.get(peer, data if known or head.size < data.size else head)
                extents = unpack(head, data.size)
                here = [(tag, whole[begin:end]) for tag, begin, end in extents]
                found.append(head[: table_size(len(extents))] if self.direct else head)
            else:
                found.append(head)
            for tag, raw in here:
                if tag == _COMPILED and self.compiled is not None:
                    self._unpack(peer, raw)
                else:
                    placed.append((self._taken(peer, tag, raw), raw, peer in fetched))
        self._put(placed)
        return found

    def _unpack(self, peer: int, raw: ByteArray) -> None:
        """Hand a rank's messages to the compiled operations."""
        fault = self.compiled.unpack(peer, raw)
        if fault is not None:
            unlike, text = fault
            raise MismatchError(text) if unlike else WireError(f"rank {peer} sent {text}")

    def _taken(self, peer: int, tag: int, raw: Any) -> _Message:
        """Take the receive that waits for a message out of its queue."""
        if tag == FAILED:
            (said,) = [raw] if isinstance(raw, np.ndarray) else self.staging.read([raw])
            raise _failure(peer, said)
        queue = self._receives[peer].get(tag)
        if not queue or raw.size > queue[0].data.size:
            room = f"has room for {queue[0].data.size}" if queue else "expects none"
            raise MismatchError(
                f"rank {peer} sent a message of {raw.size} bytes by tag {tag}, rank {self.rank} {room}"
            )
        return queue.popleft()

    def _put(self, placed: Sequence[tuple[_Message, Any, bool]]) -> None:
        """Put messages where they are waited for: they stay where they are, or are copied.

        Args:
            placed: for each its receive, its bytes, and whether these are still to come.
        """
        copies: list[tuple[Any, Any]] = []
        late: list[tuple[_Message, ByteArray]] = []
        far: list[tuple[_Message, DeviceArray]] = []
        for message, raw, coming in placed:
            ours, theirs = isinstance(message.data, DeviceArray), isinstance(raw, DeviceArray)
            if theirs and not ours:
                far.append((message, raw))
            elif coming:
                late.append((message, raw))
            else:
                if message.elsewhere and ours == theirs:
                    message.data = raw
                else:
                    message.data = message.data[: raw.size]
                    copies.append((message.data, raw))
                message.done = True
        if copies:
            self.staging.copy(copies)
        if far:
            assert isinstance(self.staging, DeviceStaging)
            parts = self.staging.fetch([raw for _, raw in far], self.joint)
            late += [(message, part) for (message, _), part in zip(far, parts, strict=True)]
        if late:
            self.joint.download((), partial(_come, late))

    def close(self) -> None:
        """End the work on a device: nothing of it is under way."""
        if self._pair is not None:
            self._pair.give()
            self._pair = None

    def _queue(self, staging: DeviceStaging) -> Queue:
        """Return the queue of what exchanges copy in a device's memory, beside those of the operations."""
        if self._pair is None:
            self._pair = self.joint.pair(staging.runtime, ())
        return self._pair.queue

    def _expect(
        self, heads: Sequence[ByteArray], arrived: Sequence[Any], staging: DeviceStaging
    ) -> dict[int, ByteArray]:
        """Compare the beginnings of what has come with those that are expected, once the host has them.

        Returns:
            Host memory that all bytes come to of the ranks whose messages are for the host alone.
        """
        queue = self._queue(staging)
        came: dict[int, ByteArray] = {}
        alone = [
            peer
            for peer, data in enumerate(arrived)
            if data.size and self._head_bytes(peer, data.size) == data.size
        ]
        fetched = dict(zip(alone, staging.fetch([arrived[peer] for peer in alone], self.joint), strict=True))
        shown: list[tuple[ByteArray, DeviceArray]] = []
        for peer, (head, data) in enumerate(zip(heads, arrived, strict=True)):
            if peer in fetched:
                came[peer] = fetched[peer]
            elif head.size:
                place, came[peer] = queue.shown(head.size), self.joint.pinned(head.size)
                copy_bytes(queue.fork(GATHERS), data, place, head.size)
                shown.append((came[peer], place))
        if came:
            self.joint.download(shown, partial(self._compare, heads, came, arrived))
        return fetched

    def _compare(
        self, heads: Sequence[ByteArray], came: Mapping[int, ByteArray], arrived: Sequence[Any]
    ) -> None:
        for peer, part in came.items():
            if np.array_equal(part[: heads[peer].size], heads[peer]):
                continue
            (whole,) = self.staging.read([arrived[peer]])
            for tag, begin, end in unpack(whole, whole.size):
                if tag == FAILED:
                    raise _failure(peer, whole[begin:end])
            raise MismatchError(f"rank {peer} sent rank {self.rank} messages unlike those of earlier batches")

    def _head_bytes(self, peer: int, nbytes: int) -> int:
        """Return the bytes at the beginning of a rank's that hold its table: all of them, where the host takes all."""
        if not self.direct:
            return nbytes
        waiting = [message for queue in self._receives[peer].values() for message in queue]
        if not [message for message in waiting if isinstance(message.data, DeviceArray)]:
            return nbytes
        return min(nbytes, table_size(len(waiting)))


def _come(late: Sequence[tuple[_Message, ByteArray]]) -> None:
    """Hand over messages whose bytes have come."""
    for message, part in late:
        if message.elsewhere:
            message.data = part
        else:
            message.data = message.data[: part.size]
            message.data[:] = part
        message.done = True


def _tag_of(message: _Message) -> int:
    return message.tag


def _failure(peer: int, said: ByteArray) -> RemoteError:
    return RemoteError(f"rank {peer} has failed: {bytes(said).decode(errors='replace')}")

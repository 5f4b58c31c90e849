"""Send and receive bytes between ranks: tagged, on a communicator of our own, with pooled buffers."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mpi4py import MPI

from hybridcomp import wire
from hybridcomp.arrays import ByteArray
from hybridcomp.collectives.execution.post_queue import PostQueue
from hybridcomp.collectives.execution.progress import Pending, Ready, Steps, engine
from hybridcomp.collectives.failure.contact import Contacts
from hybridcomp.collectives.stats import Call
from hybridcomp.collectives.transport.arena import ArenaPool
from hybridcomp.collectives.transport.pools import Pool
from hybridcomp.collectives.transport.shared_memory import SharedMemoryPeers, heap
from hybridcomp.errors import MismatchError
from hybridcomp.schedules.topology import Topology

_DESCRIBED_FROM = 1 << 12  # bytes: shorter messages travel as they are
_MOST_TAGS = 64  # of one operation
_TAGS = 30_000  # below MPI's guaranteed 32767; a tag comes round after as many operations


class Transport:
    """Point-to-point messages of collectives, matched by a sequence tag.

    Every collective takes its tags when it starts, in program order, which is the same on all ranks; so any
    number of them can be in flight. Messages of one tag between two ranks arrive in the order sent.

    Attributes:
        comm: a duplicate that nobody else uses.
        rank, size: of ``comm``.
        post_queue: of what is matched in the order in which it is posted.
        direct: every rank's MPI takes device pointers in messages.
        topology: which of them are on which host.
        shm_peers: the ranks with whom this one shares memory, if any.
        contacts: which ranks have had a message from this process.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        topology: Topology,
        shm_peers: SharedMemoryPeers | None = None,
        *,
        direct: bool = False,
        group: Any = None,
    ) -> None:
        """Send and receive on ``comm``, to ``shm_peers`` ranks by descriptors. The engine's ``group`` counts tags."""
        self.topology = topology
        self.comm = comm
        self.shm_peers = shm_peers
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.post_queue = PostQueue()
        self.contacts = Contacts(comm)
        self.direct = direct
        self._tags = Tags() if group is None else group
        self._pool: Pool = heap() if shm_peers is None else shm_peers.pool
        self._failed: list[object] = []

    def tag(self) -> int:
        """Return the next sequence tag.

        Raises:
            RuntimeError: this process was forked; a thread of its parent's may have held the lock that this takes.
        """
        engine().check_process("a collective")
        return int(self._tags.next_tag())

    def begin(self, operation: int) -> None:
        """Count tags on from an operation's own number, whatever this rank has taken before."""
        self._tags.begin(operation % (1 << 24))

    def isend(self, data: Any, peer: int, tag: int, mode: str = "Isend") -> MPI.Request:
        """Start to send bytes by MPI's ``mode``; ``data`` must stay unchanged until the request is done."""
        post = getattr(self.comm, mode)
        return self.start(peer, lambda: post([data, MPI.BYTE], peer, tag))

    def start(self, peer: int, post: Callable[[], MPI.Request]) -> MPI.Request:
        """Start a send to ``peer``; the first to each by a thread (:mod:`~hybridcomp.collectives.failure.contact`)."""
        if peer in self.contacts.met or not 0 <= peer < self.size:
            return post()
        return self.contacts.post(peer, post)

    def irecv(self, data: Any, peer: int, tag: int) -> MPI.Request:
        """Start to receive at most as many bytes as ``data`` has."""
        return self.comm.Irecv([data, MPI.BYTE], peer, tag)

    @property
    def others(self) -> list[int]:
        """Return the other ranks, beginning after this one, so that not all of them send to rank 0 first."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    @property
    def failed(self) -> bool:
        """Tell whether an operation has failed, or may yet."""
        return bool(self._failed) or self.contacts.late

    @contextmanager
    def keeping(self, owner: object) -> Iterator[None]:
        """Keep ``owner`` and its buffers for good if the block fails: MPI may still write to them."""
        try:
            yield
        except BaseException:
            self._failed.append(owner)
            raise

    def take(self, nbytes: int) -> ByteArray:
        """Return a buffer of ``nbytes`` from the pool."""
        return self._pool.take(nbytes)

    def give(self, buffer: ByteArray) -> None:
        """Return a buffer that no request uses any more."""
        self._pool.give(buffer)


class Tags:
    """A counter of tags where the engine does not count them, in the same way."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def next_tag(self) -> int:
        """Return the next one."""
        return next(self._numbers) % _TAGS

    def begin(self, operation: int) -> None:
        """Count on from an operation's own number."""
        self._numbers = itertools.count(operation * _MOST_TAGS + 1)


class Sealed(NamedTuple):
    """An encoded message in a pool buffer. What a device encodes has the same methods, and becomes ready later."""

    buffer: ByteArray
    nbytes: int

    def wire(self) -> ByteArray:
        """Return the message's bytes in the form that MPI takes."""
        return self.buffer[: self.nbytes]

    @property
    def events(self) -> Sequence[Ready]:
        """Return the events that :meth:`wire` has to wait for: none."""
        return ()


@dataclass(slots=True)
class Incoming:
    """An incoming message.

    Attributes:
        peer: who sends it.
        buffer: room for it.
        request: null once it is here.
        shared: the message, if a descriptor of it came.
        kept: it is sent on from where it is.
        used: it was read for the last time.
    """

    peer: int
    buffer: ByteArray
    request: MPI.Request
    shared: ByteArray | None = field(default=None, kw_only=True)
    kept: bool = field(default=False, kw_only=True)
    used: bool = field(default=False, kw_only=True)

    def wire(self) -> ByteArray:
        """Return the buffer in the form that MPI takes."""
        return self.buffer


class Mailbox:
    """The messages of one operation: sends and receives in flight, and the buffers that they use.

    Buffers go back to the pool as soon as nobody needs them: a few that stay in the cache serve a large transfer.
    """

    def __init__(self, transport: Transport, call: Call) -> None:
        self._transport = transport
        self._call = call
        self._sends: deque[_Sent] = deque()
        self._kept: list[_Sent] = []
        self._inbox: list[Incoming] = []

    def send(self, message: Sealed, peers: list[int], tag: int, *, keep: bool = False) -> None:
        """Send a message to each of ``peers``; its buffer goes back to the pool.

        Whoever reads the message after sending another one has to ``keep`` it until :meth:`finish`.
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
        call, shm_peers, post = self._call, self._transport.shm_peers, self._transport.isend
        call.wire_bytes += data.size * len(peers)
        if shm_peers is not None and data.size >= _DESCRIBED_FROM:
            readers = sum(peer in shm_peers.ranks for peer in peers)
            descriptor = shm_peers.publish(data, readers) if readers else None
            if descriptor is not None:
                call.shared_bytes += data.size * readers
                requests = [
                    post(descriptor if peer in shm_peers.ranks else data, peer, tag) for peer in peers
                ]
                return _Sent(requests, peers, buffer, descriptor)
        return _Sent([post(data, peer, tag) for peer in peers], peers, buffer, None)

    def _settled(self, sent: _Sent) -> bool:
        """Return a buffer to the pool if its message has been sent and read; tell whether it has."""
        for request in sent.requests:
            if not request.Test():
                return False
        shm_peers = self._transport.shm_peers
        if sent.buffer is not None:
            if shm_peers is not None and sent.descriptor is not None and shm_peers.pool.unread(sent.buffer):
                return False
            self._transport.give(sent.buffer)
        return True

    def inbox(self, nbytes: int) -> Incoming:
        """Return a buffer for a message of at most ``nbytes``, which another party receives into it."""
        buffer = self._transport.take(nbytes)
        # Or a message too short for a header would leave an earlier one to be read.
        buffer[: wire.HEADER_BYTES] = 0
        message = Incoming(-1, buffer, MPI.REQUEST_NULL)
        self._inbox.append(message)
        return message

    def receive(self, nbytes: int, peer: int, tag: int) -> Incoming:
        """Start to receive a message of at most ``nbytes``."""
        message = self.inbox(nbytes)
        message.peer = peer
        message.request = self._transport.irecv(message.wire(), peer, tag)
        return message

    def arrival(self, messages: list[Incoming]) -> Pending:
        """Return what to wait for until all of ``messages`` are here and can be opened."""
        return Pending([m.request for m in messages], [m.peer for m in messages])

    def read(self, message: Incoming) -> ByteArray:
        """Return the bytes of a message that is here, until it is :meth:`used`.

        Raises:
            WireError: the descriptor names no message.
            MismatchError: the descriptor is of a message that this rank has no room for.
        """
        shm_peers = self._transport.shm_peers
        if shm_peers is None or message.peer not in shm_peers.ranks:
            return message.buffer
        if message.shared is None:
            message.shared = shm_peers.read(message.buffer)
            if message.shared is None:
                return message.buffer
            if message.shared.size > message.buffer.size:
                raise MismatchError(
                    f"{self._call.op} on axis {self._call.axis!r}: rank {message.peer} sent {message.shared.size} "
                    f"bytes, rank {self._transport.rank} has room for {message.buffer.size}"
                )
        return message.shared

    def used(self, message: Incoming) -> None:
        """Release a message that will not be read again, but for being sent on."""
        if not message.kept:
            self._put_back(message)

    def _put_back(self, message: Incoming) -> None:
        message.used = True
        if message.shared is not None and self._transport.shm_peers is not None:
            self._transport.shm_peers.release([message.shared])
        self._transport.give(message.buffer)

    def finish(self) -> Steps:
        """Wait until all is sent, and give the buffers back."""
        sends, shm_peers = [*self._sends, *self._kept], self._transport.shm_peers
        requests = [request for s in sends for request in s.requests]
        yield Pending(requests, [peer for s in sends for peer in s.peers], sends=True)
        for message in self._inbox:
            if not message.used:
                self._put_back(message)
        self._inbox.clear()
        if shm_peers is not None and shm_peers.pool.crowded:
            # MPI makes the sender of a large message wait for its receiver; descriptors are sent at once.
            unread = _Unread(
                shm_peers.pool, [s.buffer for s in sends if s.descriptor is not None and s.buffer is not None]
            )
            yield Pending([], [], events=[unread], source="ranks of this host that read its messages")
        for sent in sends:
            if sent.buffer is not None:
                self._transport.give(sent.buffer)
        self._sends.clear()
        self._kept.clear()


class _Sent(NamedTuple):
    """A message being sent, the buffer to give back when it has arrived, and the descriptor that some ranks get."""

    requests: list[MPI.Request]
    peers: list[int]
    buffer: ByteArray | None
    descriptor: ByteArray | None


class _Unread:
    """The event that no other process reads the buffers any more."""

    def __init__(self, pool: ArenaPool, buffers: list[ByteArray]) -> None:
        self._pool, self._buffers = pool, buffers

    def done(self) -> bool:
        while self._buffers and not self._pool.unread(self._buffers[-1]):
            self._buffers.pop()
        return not self._buffers

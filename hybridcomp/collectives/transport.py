"""Bytes between ranks: tagged sends and receives on a communicator of our own, and the buffers they use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from hybridcomp.arrays import ByteArray
from hybridcomp.collectives.engine import Pending

_TAGS = 30_000  # below MPI's guaranteed 32767; a tag comes round after as many operations


class Transport:
    """Point-to-point messages of collectives, matched by a sequence tag.

    Every collective takes its tags when it starts, in program order, which is the same on all ranks; so any
    number of them can be in flight. Messages of one tag between two ranks arrive in the order sent.

    Attributes:
        comm: a duplicate that nobody else uses.
        rank, size: of ``comm``.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self.comm = comm
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self._next = 0
        self._pool: dict[int, list[ByteArray]] = {}
        self._failed: list[object] = []

    @property
    def sequence(self) -> int:
        """How many tags have been taken."""
        return self._next

    def tag(self) -> int:
        """The next sequence tag."""
        self._next += 1
        return self._next % _TAGS

    def isend(self, data: ByteArray, peer: int, tag: int) -> MPI.Request:
        """Start to send bytes; ``data`` must stay unchanged until the request is done."""
        return self.comm.Isend([data, MPI.BYTE], peer, tag)

    def irecv(self, data: ByteArray, peer: int, tag: int) -> MPI.Request:
        """Start to receive at most ``data.size`` bytes."""
        return self.comm.Irecv([data, MPI.BYTE], peer, tag)

    @property
    def others(self) -> list[int]:
        """The other ranks, beginning after this one, so that not all of them send to rank 0 first."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    @contextmanager
    def keeping(self, owner: object) -> Iterator[None]:
        """Keep ``owner`` and its buffers for good if the block fails: MPI may still write to them."""
        try:
            yield
        except BaseException:
            self._failed.append(owner)
            raise

    def take(self, nbytes: int) -> ByteArray:
        """A buffer of at least ``nbytes`` bytes from the pool: fresh pages cost as much as a network does."""
        size = 1 << max(12, (nbytes - 1).bit_length())
        free = self._pool.get(size)
        buffer = free.pop() if free else np.empty(size, np.uint8)
        return buffer[:nbytes]

    def give(self, buffer: ByteArray) -> None:
        """Return a buffer that no request uses any more."""
        base = buffer if buffer.base is None else buffer.base
        assert isinstance(base, np.ndarray)
        free = self._pool.setdefault(base.size, [])
        if len(free) < 64:
            free.append(base)


class Mailbox:
    """The messages of one operation: sends and receives in flight, and the buffers that they use."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._sends: list[MPI.Request] = []
        self._peers: list[int] = []
        self._buffers: list[ByteArray] = []

    def send(self, buffer: ByteArray, nbytes: int, peers: list[int], tag: int) -> None:
        """Send the first ``nbytes`` of a pool buffer to each of ``peers``."""
        self._buffers.append(buffer)
        self.forward(buffer[:nbytes], peers, tag)

    def forward(self, message: ByteArray, peers: list[int], tag: int) -> None:
        """Send bytes of a buffer that this mailbox already keeps, or the caller does."""
        for peer in peers:
            self._sends.append(self._transport.isend(message, peer, tag))
            self._peers.append(peer)

    def receive(self, nbytes: int, peer: int, tag: int) -> Incoming:
        """Start to receive a message of at most ``nbytes`` into a pool buffer."""
        buffer = self._transport.take(nbytes)
        self._buffers.append(buffer)
        return Incoming(peer, buffer, self._transport.irecv(buffer, peer, tag))

    def sent(self) -> Pending:
        """What to wait for before :meth:`close`."""
        return Pending(self._sends, self._peers)

    def close(self) -> None:
        """Give the buffers back; all sends and receives are done."""
        for buffer in self._buffers:
            self._transport.give(buffer)
        self._buffers.clear()


class Incoming(NamedTuple):
    """A message on its way here."""

    peer: int
    buffer: ByteArray
    request: MPI.Request


def arrival(messages: list[Incoming]) -> Pending:
    """What to wait for until all of ``messages`` are here."""
    return Pending([m.request for m in messages], [m.peer for m in messages])

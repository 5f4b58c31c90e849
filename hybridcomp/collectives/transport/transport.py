"""Send and receive the bytes of an operation's messages: the interface of every transport."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hybridcomp.arrays import ByteArray
from hybridcomp.collectives.transport.pools import Pool, heap
from hybridcomp.schedules.topology import Topology


class Transport(abc.ABC):
    """Transport of point-to-point messages of collectives, matched by a sequence tag.

    Every collective takes its tags when it starts, in program order, which is the same on all ranks; so any
    number of them can be in flight. Messages of one tag between two ranks arrive in the order sent.

    Attributes:
        topology: which ranks are on which host.
        rank: number of this rank.
        size: number of ranks.
        away: for each rank, whether it is on another host.
        near: ranks whose messages stay in memory that they share with this one.
        compiled: the compiled module's ``CarriedOperations``, whose messages it carries; None where MPI carries them.
        direct: whether it takes device pointers in messages, on every rank.
        joint: device work of the operations whose messages travel together, a
            :class:`~hybridcomp.collectives.device.joint.Joint`; None where each has its own.
    """

    joint: Any = None
    near: frozenset[int] = frozenset()
    compiled: Any = None

    def __init__(
        self, topology: Topology, rank: int, *, direct: bool = False, pool: Pool | None = None
    ) -> None:
        """Take buffers from ``pool``; None for the one of this process."""
        self.topology = topology
        self.rank, self.size = rank, len(topology.hosts)
        self.direct = direct
        self._pool: Pool = pool or heap()
        self._failed: list[object] = []
        self.away = topology.away(rank)

    @abc.abstractmethod
    def tag(self) -> int:
        """Return the next sequence tag."""

    @abc.abstractmethod
    def isend(self, data: Any, peer: int, tag: int) -> Any:
        """Start to send bytes, which must stay unchanged until the request that this returns is done.

        Args:
            data: array in host memory, or a :class:`~hybridcomp.device.DeviceArray` where messages are ``direct``.
            peer, tag: rank to send to, and tag of the message.

        Returns:
            Request whose ``Test`` tells whether it is done.
        """

    @abc.abstractmethod
    def irecv(self, data: Any, peer: int, tag: int, *, elsewhere: bool = False) -> Any:
        """Start to receive at most as many bytes as ``data`` has; otherwise as :meth:`isend`.

        With ``elsewhere``, the caller asks :meth:`received` for the bytes, which may lie outside of ``data``.
        """

    def received(self, request: Any, data: Any) -> Any:
        """Return the bytes that a receive has brought: ``data`` itself."""
        return data

    def announce(self, messages: int) -> None:  # noqa: B027  (most need not know)
        """Take notice that ``messages`` messages follow when a device has written them."""

    @property
    def others(self) -> list[int]:
        """Return the other ranks, beginning after this one, so that not all of them send to rank 0 first."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    @contextmanager
    def keeping(self, owner: object) -> Iterator[None]:
        """Keep ``owner`` and its buffers for good if the block fails: messages may still be written to them."""
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

"""Send and receive messages by MPI, on a separate communicator."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from hybridcomp.collectives.execution.post_queue import PostQueue
from hybridcomp.collectives.execution.progress import engine
from hybridcomp.collectives.failure.contact import Contacts
from hybridcomp.collectives.failure.watchdog import inside_mpi
from hybridcomp.collectives.transport.shared_memory import SharedMemoryPeers
from hybridcomp.collectives.transport.transport import Transport
from hybridcomp.device import DeviceArray
from hybridcomp.schedules.topology import Topology

_MOST_TAGS = 64  # tags of one operation
_TAGS = 30_000  # below MPI's guaranteed 32767; a tag comes round after as many operations


class MpiTransport(Transport):
    """Transport for the messages of a communicator's operations.

    Attributes:
        comm: duplicate communicator that nothing else uses.
        post_queue: queue of the MPI calls that are matched in the order in which they are posted.
        contacts: connections to the ranks, which tell the ranks that have had a message from this process.
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
        super().__init__(topology, comm.Get_rank(), direct=direct, shm_peers=shm_peers)
        self.comm = comm
        self.post_queue = PostQueue()
        self.contacts = Contacts(comm)
        self._tags = Tags() if group is None else group

    def tag(self) -> int:
        """Return the next sequence tag.

        Raises:
            ConfigError: this process was forked; a thread of its parent may have held the lock taken here.
        """
        engine().check_process("a collective")
        return int(self._tags.next_tag())

    def begin(self, operation: int) -> None:
        """Count tags on from an operation's own number, whatever this rank has taken before."""
        self._tags.begin(operation % (1 << 24))

    def isend(self, data: Any, peer: int, tag: int, mode: str = "Isend") -> MPI.Request:
        """Start to send bytes by MPI's ``mode``: see :meth:`Transport.isend`."""
        post = getattr(self.comm, mode)
        return self.start(peer, lambda: post(raw(data), peer, tag))

    def start(self, peer: int, post: Callable[[], MPI.Request]) -> MPI.Request:
        """Start a send to ``peer``, the first one by a thread (:mod:`~hybridcomp.collectives.failure.contact`)."""
        if peer in self.contacts.met or not 0 <= peer < self.size:
            with inside_mpi():
                return post()
        return self.contacts.post(peer, post)

    def irecv(self, data: Any, peer: int, tag: int, *, elsewhere: bool = False) -> MPI.Request:
        """Start to receive bytes: see :meth:`Transport.irecv`."""
        with inside_mpi():
            return self.comm.Irecv(raw(data), peer, tag)

    @property
    def failed(self) -> bool:
        """Tell whether an operation has failed, or may still fail."""
        return bool(self._failed) or self.contacts.late


def raw(data: Any) -> list[Any]:
    """Return an mpi4py specification of a message's bytes, in host memory or a device's."""
    if isinstance(data, DeviceArray):  # MPI needs its address alone
        data = MPI.buffer.fromaddress(data.ptr, data.nbytes)
    return [data, MPI.BYTE]


class Tags:
    """Counter of tags where the engine does not count them, in the same way."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def next_tag(self) -> int:
        """Return the next tag."""
        return next(self._numbers) % _TAGS

    def begin(self, operation: int) -> None:
        """Count on from an operation's own number."""
        self._numbers = itertools.count(operation * _MOST_TAGS + 1)

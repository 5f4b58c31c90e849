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
from hybridcomp.collectives.transport.transport import Transport
from hybridcomp.device import DeviceArray
from hybridcomp.schedules.in_order import TAGS
from hybridcomp.schedules.topology import Topology

# Above the tags of the engine's messages (kernels/engine/group.hpp), below that of notices: messages of operations in
# the engine and of others never match.
_FIRST, _TAGS = 20_000, 12_000


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
        *,
        direct: bool = False,
        group: Any = None,
    ) -> None:
        """Send and receive on ``comm``. The engine's ``group`` counts operations, whichever way they take."""
        super().__init__(topology, comm.Get_rank(), direct=direct)
        self.comm = comm
        self.post_queue = PostQueue()
        self.contacts = Contacts(comm)
        self._each = max(TAGS, self.size + 1)  # numbers that the engine reserves for an operation
        self._numbers = Numbers(self._each) if group is None else group

    def tag(self) -> int:
        """Return the first tag of the next operation: see :meth:`tags`."""
        return self.tags()[0]

    def tags(self) -> list[int]:
        """Return the tags of the next operation, and count it as one of the engine's.

        Raises:
            ConfigError: this process was forked; a thread of its parent may have held the lock taken here.
        """
        engine().check_process("a collective")
        number = int(self._numbers.reserve()) // self._each
        return [_FIRST + (number * TAGS + i) % _TAGS for i in range(TAGS)]

    def begin(self, operation: int) -> None:
        """Count tags on from an operation's own number, whatever this rank has taken before."""
        self._numbers.begin(operation % (1 << 24))

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


class Numbers:
    """Counter of operations' numbers where there is no engine's group to count them, in the same way."""

    def __init__(self, each: int) -> None:
        """Count ``each`` numbers for an operation."""
        self._each = each
        self._first = itertools.count(1, each)

    def reserve(self) -> int:
        """Return the first number of the next operation."""
        return next(self._first)

    def begin(self, operation: int) -> None:
        """Count on from an operation's own number."""
        self._first = itertools.count(operation * self._each + 1, self._each)

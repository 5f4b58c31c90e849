"""Send the first message to a rank, a call in which MPI may stay for ever.

``MPI_Isend`` need not return where there is no connection yet: over TCP, MPICH 5 tries without end to connect to a rank
that is gone. A thread therefore starts the first message to each rank, and later ones until MPI has come back; it is
left behind where MPI does not. Operations that wait for such a message end in time, as for any other.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from mpi4py import MPI

from hybridcomp.collectives.failure.blocked import start_thread

_PATIENCE = 0.05  # seconds in which MPI nearly always has started a message; until then the caller waits


class Posting:
    """MPI call that a thread makes to start a request.

    Attributes:
        done: event that MPI has come back.
        request: request that MPI has started; None before, and where MPI refused.
        error: error with which MPI refused; None if it did not.
    """

    def __init__(self, post: Callable[[], MPI.Request]) -> None:
        self.done = threading.Event()
        self.request: MPI.Request | None = None
        self.error: BaseException | None = None
        self._post = post

    def run(self) -> None:
        """Make MPI start the request."""
        try:
            self.request = self._post()
        except BaseException as error:
            self.error = error
        self.done.set()


class FirstRequest(MPI.Request):
    """Request of a message that MPI may not have started yet."""

    posting: Posting

    def __new__(cls, posting: Posting) -> FirstRequest:
        """Make a request for a message that a thread is to start."""
        self = super().__new__(cls)
        self.posting = posting
        return self

    @property
    def started(self) -> MPI.Request | None:
        """Return MPI's own request, once there is one; raise the error with which MPI has refused the message."""
        if self.posting.done.is_set() and self.posting.error is not None:
            raise self.posting.error
        return self.posting.request

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Tell whether the message has been sent."""
        started = self.started
        return started is not None and started.Test(status)

    def Get_status(self, status: MPI.Status | None = None) -> bool:
        """Tell whether the message has been sent, without a change to the request."""
        started = self.started
        return started is not None and started.Get_status(status)

    def Cancel(self) -> None:
        """Cancel the request, if MPI knows of it."""
        if self.posting.request is not None:
            self.posting.request.Cancel()

    def __eq__(self, other: object) -> bool:
        request = self.posting.request
        return self is other if request is None else request == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = MPI.Request.__hash__


class Contact:
    """State of the connection to a rank: this process may have none yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[Posting] = deque()
        self._thread: threading.Thread | None = None
        self.met = False

    def post(self, post: Callable[[], MPI.Request]) -> MPI.Request:
        """Make MPI start a message, after earlier messages to the same rank."""
        with self._lock:
            met, stuck = self.met, self._thread is not None
            if not met:
                posting = Posting(post)
                # The thread waits for the lock; where it cannot be started, nothing is sent later either.
                if not stuck:
                    self._thread = start_thread(
                        "hybridcomp-contact", "the first message to a rank that does not answer", self._run
                    )
                self._queue.append(posting)
        if met:
            return post()
        # Where MPI was found stuck, the caller does not wait again.
        posting.done.wait(0 if stuck else _PATIENCE)
        if not posting.done.is_set():
            return FirstRequest(posting)
        if posting.error is not None:
            raise posting.error
        assert posting.request is not None
        return posting.request

    def _run(self) -> None:
        came_back = False
        while True:
            with self._lock:
                if not self._queue:
                    self.met, self._thread = came_back, None
                    return
                posting = self._queue.popleft()
            posting.run()
            came_back = came_back or posting.error is None


_contacts: dict[int, Contact] = {}


class Contacts:
    """Connections to the ranks of a communicator.

    Attributes:
        met: ranks that have had a message from here.
        late: whether MPI has not come back at once from starting some message, and may start it later.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        """Find the processes of the ranks: a connection serves all communicators."""
        self.met: set[int] = {comm.Get_rank()}
        self.late = False
        mine, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
        self._world: list[int] = list(mine.Translate_ranks(None, world))
        mine.Free()
        world.Free()
        self._own: dict[int, Contact] = {}  # for processes that are not in COMM_WORLD

    def post(self, peer: int, post: Callable[[], MPI.Request]) -> MPI.Request:
        """Make MPI start a message to a rank that is not among :attr:`met`."""
        at = self._world[peer]
        contact = self._own.setdefault(peer, Contact()) if at < 0 else _contacts.setdefault(at, Contact())
        request = contact.post(post)
        if contact.met:
            self.met.add(peer)
        self.late = self.late or isinstance(request, FirstRequest)
        return request

"""Post MPI calls in the order in which their operations were started.

MPI matches the collectives of a communicator, and messages of one tag, in the order in which they are posted. An
operation that waits for a device before it posts would be overtaken by one that need not wait: so both take a ticket.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager

from mpi4py import MPI

from hybridcomp.collectives.execution.steps import Pending, Ready
from hybridcomp.collectives.failure.watchdog import inside_mpi
from hybridcomp.errors import MismatchError

Posted = Generator[Pending, None, MPI.Request]


class PostQueue:
    """Queue of the operations of one MPI communicator that have not posted yet; for steps, which run one at a time.

    An operation in the queue waits for a device, never for another rank, so the queue moves. One that fails in it posts
    nothing: a message is merely not sent, and the next one posts. The other ranks wait for a collective that is not
    posted here, which the next collective of this rank would meet: so all that come after it fail, too.

    Attributes:
        tickets: waiting tickets, the first one first.
        common: whether all ranks post the same operations.
    """

    def __init__(self, *, common: bool = True) -> None:
        self.tickets: deque[PostTicket] = deque()
        self.common = common

    @property
    def empty(self) -> bool:
        """Tell whether no operation is in the queue."""
        return not self.tickets

    def take(self) -> PostTicket:
        """Append a ticket to the queue and return it; called in an operation's first step."""
        ticket = PostTicket(self)
        self.tickets.append(ticket)
        return ticket


class PostTicket:
    """Ticket in a queue of operations to post."""

    __slots__ = ("_queue", "_why")

    def __init__(self, queue: PostQueue) -> None:
        self._queue = queue
        self._why: BaseException | None = None

    def done(self) -> bool:
        """Tell whether the ticket is the first in the queue.

        Raises:
            MismatchError: the operation of the first ticket has failed, and will never post.
        """
        first = self._queue.tickets[0]
        if first._why is not None:
            raise MismatchError(
                f"an operation started before this one has failed here before MPI knew of it ({first._why!r}); "
                "other ranks may have begun it: make a new communicator"
            )
        return first is self

    def post(self, call: Callable[[], MPI.Request], events: Sequence[Ready] = ()) -> Posted:
        """Post by ``call`` when ``events`` are done and all earlier tickets have posted; return the request."""
        if events or not self.done():
            yield Pending([], [], events=[*events, self])
        with self.posting(), inside_mpi():
            return call()

    @contextmanager
    def posting(self) -> Iterator[None]:
        """Enclose the block in which the first ticket posts; at its end the next one becomes the first."""
        try:
            yield
        finally:
            self._queue.tickets.popleft()

    @contextmanager
    def held(self) -> Iterator[PostTicket]:
        """Enclose the block at whose end the ticket must have posted, or have failed."""
        try:
            yield self
        except BaseException as error:
            self.forsake(error)
            raise

    def forsake(self, error: BaseException) -> None:
        """Withdraw the ticket of an operation that has failed; do nothing if it has posted."""
        tickets = self._queue.tickets
        if self not in tickets:
            return
        if self._queue.common and (tickets[0] is self or tickets[0]._why is None):
            self._why = error
        else:
            tickets.remove(self)

"""Say what a step of an operation waits for: messages, events of a device, or the end of a compiled run.

Nothing here needs MPI: an operation's steps run over MPI (:mod:`.progress`), or over a process group of torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from mpi4py import MPI


class Ready(Protocol):
    """A condition that becomes true: an event of a device, or one made of several."""

    def done(self) -> bool:
        """Tell whether it is true, without waiting; may make progress."""


@runtime_checkable
class Forsaken(Protocol):
    """A condition to wait for that must know if an operation ends before it is true."""

    def forsake(self, error: BaseException) -> None:
        """Take notice that the operation has ended with ``error``."""


class Pending(NamedTuple):
    """The conditions that a step of an operation waits for.

    Attributes:
        requests: of messages, with MPI's ``Test``.
        peers: the rank that each is with (-1: all).
        statuses: where to put theirs. A step that waits for one request, with a status, waits for a receive that
            the caller asked for: that alone can be cancelled.
        events: looked at once all requests are done, until they are, too.
        poll: called at every poll, before it: posts what has become ready meanwhile. Returns whether it did anything.
        source: what the events come from, for error messages.
        run: of the compiled engine, whose end is the event.
        sends: the requests are of sends, which are not cancelled where the operation ends early: MPICH 5 crashes where
            it cancels some over UCX, and the standard deprecates it.
    """

    requests: Sequence[Any]
    peers: Sequence[int]
    statuses: list[MPI.Status] | None = None
    events: Sequence[Ready] = ()
    poll: Callable[[], bool] | None = None
    source: str = "the device"
    run: Any = None
    sends: bool = False


Steps = Generator[Pending, None, None]


def sender(peer: int) -> str:
    """Return a rank in words; "a rank" if the number is negative, which is any."""
    return f"rank {peer}" if peer >= 0 else "a rank"

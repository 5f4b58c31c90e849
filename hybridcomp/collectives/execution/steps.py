"""Describe the conditions that a step of an operation waits for: messages, device events, the end of a compiled run.

Nothing here needs MPI: an operation's steps run over MPI (:mod:`.progress`), or over a process group of torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from mpi4py import MPI


class Ready(Protocol):
    """Condition that becomes true: an event of a device, or one made of several."""

    def done(self) -> bool:
        """Tell whether the condition is true, without waiting; may make progress."""


@runtime_checkable
class Forsaken(Protocol):
    """Condition to wait for that must know if an operation ends before it is true."""

    def forsake(self, error: BaseException) -> None:
        """Take notice that the operation has ended with ``error``."""


class Pending(NamedTuple):
    """Conditions that a step of an operation waits for.

    Attributes:
        requests: requests of messages, with MPI's ``Test``.
        peers: rank at the other end of each request (-1: all).
        statuses: statuses of the requests to fill. A step that waits for one request, with a status, waits for a
            receive that the caller asked for: that alone can be cancelled.
        events: events to look at once all requests are done, until they are done, too.
        poll: function called at the start of every poll: posts messages that have become ready meanwhile, and returns
            whether it did anything.
        source: origin of the events, for error messages.
        run: run of the compiled engine, whose end the step waits for, and for nothing else.
        sends: whether the requests are of sends, which are not cancelled where the operation ends early: MPICH 5
            crashes where it cancels some over UCX, and the standard deprecates it.
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
    """Return a rank in words; "a rank" for a negative number, which stands for any."""
    return f"rank {peer}" if peer >= 0 else "a rank"

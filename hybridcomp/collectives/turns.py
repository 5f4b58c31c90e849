"""MPI calls in the order in which their operations were started.

MPI matches the collectives of a communicator, and messages of one tag, in the order in which they are posted. An
operation that waits for a device before it posts would be overtaken by one that need not: so both take a turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager

from mpi4py import MPI

from hybridcomp.collectives.engine import Pending, Ready

Posted = Generator[Pending, None, MPI.Request]


class Turns:
    """The operations of one MPI communicator that have not posted yet. For steps, which run one at a time.

    Who waits in line waits for a device, never for another rank, so the line moves. An operation that timed out
    there keeps its place: what it did not post is missing on the other ranks.

    Attributes:
        line: who waits, the first one first.
    """

    def __init__(self) -> None:
        self.line: deque[Turn] = deque()

    @property
    def empty(self) -> bool:
        """Whether nobody is in line."""
        return not self.line

    def take(self) -> Turn:
        """A turn after all that have been taken; in an operation's first step."""
        turn = Turn(self.line)
        self.line.append(turn)
        return turn


class Turn:
    """A place in a line."""

    __slots__ = ("_line",)

    def __init__(self, line: deque[Turn]) -> None:
        self._line = line

    def done(self) -> bool:
        """Whether it is the first."""
        return self._line[0] is self

    def post(self, call: Callable[[], MPI.Request], events: Sequence[Ready] = ()) -> Posted:
        """Post by ``call`` when ``events`` are done and all before it have posted; the request is the result."""
        if events or not self.done():
            yield Pending([], [], events=[*events, self])
        with self.posting():
            return call()

    @contextmanager
    def posting(self) -> Iterator[None]:
        """The block in which it posts, whose end lets the next one have its turn; it must be the first."""
        try:
            yield
        finally:
            self._line.popleft()

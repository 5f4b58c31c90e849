"""Start sends that no thread waits for, not even for their start."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from functools import partial

from mpi4py import MPI

from hybridcomp.collectives.failure.blocked import start_thread
from hybridcomp.collectives.failure.watchdog import inside_mpi

_PATIENCE = 0.25  # seconds that one start may take; it takes microseconds
_MOST_STUCK = 4  # starts that have not returned, from which on no more are tried


class Outbox:
    """Outbox of short messages to other ranks, some of which may be gone.

    ``MPI_Isend`` need not return. Over TCP, MPICH 5 tries without end to connect to a rank that is gone, and looks for
    no error meanwhile. A thread therefore starts messages to ranks in trouble; it is left behind where MPI does not
    come back to it.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        """Send on ``comm``."""
        self._comm = comm
        self._stuck: list[threading.Thread] = []
        self._started: deque[tuple[MPI.Request, bytes]] = deque()
        self._later: deque[tuple[bytes, list[int], int]] = deque()  # messages for which there was no thread

    def post(self, raw: bytes, to: list[int], tag: int) -> None:
        """Start sending ``raw`` to each of ``to``, or give up, in some tenths of a second at most. Raises nothing."""
        left = deque(to)
        while left:
            self._stuck = [thread for thread in self._stuck if thread.is_alive()]
            if len(self._stuck) >= _MOST_STUCK:
                return
            try:
                thread = start_thread(
                    "hybridcomp-notice",
                    "a notice to a rank that does not answer",
                    partial(self._start, raw, left, tag),
                )
            except RuntimeError:  # no more threads
                self._later.append((raw, list(left), tag))
                return
            before = -1
            while thread.is_alive() and before != len(left):
                before = len(left)
                thread.join(_PATIENCE)
            if thread.is_alive():
                self._stuck.append(thread)

    @property
    def unsent(self) -> bool:
        """Tell whether messages are still to be sent."""
        return bool(self._started or self._later)

    def poll(self) -> MPI.Exception | None:
        """Release the messages that have been sent, and start messages for which there was no thread.

        Returns an error of MPI's, which may concern any message of this process; None if there was none.
        """
        broken = None
        for _ in range(len(self._later)):
            self.post(*self._later.popleft())
        for _ in range(len(self._started)):
            sent = self._started.popleft()
            try:
                with inside_mpi():
                    if not sent[0].Test():
                        self._started.append(sent)
            except MPI.Exception as error:
                broken = error
        return broken

    def leave(self) -> bool:
        """Keep unsent messages where MPI may read them; return whether the communicator may be freed."""
        _unsent.extend(self._started)
        return not any(thread.is_alive() for thread in self._stuck)

    def _start(self, raw: bytes, left: deque[int], tag: int) -> None:
        while True:
            try:
                rank = left.popleft()
            except IndexError:  # the thread that took over has sent the last one
                return
            with suppress(MPI.Exception):
                self._started.append((self._comm.Isend([raw, MPI.BYTE], rank, tag), raw))


_unsent: list[tuple[MPI.Request, bytes]] = []

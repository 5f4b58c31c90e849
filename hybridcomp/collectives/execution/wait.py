"""Wait for MPI in compiled code, where a poll costs a core less time than in Python.

Where ranks share cores, what they spend on polling is taken from those that compute.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from mpi4py import MPI

from hybridcomp.collectives.execution.library import address
from hybridcomp.collectives.execution.request import Request
from hybridcomp.collectives.failure.contact import FirstRequest
from hybridcomp.collectives.failure.signals import deferral
from hybridcomp.native import kernels

_BRIEF = 200e-6  # in which a poll only gives up the time slice, before waiting begins to sleep


class PollingLock:
    """A lock whose holder may wait for messages meanwhile; it stops when somebody else wants the lock.

    In a ``with`` statement no signal's handler interrupts its holder.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._native: Any = None
        self.acquire = self._lock.acquire
        self.release = self._lock.release
        self.busy = self._lock.locked

    def __enter__(self) -> None:
        deferral.__enter__()
        if self._lock.acquire(blocking=False):
            return
        native = self._native
        if native is None:
            self._lock.acquire()
            return
        native.want(1)
        try:
            self._lock.acquire()
        finally:
            native.want(-1)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()
        deferral.__exit__(kind, value, trace)

    def wait(
        self,
        active: Iterable[Request],
        quiet: float,
        *,
        least: float,
        most: float,
        share: float,
        longest: float,
    ) -> bool:
        """Poll the conditions that operations wait for until some of them are met.

        Whoever calls this holds the lock.

        Args:
            active: the operations.
            quiet: seconds that nothing has happened.
            least: seconds between polls.
            most: seconds between polls.
            share: of the time that nothing has happened, between polls.
            longest: seconds until this returns in any case.

        Returns:
            Whether it has polled: not if an operation waits for more than MPI's requests.
        """
        handles = []
        for request in active:
            pending, arrived = request._pending, request._arrived
            if pending.poll is not None or arrived >= len(pending.requests):
                return False
            awaited: MPI.Request | None = pending.requests[arrived]
            if isinstance(awaited, FirstRequest):
                awaited = None if awaited.posting.error is not None else awaited.posting.request
                if awaited is None:
                    return False
            handles.append(MPI._handleof(awaited))
        if not handles:
            return False
        if self._native is None:
            self._native = kernels().MpiWait(address("MPI_Request_get_status"))
        self._native.wait(handles, quiet, _BRIEF, least, most, share, longest)
        return True

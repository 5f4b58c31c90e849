"""Wait for MPI in compiled code, where a poll takes a core less time than in Python.

Where ranks share cores, the time they spend on polling is taken from threads that compute.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from mpi4py import MPI

from hybridcomp.collectives.execution.request import Request
from hybridcomp.collectives.failure.contact import FirstRequest
from hybridcomp.collectives.failure.signals import deferral
from hybridcomp.native import kernels
from hybridcomp.pmi.library import address

_BRIEF = 200e-6  # seconds of polls that only give up the time slice, before the wait begins to sleep


class PollingLock:
    """Lock whose holder may wait for messages meanwhile; the wait stops when another thread wants the lock.

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
        if not self._lock.acquire(blocking=False):
            self.await_holder()

    def await_holder(self) -> None:
        """Acquire the lock, which another thread holds: it stops waiting for messages."""
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

        The caller holds the lock.

        Args:
            active: requests of the operations.
            quiet: seconds for which nothing has happened.
            least: least seconds between polls.
            most: most seconds between polls.
            share: share of the time without any progress that passes between polls.
            longest: seconds until this returns in any case.

        Returns:
            Whether this has polled: not if an operation waits for more than MPI's requests.
        """
        handles = []
        for request in active:
            pending, arrived = request.pending, request.arrived
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

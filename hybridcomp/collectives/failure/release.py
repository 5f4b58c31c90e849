"""Release communicators: only after all ranks have confirmed that nothing is left on them.

MPI gives the context of a freed communicator to the next one, and with it the messages that no rank has taken. A rank
on which an operation has failed knows that there may be such messages; its notices may reach the others late. So the
ranks agree before they free anything. No rank waits for the agreement: one that is still open is looked at again when
the next communicator is made or released.

A communicator may be released with operations under way, as MPI's may be freed: they end as if it were not, and it is
kept until they have, on all ranks.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from hybridcomp.collectives.failure.contexts import contexts
from hybridcomp.collectives.failure.watchdog import inside_mpi

_PATIENCE = 0.05  # seconds that a rank looks for the others, which mostly come together
_POLL_SECONDS = 0.0002

_lock = threading.Lock()
_waiting: list[_Agreement] = []


class UnderWay(Protocol):
    """Operation that may not have ended."""

    def add_done_callback(self, fn: Callable[[Any], None]) -> None:
        """Call ``fn(self)`` when it ends, or at once if it has."""


class _Agreement:
    """Agreement of all ranks whether the communicators of one :func:`release` may be freed.

    Attributes:
        settled: whether all ranks have answered.
    """

    def __init__(
        self,
        comms: Sequence[MPI.Comm],
        spoilt: Callable[[], bool],
        drain: Callable[[], object],
        freed: Callable[[], object],
    ) -> None:
        self.settled = False
        self._comms = comms
        self._ask = spoilt
        self._drain = drain
        self._freed = freed
        self._spoilt = np.zeros(1, np.uint8)
        self._request: MPI.Request | None = None

    def begin(self) -> None:
        """Tell the other ranks, now that nothing is under way here."""
        self._spoilt[0] = self._ask()
        with inside_mpi():
            self._request = self._comms[0].Iallreduce(MPI.IN_PLACE, self._spoilt, MPI.MAX)

    def settle(self) -> None:
        """Free the communicators if all ranks have answered, and agree. One thread at a time calls this."""
        if self._request is None:
            return
        with inside_mpi():
            if not self._request.Test():
                return
        self.settled = True
        if not self._spoilt[0]:
            self._drain()
            for comm in reversed(self._comms):
                comm.Free()
            self._freed()
            contexts.remove()


def release(
    comms: Sequence[MPI.Comm],
    *,
    spoilt: Callable[[], bool],
    drain: Callable[[], object],
    freed: Callable[[], object],
    under_way: Sequence[UnderWay] = (),
) -> None:
    """Free MPI communicators, now or later, unless messages may be left on them. Collective over the first one.

    Args:
        comms: MPI communicators of one communicator of this package, on which nothing starts any more.
        spoilt: function that tells, once nothing is under way here, whether messages that no rank will take may be on
            their way: then all ranks keep the communicators.
        drain: function called before MPI gets them back, once nothing is under way on any rank: takes what ranks have
            sent beside operations.
        freed: function called once MPI has them back.
        under_way: operations on them that have not ended here. The agreement begins when they have.
    """
    agreement = _Agreement(comms, spoilt, drain, freed)
    if under_way:
        left = list(under_way)  # counted by one call of the interpreter: two may end in two threads at once

        def ended(_: UnderWay) -> None:
            if left.pop() is under_way[0]:
                agreement.begin()

        with _lock:
            _waiting.append(agreement)
        for operation in under_way:
            operation.add_done_callback(ended)
        return
    agreement.begin()
    with _lock:
        _waiting.append(agreement)
    deadline = time.monotonic() + _PATIENCE
    collect()
    while not agreement.settled and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        collect()


def collect() -> None:
    """Free the communicators on which all ranks have agreed by now; does not wait."""
    # No lock is held while MPI frees one: it calls the caller's functions, which may free others.
    with _lock:
        found = _waiting[:]
        _waiting.clear()
    try:
        for agreement in found:
            agreement.settle()
    finally:
        with _lock:
            _waiting[:0] = [agreement for agreement in found if not agreement.settled]


def keep() -> None:
    """Keep what MPI may still write to for as long as the process lives; called at its exit."""
    with _lock:
        for agreement in _waiting:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(agreement))

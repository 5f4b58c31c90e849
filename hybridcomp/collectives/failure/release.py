"""Release communicators: only after all ranks have confirmed that nothing is left on them.

MPI gives the context of a freed communicator to the next one, and with it the messages that no rank has taken. A rank
on which an operation has failed knows that there may be such messages; its notices may reach the others late. So the
ranks agree before they free anything. No rank waits for the agreement: one that is still open is looked at again when
the next communicator is made or released.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from hybridcomp.collectives.failure.contexts import contexts
from hybridcomp.collectives.failure.watchdog import inside_mpi

_PATIENCE = 0.05  # seconds that a rank looks for the others, which mostly come together
_POLL_SECONDS = 0.0002

_lock = threading.Lock()
_waiting: list[_Agreement] = []


class _Agreement:
    """Agreement of all ranks whether the communicators of one :func:`release` may be freed."""

    def __init__(self, comms: Sequence[MPI.Comm], spoilt: bool, freed: Callable[[], object]) -> None:
        self.comms = comms
        self._freed = freed
        self._spoilt = np.array([spoilt], np.uint8)
        with inside_mpi():
            self._request = comms[0].Iallreduce(MPI.IN_PLACE, self._spoilt, MPI.MAX)

    def settle(self) -> bool:
        """Free the communicators if all ranks agree; return whether all ranks have answered."""
        with inside_mpi():
            if not self._request.Test():
                return False
        if not self._spoilt[0]:
            for comm in reversed(self.comms):
                comm.Free()
            self._freed()
            contexts.remove()
        return True


def release(comms: Sequence[MPI.Comm], *, spoilt: bool, freed: Callable[[], object]) -> None:
    """Free MPI communicators, now or later, unless messages may be left on them. Collective over the first one.

    Args:
        comms: MPI communicators of one communicator of this package, used no longer.
        spoilt: whether messages that no rank will take may be on their way: then all ranks keep the communicators.
        freed: function called once MPI has them back.
    """
    agreement = _Agreement(comms, spoilt, freed)
    with _lock:
        _waiting.append(agreement)
    deadline = time.monotonic() + _PATIENCE
    collect()
    while agreement in _waiting and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        collect()


def collect() -> None:
    """Free the communicators on which all ranks have agreed by now; does not wait."""
    with _lock:
        _waiting[:] = [agreement for agreement in _waiting if not agreement.settle()]

"""Count the communicators that MPI holds contexts for, and warn before it has none left.

MPICH has 2048 contexts. Each communicator of this package takes two or three, so that some 1,000 communicators use them
up; making the next one then fails with an error that does not name the cause. Only ``Free`` gives contexts back: to
free a communicator is collective, and ranks collect garbage at different times.
"""

from __future__ import annotations

import sys
import threading
import warnings

MANY = 600  # communicators: before the last, also where each has three contexts
_PACKAGE = __name__.partition(".")[0]


class Contexts:
    """Communicators of one process.

    Attributes:
        held: number of communicators that were made and not given back to MPI.
    """

    def __init__(self, many: int = MANY) -> None:
        """Warn when communicator number ``many`` is made."""
        self.held = 0
        self._many = many
        self._warned = False
        self._lock = threading.Lock()

    def announce(self) -> None:
        """Warn, once, if the communicator that is made next reaches the number to warn at."""
        with self._lock:
            if self._warned or self.held + 1 < self._many:
                return
            self._warned = True
        warnings.warn(
            f"this is communicator {self.held + 1} of this process that is not freed, and MPICH has contexts for "
            "some 1,000: call Free() on those that are not used any more, on all ranks; one that is dropped without it "
            "keeps its contexts, as does one on which an operation has failed",
            RuntimeWarning,
            stacklevel=_callers_level(),
        )

    def add(self) -> None:
        """Count a communicator that was made."""
        with self._lock:
            self.held += 1

    def remove(self) -> None:
        """Count a communicator whose contexts MPI has got back."""
        with self._lock:
            self.held -= 1


contexts = Contexts()


def _callers_level() -> int:
    """Return the ``stacklevel`` of a warning of :meth:`Contexts.announce` that names the package's caller."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        level, frame = level + 1, frame.f_back
    return level

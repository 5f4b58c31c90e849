"""End an operation: note that it has ended, with which error, and run its callbacks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from hybridcomp.collectives.failure.signals import deferral
from hybridcomp.collectives.failure.unraisable import report
from hybridcomp.collectives.failure.watchdog import Name, in_words

_lock = threading.Lock()


class Completion:
    """Operation that ends once.

    Attributes:
        done: whether it has ended, well or not, and its callbacks have run.
        exception: error that it ended with; None if it ended well.
        followers: callbacks that have not run.
        general: MPI's generalized request that stands for it, which is complete once it has ended; None if none does.
    """

    done = False
    exception: BaseException | None = None
    general: Any = None

    def __init__(self, what: str | Name) -> None:
        """Make an operation named ``what`` that has not ended."""
        self._what = what
        self.followers: list[Callable[[Any], None]] = []

    @property
    def what(self) -> str:
        """Return operation, axis, rank and sequence number, for error messages."""
        return in_words(self._what)

    @property
    def name(self) -> Name | None:
        """Return the parts of the operation's name; None where the name is only words."""
        return None if isinstance(self._what, str) else self._what

    def add_done_callback(self, fn: Callable[[Any], None]) -> None:
        """Call ``fn(self)`` when the operation ends, or at once if it has; no lock is held in the call.

        A thread that waits for the operation returns only after its callbacks. An error that one raises goes to
        ``sys.unraisablehook``.
        """
        with deferral, _lock:
            if not self.done:
                self.followers.append(fn)
                return
        self._call(fn)

    def run_callbacks(self) -> None:
        """Run the callbacks, then say that the operation is done."""
        interrupted: BaseException | None = None
        while True:
            with _lock:
                if not self.followers:
                    self.done = True
                    break
                fn = self.followers.pop(0)
            try:
                self._call(fn)
            except BaseException as error:  # a signal's handler raised it while the callback waited
                interrupted = error
        if self.general is not None:
            self.general.complete()
        if interrupted is not None:
            raise interrupted

    def stand_behind(self, general: Any) -> None:
        """Complete one of MPI's generalized requests when the operation ends, or at once if it has."""
        self.general = general
        if self.done:  # else whoever ends it sees the request
            general.complete()

    def _call(self, fn: Callable[[Any], None]) -> None:
        try:
            fn(self)
        except Exception as error:
            report(error, f"{fn!r}, a callback of {self.what}")

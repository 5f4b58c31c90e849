"""End an operation: note that it has ended, with which error, and run its callbacks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from hybridcomp.collectives.failure.signals import deferral
from hybridcomp.collectives.failure.unraisable import report

# Name of an operation in error messages, put into words only if one is made: its kind and sequence number; the axis of
# its communicator, this rank, and the number of ranks.
Name = tuple[str, int, str, int, int]
_NAMED = "{} number {} on axis {!r}, rank {} of {}"

_lock = threading.Lock()


def in_words(what: str | Name) -> str:
    """Return a name in the words of error messages."""
    return what if isinstance(what, str) else _NAMED.format(*what)


class Completion:
    """Operation that ends once.

    Attributes:
        done: whether it has ended, well or not, and its callbacks have run.
        exception: error that it ended with; None if it ended well.
    """

    def __init__(self, what: str | Name) -> None:
        """Make an operation named ``what`` that has not ended."""
        self.done = False
        self.exception: BaseException | None = None
        self._what = what
        self._callbacks: list[Callable[[Any], None]] = []

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
                self._callbacks.append(fn)
                return
        self._call(fn)

    def _run_callbacks(self) -> None:
        """Run the callbacks, then say that the operation is done."""
        interrupted: BaseException | None = None
        while True:
            with _lock:
                if not self._callbacks:
                    self.done = True
                    break
                fn = self._callbacks.pop(0)
            try:
                self._call(fn)
            except BaseException as error:  # a signal's handler raised it while the callback waited
                interrupted = error
        if interrupted is not None:
            raise interrupted

    def _call(self, fn: Callable[[Any], None]) -> None:
        try:
            fn(self)
        except Exception as error:
            report(error, f"{fn!r}, a callback of {self.what}")

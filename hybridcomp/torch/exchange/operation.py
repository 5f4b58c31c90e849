"""Define an operation in flight over a process group of torch's: its steps, and the request that its caller holds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from hybridcomp.collectives.execution.completion import Completion
from hybridcomp.collectives.execution.steps import Pending, Steps
from hybridcomp.collectives.failure.watchdog import Name
from hybridcomp.errors import CollectiveTimeoutError


class ExchangeOperation(Completion):
    """A started operation, as :class:`~hybridcomp.collectives.execution.request.Request` is one over MPI.

    Attributes:
        status: None: only a receive has a status.
        began: time at which it began, by :func:`time.monotonic`.
    """

    def __init__(self, steps: Steps, what: Name, finish: Callable[[], None]) -> None:
        """Make an operation.

        Args:
            steps: steps of the operation.
            what: name of the operation.
            finish: function that arranges that it ends, without waiting for that.
        """
        super().__init__(what)
        self.status = None
        self.began = time.monotonic()
        self._steps = steps
        self._finish = finish
        self._pending = Pending([], [])
        self._ended = threading.Event()

    def wait(self, timeout: float | None = None) -> None:
        """Return when the operation has ended.

        Args:
            timeout: seconds; None is the process group's own timeout, by which its collectives end.

        Raises:
            CollectiveTimeoutError: it did not end in time; it may still end later.
            Exception: the operation failed, here or on another rank.
        """
        if not self.done:
            self._finish()
            if not self._ended.wait(timeout):
                raise CollectiveTimeoutError(f"{self.what} did not end within the timeout of {timeout:g} s")
        if self.exception is not None:
            raise self.exception

    def test(self) -> bool:
        """Return whether the operation has ended; it goes on towards that. Raises its error."""
        if not self.done:
            self._finish()
        elif self.exception is not None:
            raise self.exception
        return self.done

    # -- the batch's side ----------------------------------------------------------------------------

    def step(self) -> bool:
        """Run the next step if its conditions are met; return whether anything moved. Raises its error."""
        pending = self._pending
        moved = pending.poll is not None and pending.poll()
        if self.on_messages:
            return moved
        for event in pending.events:
            if not event.done():
                return moved
        try:
            self._pending = next(self._steps)
        except StopIteration:
            self._end(None)
        return True

    @property
    def on_messages(self) -> bool:
        """Tell whether messages are waited for, to come or to be taken by an exchange."""
        run = self._pending.run
        if run is not None and not run.done():
            return True
        for request in self._pending.requests:  # noqa: SIM110  (called often)
            if not request.Test():
                return True
        return False

    @property
    def ended(self) -> bool:
        """Tell whether it has ended."""
        return self._ended.is_set()

    def fail(self, error: BaseException) -> None:
        """End it with an error, unless it has ended. Its steps stay as they are: a device may be at work for them."""
        if not self.ended:
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self._pending = Pending([], [])
        self.exception = error
        self.run_callbacks()
        self._ended.set()

"""Make the requests that non-blocking methods return: operations of this package that are MPI's requests, too.

MPI calls the functions of a generalized request while it holds a lock of its own, and they need the interpreter's.
A thread must not enter MPI without giving the interpreter up (as compiled code may) while there is such a request: each
thread would wait for the other's lock.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from mpi4py import MPI

from hybridcomp.collectives.execution import progress as engine
from hybridcomp.collectives.execution.callbacks import Call, callbacks
from hybridcomp.collectives.execution.timeouts import check_timeout
from hybridcomp.collectives.failure.signals import deferral
from hybridcomp.collectives.failure.unraisable import report

called_back: set[object] = set()
"""A token for each generalized request that MPI has not freed."""


class Request(MPI.Request):
    """Request of mpi4py's that stands for operations in flight.

    MPI sees a generalized request, so that ``MPI.Request.Waitall`` and its kin take it among others. They wait in
    MPI while the background thread makes progress; :meth:`wait` is faster, and knows a timeout.

    Attributes:
        operations: operations that it waits for: one, or the send and the receive of a Sendrecv.
        status: status of a receive, valid once the receive is done: source, tag and count.
    """

    operations: tuple[engine.Request, ...]
    status: MPI.Status | None
    _general: MPI.Grequest
    _calls: tuple[Call, ...] = ()  # callbacks that are due, or have run

    def __new__(cls, *operations: engine.Request) -> Request:
        """Make a request of started operations; the last one's status is its own."""
        status = operations[-1].status

        def query(given: MPI.Status) -> None:
            if status is not None:
                copy_status(status, given)

        def cancel(completed: bool) -> None:
            if not completed:
                for operation in operations:
                    operation.cancel()

        token = object()
        called_back.add(token)
        free = functools.partial(called_back.discard, token)  # MPI's last call of the three, also at exit
        general = MPI.Grequest.Start(query, free, cancel)
        self = super().__new__(cls, general)
        self.operations, self.status, self._general = operations, status, general
        left = list(operations)

        def ended(operation: engine.Request) -> None:
            left.remove(operation)
            if not left:
                general.Complete()

        with deferral:
            for operation in operations:
                operation.add_done_callback(ended)
        return self

    @property
    def what(self) -> str:
        """Return operation, axis, rank and sequence number, for error messages."""
        return self.operations[0].what

    @property
    def done(self) -> bool:
        """Tell whether all operations have ended, well or not, and the callbacks have run."""
        return self._over and all(call.ended for call in self._calls)

    @property
    def _over(self) -> bool:
        return all(operation.done for operation in self.operations)

    @property
    def exception(self) -> BaseException | None:
        """Return the first error with which an operation ended."""
        return next((o.exception for o in self.operations if o.exception is not None), None)

    def add_done_callback(self, fn: Callable[[Any], None]) -> None:
        """Call ``fn(self)`` when all operations have ended, or at once if they have.

        It runs in a thread that waits for this request, or in one of hybridcomp's, and may wait itself. A thread that
        waits for this request returns only after its callbacks. An error that one raises goes to
        ``sys.unraisablehook``.
        """

        def call() -> None:
            try:
                fn(self)
            except Exception as error:
                report(error, f"{fn!r}, a callback of {self.what}")

        if self._over:
            call()
            return
        left, within = list(self.operations), callbacks.current

        def ended(operation: engine.Request) -> None:
            left.remove(operation)
            if not left:
                self._calls += (callbacks.submit(call, operation, within),)

        for operation in self.operations:
            operation.add_done_callback(ended)

    def _call_back(self) -> None:
        for call in self._calls:
            callbacks.finish(call)

    def wait(self, timeout: float | None = None) -> None:  # type: ignore[override]
        """Wait until all operations have ended.

        Args:
            timeout: seconds; None for the communicator's timeout, counted from the start.

        Raises:
            CollectiveTimeoutError: an operation did not end in time.
            HybridcompError: the error of an operation.
        """
        wait_for(self.operations, timeout)
        self._call_back()
        self._release(None)

    def test(self) -> bool:  # type: ignore[override]
        """Make progress once; return whether all operations have ended. Raises their error."""
        if self._tested():
            self._release(None)
            return True
        return False

    def _tested(self) -> bool:
        done = [operation.test() for operation in self.operations]  # each makes progress
        if all(done) and self._calls:
            callbacks.run_waiting()
        return all(done) and self.done

    def cancel(self) -> bool:  # type: ignore[override]
        """Cancel the operations that have not begun to move data; return whether all could be cancelled."""
        done = [operation.cancel() for operation in self.operations]
        return all(done)

    # -- mpi4py's names ------------------------------------------------------------------------------

    def Wait(self, status: MPI.Status | None = None) -> Literal[True]:
        """Wait as :meth:`wait` does, and fill ``status``."""
        wait_for(self.operations, None)
        self._call_back()
        self._release(status)
        return True

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Test as :meth:`test` does, and fill ``status`` once the operations have ended."""
        if self._tested():
            self._release(status)
            return True
        return False

    def _release(self, status: MPI.Status | None) -> None:
        with deferral:  # an error of a signal's handler in a function that MPI calls would become MPI's
            if self != MPI.REQUEST_NULL:
                super().Wait(status)

    def __del__(self) -> None:
        # MPI keeps the request until it is complete. An interpreter that ends refuses MPI's calls of its functions.
        if self != MPI.REQUEST_NULL and not (sys.is_finalizing() or MPI.Is_finalized()):
            with deferral:
                super().Free()


def wait_for(operations: Sequence[engine.Request], timeout: float | None) -> None:
    """Wait until operations have ended, within ``timeout`` seconds in all."""
    deadline = None if timeout is None else time.monotonic() + check_timeout(timeout)
    for operation in operations:
        operation.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))


def copy_status(source: MPI.Status, target: MPI.Status) -> None:
    """Copy a receive's status: source, tag, count and whether it was cancelled."""
    target.Set_source(source.Get_source())
    target.Set_tag(source.Get_tag())
    target.Set_elements(MPI.BYTE, max(0, source.Get_elements(MPI.BYTE)))
    target.Set_cancelled(source.Is_cancelled())

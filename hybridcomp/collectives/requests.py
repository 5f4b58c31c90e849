"""Make the requests that non-blocking methods return: operations of this package that are MPI's requests, too.

MPI calls the functions of a generalized request while it holds a lock of its own, and they need the interpreter's.
A thread must not enter MPI without giving the interpreter up (as compiled code may) while there is such a request: each
thread would wait for the other's lock.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from mpi4py import MPI

from hybridcomp.arrays import Flat
from hybridcomp.collectives.execution import progress
from hybridcomp.collectives.execution.callbacks import Callback, callbacks
from hybridcomp.collectives.execution.timeouts import check_timeout
from hybridcomp.collectives.failure.signals import deferral
from hybridcomp.collectives.failure.unraisable import report
from hybridcomp.native import kernels
from hybridcomp.pmi.library import address

_test = MPI.Request.Test
_pid = os.getpid()  # MPI's process; a fork of it is another

called_back: set[object] = set()
"""A token for each generalized request that MPI has not freed."""


class Passer(Protocol):
    """Session of a communicator that passes operations to MPI."""

    def take_over(
        self, request: MPI.Request, op: str, peer: int | None, number: int, status: MPI.Status | None
    ) -> progress.Request:
        """Have the engine go on with an operation that MPI has."""

    def waited(self, request: MPI.Request, status: MPI.Status | None, peer: int | None) -> bool:
        """Poll an operation that MPI has for a moment; return whether it has ended."""

    def explained(self, error: MPI.Exception, peer: int | None) -> Exception:
        """Return the error to raise for one of MPI's."""

    @property
    def timeout(self) -> float:
        """Return the seconds that any operation may take."""


# Operation that MPI has, of which the engine knows nothing: its session, its name, the rank at the other end (None
# for a collective), its number, and the time of its start by time.perf_counter.
Begun = tuple[Passer, str, int | None, int, float]


class Request(MPI.Request):
    """Request of mpi4py's that stands for operations in flight.

    Of an operation that no policy compresses it is MPI's own request. Where that is not done soon after a wait has
    begun, and for any other operation, MPI sees a generalized request (:class:`Generalized`). ``MPI.Request.Waitall``
    and its kin take both among others; they wait inside MPI, without a timeout, while the background thread makes
    progress with what is not MPI's alone. :meth:`wait` and :meth:`Wait` know the communicator's timeout.
    """

    _operations: tuple[progress.Request, ...] = ()
    _status: MPI.Status | None = None
    _general: Any = None  # the generalized request: MPI's, or compiled code's where ``_token`` is None
    _token: object = None  # of MPI's: in ``called_back`` until MPI has freed it
    begun: Begun | None = None  # set by who makes a request of an operation that MPI has
    _calls: list[Callback] | tuple[()] = ()  # callbacks that are due, or have run

    def __new__(cls, *operations: progress.Request) -> Request:
        """Make a request of started operations; the last one's status is its own."""
        self = super().__new__(cls)
        self._stand_for(operations)
        return self

    def _stand_for(self, operations: tuple[progress.Request, ...]) -> None:
        """Become a generalized request of started operations."""
        self._operations, self._calls = operations, []
        self._status = status = operations[-1].status
        if status is None and len(operations) == 1:
            # It cannot be cancelled, and has no status to tell: MPI needs to ask nothing of Python.
            self._general = _general_requests().begin(self)
            operations[0].stand_behind(self._general)
            return

        def query(given: MPI.Status) -> None:
            if status is not None:
                copy_status(status, given)

        def cancel(completed: bool) -> None:
            if not completed:
                for operation in operations:
                    operation.cancel()

        self.__class__ = Generalized
        token = object()
        called_back.add(token)
        free = functools.partial(called_back.discard, token)  # MPI's last call of the three, also at exit
        general = MPI.Grequest.Start(query, free, cancel)
        copy_handle(general, self)
        self._general, self._token = general, token
        left = list(operations)  # counted by one call of the interpreter: two may end in two threads at once

        def ended(_: progress.Request) -> None:
            if left.pop() is operations[0]:
                general.Complete()

        with deferral:
            for operation in operations:
                operation.add_done_callback(ended)

    def _take_over(self) -> None:
        """Have the engine go on with an operation that MPI has."""
        begun, self.begun = self.begun, None
        if begun is None:
            return
        comm, op, peer, number, _ = begun
        status = MPI.Status() if op == "recv" else None
        mpi = MPI.Request(self)
        with deferral:
            self._stand_for((comm.take_over(mpi, op, peer, number, status),))

    def generalize(self) -> None:
        """Become a generalized request, whose handle others may hold and wait for, if this is MPI's own."""
        self._take_over()

    def _waited(self, status: MPI.Status | None) -> bool:
        """Wait a moment for an operation that MPI has; return whether it has ended."""
        begun = self.begun
        assert begun is not None
        comm, op, peer, _, _ = begun
        if status is None and op == "recv":
            status = MPI.Status()
        self._status = status
        try:
            done = _test(self, status)
        except MPI.Exception as error:
            raise comm.explained(error, peer) from None
        if done or comm.waited(self, status, peer):
            self.begun = None
            return True
        self._take_over()
        return False

    @property
    def passed(self) -> bool:
        """Tell whether this is MPI's own request."""
        return self.begun is not None

    @property
    def operations(self) -> tuple[progress.Request, ...]:
        """Return the operations that it waits for: one, or the send and the receive of a Sendrecv."""
        self._take_over()
        return self._operations

    @property
    def status(self) -> MPI.Status | None:
        """Return the status of a receive, valid once the receive is done: source, tag and count."""
        return self._status

    @property
    def what(self) -> str:
        """Return operation, axis, rank and sequence number, for error messages."""
        return self.operations[0].what

    @property
    def done(self) -> bool:
        """Tell whether all operations have ended, well or not, and the callbacks have run."""
        if self.begun is not None:
            return self.Get_status()
        return self._over and all(call.ended for call in self._calls)

    @property
    def _over(self) -> bool:
        return all(operation.done for operation in self._operations)

    @property
    def exception(self) -> BaseException | None:
        """Return the first error with which an operation ended."""
        return next((o.exception for o in self._operations if o.exception is not None), None)

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

        self._take_over()
        if self._over:
            call()
            return
        left, within, calls = list(self._operations), callbacks.current, self._calls
        assert isinstance(calls, list)

        def ended(operation: progress.Request) -> None:
            if left.pop() is self._operations[0]:
                calls.append(callbacks.submit(call, operation, within))

        for operation in self._operations:
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
        if timeout is not None:
            check_timeout(timeout)
        if self.begun is not None and self._waited(None):
            return
        wait_for(self._operations, timeout)
        self._call_back()
        self._release(None)

    def test(self) -> bool:  # type: ignore[override]
        """Make progress once; return whether all operations have ended. Raises their error."""
        return self.Test()

    def _tested(self) -> bool:
        done = [operation.test() for operation in self._operations]  # each makes progress
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
        if self.begun is not None and self._waited(status):
            return True
        for operation in self._operations:
            operation.wait()
        if self._calls:
            self._call_back()
        self._release(status)
        return True

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Test as :meth:`test` does, and fill ``status`` once the operations have ended."""
        begun = self.begun
        if begun is not None:
            comm, op, peer, _, since = begun
            if op == "recv" and status is None:
                status = MPI.Status()
            try:
                done = _test(self, status)
            except MPI.Exception as error:
                raise comm.explained(error, peer) from None
            if done:
                self._status, self.begun = status, None
                return True
            if time.perf_counter() - since < comm.timeout:
                return False
            self._take_over()  # which ends it in time
        if self._tested():
            self._release(status)
            return True
        return False

    def _release(self, status: MPI.Status | None) -> None:
        if self._token is None:
            if self._general is not None:
                self._general.release(self, 0 if status is None else MPI._addressof(status))
            return
        with deferral:  # an error of a signal's handler in a function that MPI calls would become MPI's
            if self != MPI.REQUEST_NULL and self._token in called_back:
                super().Wait(status)


class Generalized(Request):
    """Request that MPI sees as a generalized one with functions of Python's: MPI keeps it until it is complete.

    A class of its own, since Python calls ``__del__`` for every object whose class has it: a tenth of what a message
    that is MPI's alone may cost.
    """

    def __del__(self) -> None:
        if self._token not in called_back:  # MPI's own, or freed by way of another object of mpi4py's
            return
        # An interpreter that ends refuses MPI's calls of its functions.
        if self != MPI.REQUEST_NULL and not (sys.is_finalizing() or MPI.Is_finalized()):
            with deferral:
                super().Free()


def wait_for(operations: Sequence[progress.Request], timeout: float | None) -> None:
    """Wait until operations have ended, within ``timeout`` seconds in all."""
    deadline = None if timeout is None else time.monotonic() + check_timeout(timeout)
    for operation in operations:
        operation.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))


def stored(request: progress.Request, *flats: Flat | None) -> progress.Request:
    """Write packed results to the caller's memory once an operation has ended well; return its request."""

    def write(_: Any) -> None:
        if request.exception is not None:
            return
        for flat in flats:
            if flat is None or flat.store is None:
                continue
            n, status = flat.size, request.status
            if status is not None:
                n = max(0, status.Get_elements(MPI.BYTE)) // flat.dtype.itemsize
            flat.store(flat.data[:n])

    if any(flat is not None and flat.store is not None for flat in flats):
        request.add_done_callback(write)
    return request


@functools.cache
def _general_requests() -> Any:
    """Return the maker of generalized requests that compiled code ends; their status is that of nothing received."""
    names = ("MPI_Grequest_start", "MPI_Grequest_complete", "MPI_Wait", "MPI_Request_free", "MPI_Finalized")
    status = MPI.Status()
    status.Set_source(MPI.ANY_SOURCE)
    status.Set_tag(MPI.ANY_TAG)
    status.Set_elements(MPI.BYTE, 0)
    status.Set_cancelled(False)
    raw = ctypes.string_at(MPI._addressof(status), MPI._sizeof(MPI.Status))
    request_at = MPI._addressof(MPI.REQUEST_NULL) - id(MPI.REQUEST_NULL)
    functions = [address(name) for name in names]
    return kernels().GeneralRequests(functions, raw, request_at, MPI._sizeof(MPI.Request), MPI.Exception)


def copy_status(source: MPI.Status, target: MPI.Status) -> None:
    """Copy a receive's status: source, tag, count and whether it was cancelled."""
    target.Set_source(source.Get_source())
    target.Set_tag(source.Get_tag())
    target.Set_elements(MPI.BYTE, max(0, source.Get_elements(MPI.BYTE)))
    target.Set_cancelled(source.Is_cancelled())


def copy_handle(source: Any, target: Any) -> None:
    """Have an object of mpi4py's stand for what another one of its kind stands for."""
    ctypes.memmove(MPI._addressof(target), MPI._addressof(source), MPI._sizeof(source))

"""Progress: operations as generators that yield the MPI requests, and events of a device, that they wait for.

An operation's code runs in steps. The first step runs in the thread that starts it, so that operations get
their tags and post their MPI collectives in program order; every later step runs as soon as the requests and
events it yielded have completed, in whichever thread polls: the foreground while somebody waits, otherwise one
background thread. Polling sleeps between looks. A blocking MPI call would spin, and take the core that training
computes on; no step waits for a device either.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from mpi4py import MPI

from hybridcomp.errors import CollectiveTimeoutError, MismatchError

_YIELDS = 20  # looks that only give up the time slice, before waiting begins to sleep
# Between looks a waiter sleeps for a sixteenth of the time that nothing has happened: late by six per cent at
# most, and many ranks waiting long for a slow link leave the cores to those that compute.
_SLEEP_SHARE = 1 / 16
_SLEEP_MIN = 20e-6
_SLEEP_MAX = 1e-3
_BACKGROUND_MIN = 100e-6
_BACKGROUND_ASIDE = 2e-3  # while the foreground polls
_EXIT_SECONDS = 5.0  # that a process which exits gives its operations in flight


class Ready(Protocol):
    """Something that will be done: an event of a device, or what is made of several."""

    def done(self) -> bool:
        """Whether it is; does not wait. May make progress."""


class Pending(NamedTuple):
    """What a step waits for.

    Attributes:
        requests: of MPI.
        peers: the rank that each is with (-1: all).
        statuses: where to put theirs.
        events: looked at once all requests are done, until they are, too.
        poll: called at every look, before it: posts what has become ready meanwhile. Returns whether it did anything.
    """

    requests: list[MPI.Request]
    peers: list[int]
    statuses: list[MPI.Status] | None = None
    events: Sequence[Ready] = ()
    poll: Callable[[], bool] | None = None


Steps = Generator[Pending, None, None]


class Request:
    """A started operation.

    Attributes:
        what: operation, axis, rank and sequence number, for error messages.
        done: it has ended, well or not, and its callbacks have run.
        exception: the error it ended with.
        status: of a receive, valid once it is done: source and tag.
    """

    def __init__(
        self, engine: Engine, steps: Steps, what: str, timeout: float, status: MPI.Status | None = None
    ) -> None:
        self.what = what
        self.done = False
        self.exception: BaseException | None = None
        self.status = status
        self._engine = engine
        self._steps = steps
        self._pending = Pending([], [])
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._ended = False
        self._callbacks: list[Callable[[Request], None]] = []
        self._callback_lock = threading.Lock()

    def wait(self, timeout: float | None = None) -> None:
        """Return when the operation has ended.

        Args:
            timeout: seconds; None is the communicator's timeout, counted from the operation's start.

        Raises:
            CollectiveTimeoutError: it did not end in time; it may still end later if ``timeout`` was shorter
                than the communicator's.
            WireError, MismatchError: what went wrong in the operation.
        """
        self._engine.wait(self, timeout)
        if self.exception is not None:
            raise self.exception

    def test(self) -> bool:
        """Make progress once; return whether the operation has ended. Raises its error."""
        if not self.done:
            self._engine.poll()
        if self.done and self.exception is not None:
            raise self.exception
        return self.done

    def add_done_callback(self, fn: Callable[[Request], None]) -> None:
        """Call ``fn(self)`` when the operation ends, or at once if it has; no lock is held in the call.

        Whoever waits for the operation returns only after its callbacks.
        """
        with self._callback_lock:
            if not self.done:
                self._callbacks.append(fn)
                return
        fn(self)

    # -- the engine's side ---------------------------------------------------------------------------

    def _step(self) -> bool:
        """Run steps until one has to wait; return whether any ran. Called with the engine's lock held."""
        moved = False
        try:
            while True:
                pending = self._pending
                if pending.poll is not None and pending.poll():
                    moved = True
                if not MPI.Request.Testall(pending.requests, pending.statuses):
                    break
                if pending.events and not self._events_done(pending):
                    break
                moved = True
                self._pending = next(self._steps)
        except StopIteration:
            self._finish(None)
        except MPI.Exception as error:
            self._finish(self._explain(error))
        except Exception as error:
            self._finish(error)
        return moved or self._ended

    def _events_done(self, pending: Pending) -> bool:
        if pending.requests:  # done, and their statuses written: not to be tested again
            self._pending = pending._replace(requests=[], peers=[], statuses=None)
        return all(event.done() for event in pending.events)

    def _explain(self, error: MPI.Exception) -> BaseException:
        if error.Get_error_class() not in (MPI.ERR_TRUNCATE, MPI.ERR_IN_STATUS):
            return error
        peers = ", ".join(map(str, sorted(set(self._pending.peers))))
        return MismatchError(f"{self.what}: rank {peers} sent more than this rank has room for ({error})")

    def _expire(self) -> None:
        error = CollectiveTimeoutError(self._late_message(self._timeout))
        for request in self._pending.requests:
            if request != MPI.REQUEST_NULL:
                with suppress(MPI.Exception):  # MPI can cancel sends and receives, but no collective
                    request.Cancel()
        self._finish(error)

    def _finish(self, error: BaseException | None) -> None:
        self.exception = error
        self._ended = True

    def _run_callbacks(self) -> None:
        while True:
            with self._callback_lock:
                if not self._callbacks:
                    self.done = True
                    return
                fn = self._callbacks.pop(0)
            try:
                fn(self)
            except BaseException:
                self.done = True
                raise

    def _late_message(self, timeout: float) -> str:
        waiting = {
            peer
            for peer, request in zip(self._pending.peers, self._pending.requests, strict=True)
            if request != MPI.REQUEST_NULL
        }
        if not waiting and self._pending.events:
            who = "the device"
        elif -1 in waiting or not waiting:
            who = "all ranks"
        else:
            who = f"rank {', '.join(map(str, sorted(waiting)))}"
        return f"{self.what} did not end within {timeout:g} s; still waiting for {who}"


class Engine:
    """All operations in flight in this process. There is one: :func:`engine`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active: list[Request] = []
        self._abandoned: list[Request] = []  # timed out: MPI may still write to their buffers
        self._foreground = 0
        self._moved = time.monotonic()  # when a step last ran
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._stopping = False

    def start(self, steps: Steps, what: str, timeout: float, status: MPI.Status | None = None) -> Request:
        """Run the first step of an operation here; the rest follows in the background or in ``wait``."""
        if os.getpid() != self._pid:
            raise RuntimeError(f"{what}: MPI cannot be used in a process forked after it was initialised")
        request = Request(self, steps, what, timeout, status)
        with self._lock:
            request._step()
            self._moved = time.monotonic()
            if not request._ended:
                self._active.append(request)
        if request._ended:
            request._run_callbacks()
        else:
            self._wake_thread()
        return request

    def poll(self) -> bool:
        """Advance every operation that can; return whether any ended. Gives way if another thread polls."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            now = time.monotonic()
            for request in self._active:
                if request._step():
                    self._moved = now
                if not request._ended and now > request._deadline:
                    request._expire()
                    self._abandoned.append(request)
            ended = [r for r in self._active if r._ended]
            if ended:
                self._active = [r for r in self._active if not r._ended]
        finally:
            self._lock.release()
        for request in ended:
            request._run_callbacks()
        return bool(ended)

    def wait(self, request: Request, timeout: float | None) -> None:
        """Poll until ``request`` has ended; see :meth:`Request.wait`."""
        began = time.monotonic()
        looks = 0
        self._foreground += 1
        try:
            while True:
                self.poll()
                if request.done:
                    return
                waited = time.monotonic() - began
                if timeout is not None and waited > timeout:
                    raise CollectiveTimeoutError(request._late_message(timeout))
                looks += 1
                if looks <= _YIELDS:
                    os.sched_yield()
                else:
                    time.sleep(self._pause(_SLEEP_MIN))
        finally:
            self._foreground -= 1

    def _pause(self, least: float) -> float:
        return min(max(least, (time.monotonic() - self._moved) * _SLEEP_SHARE), _SLEEP_MAX)

    def _wake_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hybridcomp-progress", daemon=True)
            self._thread.start()
            atexit.register(self._stop)
        self._wake.set()

    def _run(self) -> None:
        while not self._stopping:
            if not self._active:
                self._wake.clear()
                if not self._active:
                    self._wake.wait()
                continue
            if self._foreground:
                time.sleep(_BACKGROUND_ASIDE)
            else:
                self.poll()
                time.sleep(self._pause(_BACKGROUND_MIN))

    def _stop(self) -> None:
        """At exit: end what is in flight, for MPI_Finalize comes after the interpreter has freed all buffers."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=_EXIT_SECONDS)
        deadline = time.monotonic() + _EXIT_SECONDS
        while self._active and time.monotonic() < deadline:
            if not self.poll():
                time.sleep(self._pause(_SLEEP_MIN))
        # MPI_Finalize makes progress, too: what a peer sends even now must not be written to freed memory.
        for request in [*self._active, *self._abandoned]:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(request))


_engine: Engine | None = None
_engine_lock = threading.Lock()


def engine() -> Engine:
    """The process's engine."""
    global _engine  # noqa: PLW0603  (one per process by nature)
    with _engine_lock:
        if _engine is None:
            _engine = Engine()
        return _engine

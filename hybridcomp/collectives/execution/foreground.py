"""Wait for operations in the calling thread, which makes all of them progress meanwhile."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Protocol

from hybridcomp import trace
from hybridcomp.collectives.execution.callbacks import callbacks
from hybridcomp.collectives.execution.request import Request
from hybridcomp.collectives.execution.timeouts import check_timeout
from hybridcomp.collectives.execution.traced_waits import say_waited
from hybridcomp.collectives.execution.wait import PollingLock
from hybridcomp.collectives.failure.signals import deferral

_YIELDS = 20  # polls that only give up the time slice, before a waiting thread begins to sleep
# Between polls a waiting thread sleeps for a sixteenth of the time for which nothing has happened: it is late by six
# per cent at most, and many ranks that wait long for a slow link leave the cores to threads that compute.
_SLEEP_SHARE = 1 / 16
SLEEP_MIN = 20e-6
_SLEEP_MAX = 4e-3
# A thread that has waited long polls less often even where much happens: the next messages are on their way meanwhile.
_AGE_SHARE = 1 / 400
# For a thread that waits beside others that compute.
_ASIDE_MIN = 500e-6
LISTEN = 5e-3  # seconds between polls of notices while operations wait
_NATIVELY = 20e-3  # seconds of waiting in compiled code before notices are polled and signals answered
# Seconds that such waits have taken before one more, for an operation that nothing else is in flight with.
_WAITED = (0.02, 0.04, 0.06, 0.08)

_run_of = attrgetter("pending.run")


class Awaited(Protocol):
    """Engine of the awaited operations, which makes them progress: see :class:`.Engine`."""

    begun: deque[Request]
    lock: PollingLock
    active: list[Request]

    def poll(self) -> bool:
        """Advance every operation that can step."""

    def quiet(self) -> float:
        """Return the seconds for which nothing has moved."""

    def hand_over(self) -> None:
        """Let the background thread go on with the operations in flight."""


class Foreground:
    """Threads that wait for operations of an engine: each polls it, or leaves MPI's requests to compiled code.

    Attributes:
        run: run of the compiled engine that a thread waits for there; None if none does.
    """

    def __init__(self, engine: Awaited) -> None:
        self._engine = engine
        self._waiting = 0  # threads
        self.run: Any = None

    @property
    def waits(self) -> bool:
        """Tell whether some thread waits and makes progress."""
        return self._waiting > 0

    def wait(self, request: Request, timeout: float | None) -> None:
        """Poll until ``request`` has ended; see :meth:`Request.wait`. Then run callbacks whose turn it is."""
        recorder = None if request.done else trace.recorder
        began = 0.0 if recorder is None else time.perf_counter()
        local = callbacks.local
        before, local.awaited = local.awaited, request
        try:
            self._wait_for(request, timeout)
        except BaseException:
            callbacks.hand_over()
            raise
        finally:
            local.awaited = before
            if recorder is not None:
                say_waited(recorder, request, began)
        callbacks.run_waiting()

    def finish(self, request: Request) -> bool:
        """Wait for a run that no thread has polled, as a blocking call does; return whether that has ended it well.

        It is the next one that would be polled, all the others in flight are compiled code's, and nothing is known of
        trouble: else, and where it takes long, what the engine does for an operation has to be done.
        """
        begun, notices = self._engine.begun, request.notices
        if not begun or begun[0] is not request or request.followers or trace.recorder is not None:
            return False
        if notices is not None and (notices.troubled or notices.belated):
            return False
        if None in map(_run_of, self._engine.active):  # what is not compiled code's would stand still
            return False
        run = self.run = request.run
        self._waiting += 1
        try:
            ended = run.wait(_NATIVELY, 0.0)
            for waited in _WAITED:
                if ended or not self._undisturbed(request):
                    break
                ended = run.wait(_NATIVELY, waited)
        finally:
            self.run = None
            self._waiting -= 1
        if not ended or run.failure() is not None:
            return False
        lock = self._engine.lock
        with deferral:
            if not lock.acquire(blocking=False):
                return False
            try:
                if notices is not None and (notices.poll() or notices.troubled or notices.belated):
                    return False
                if not begun or begun[0] is not request:
                    return False
                begun.popleft()
                request.land()
            finally:
                lock.release()
            if request.followers:  # since the last look
                request.run_callbacks()
        return True

    def _undisturbed(self, request: Request) -> bool:
        """Poll the notices of an operation that takes long; tell whether it is alone, in time, and nothing is wrong."""
        begun, lock, notices = self._engine.begun, self._engine.lock, request.notices
        with deferral:
            if not lock.acquire(blocking=False):
                return False
            try:
                if self._engine.active or len(begun) != 1 or begun[0] is not request:
                    return False
                if time.monotonic() > request.deadline:
                    return False
                if notices is None:
                    return True
                notices.begin(request.number)  # other ranks may ask for it
                return not (notices.poll() or notices.troubled or notices.belated)
            finally:
                lock.release()

    def _wait_for(self, request: Request, timeout: float | None) -> None:
        began = time.monotonic()
        deadline = None if timeout is None else began + check_timeout(timeout)
        run = request.run
        if run is None and None not in map(_run_of, self._engine.active):
            run = request.pending.run
        if run is not None and not (request.done or run.done()) and (timeout is None or timeout > _NATIVELY):
            # It is left to compiled code, which needs no lock of the engine.
            self._waiting += 1
            try:
                self._wait(run)
            finally:
                self._waiting -= 1

        def ended() -> bool:
            if not request.done and deadline is not None and time.monotonic() > deadline:
                raise request.late(timeout)
            return request.done

        with deferral:
            self._attend(ended, request, began=began)

    def attend(self, until: Callable[[], bool], *, aside: bool = False) -> None:
        """Poll in this thread until a condition holds, tested after every poll; an error in it ends this, too.

        Args:
            until: the condition.
            aside: whether other threads of this process compute meanwhile: poll less often.
        """
        recorder = trace.recorder
        began = 0.0 if recorder is None else time.perf_counter()
        with deferral:
            self._attend(until, aside=aside, began=time.monotonic())
        if recorder is not None and not aside:
            say_waited(recorder, None, began)

    def _attend(
        self, until: Callable[[], bool], request: Request | None = None, *, aside: bool = False, began: float
    ) -> None:
        least = _ASIDE_MIN if aside else SLEEP_MIN
        polls = 0
        self._waiting += 1
        try:
            while True:
                self._engine.poll()
                if until():
                    return
                if deferral.came:
                    deferral.answer()
                waited = time.monotonic() - began
                between = max(least, waited * _AGE_SHARE)
                if not aside and self.wait_natively(request, waited):
                    continue
                if not aside and self._wait_for_messages(between):
                    continue
                polls += 1
                if polls <= _YIELDS and not aside:
                    os.sched_yield()
                else:
                    time.sleep(self.pause(between))
        finally:
            self._waiting -= 1
            if self._engine.active or self._engine.begun:
                self._engine.hand_over()

    def wait_natively(self, request: Request | None = None, waited: float = 0.0) -> bool:
        """Wait for an operation of the compiled engine if nothing else is in flight; return whether that was so.

        Args:
            request: request of the operation; None for any operation.
            waited: seconds for which this thread has waited for it.
        """
        engine = self._engine
        runs = list(map(_run_of, engine.active))
        if not runs or None in runs:
            return False
        run = None if request is None else request.pending.run
        if not self._wait(runs[0] if run is None else run, waited) and engine.lock.busy():
            time.sleep(SLEEP_MIN)  # the engine may ask Python for a step that another thread will take
        return True

    def _wait(self, run: Any, waited: float = 0.0) -> bool:
        """Wait in compiled code until an operation has ended, or there is something to do in Python."""
        self.run = run
        try:
            return bool(run.wait(_NATIVELY, waited))
        finally:
            self.run = None

    def _wait_for_messages(self, least: float) -> bool:
        """Wait until a message that operations wait for is there, for some milliseconds at most.

        Returns:
            Whether it has waited: not if there is more to poll, or another thread polls.
        """
        engine = self._engine
        if not engine.lock.acquire(blocking=False):
            return False
        try:
            return engine.lock.wait(
                engine.active,
                engine.quiet(),
                least=least,
                most=_SLEEP_MAX,
                share=_SLEEP_SHARE,
                longest=LISTEN,
            )
        finally:
            engine.lock.release()

    def pause(self, least: float, share: float = _SLEEP_SHARE) -> float:
        """Return the seconds between two polls: at least ``least``, and a share of the time without any progress."""
        return min(max(least, self._engine.quiet() * share), _SLEEP_MAX)

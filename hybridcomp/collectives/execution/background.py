"""Make operations progress in a background thread while no thread waits for them."""

from __future__ import annotations

import atexit
import threading
import time
from typing import Any, Protocol

from hybridcomp.collectives.failure.blocked import Thread
from hybridcomp.collectives.failure.unraisable import report
from hybridcomp.native import kernels

# The background polls less often than a waiting thread: other threads compute meanwhile.
_SHARE = 1 / 4
_MIN = 300e-6
_ASIDE = 0.1  # seconds between polls, at most, while the foreground polls
_IDLE = 0.1  # seconds between polls of notices while nothing is in flight
# Interval and duration of the looks for operations after the thread was woken: to wake it costs the thread that starts
# an operation more than all else that the start does in Python.
_DOZE = 1e-3
_DOZING = 3e-3
_FOR_EVER = 3600.0
_STOP_SECONDS = 10.0  # a poll takes far less; a callback of the caller's may never come back


class Waiting(Protocol):
    """Threads that wait for operations: see :class:`.Foreground`."""

    @property
    def waits(self) -> bool:
        """Tell whether some thread waits and makes progress."""

    def pause(self, least: float, share: float) -> float:
        """Return the seconds between two polls."""


class Polled(Protocol):
    """Engine that the thread polls: see :class:`.Engine`."""

    @property
    def foreground(self) -> Waiting:
        """Return the threads that wait for operations."""

    @property
    def idle(self) -> bool:
        """Tell whether nothing is in flight."""

    @property
    def listens(self) -> bool:
        """Tell whether there are communicators whose notices are polled."""

    def poll(self) -> bool:
        """Advance every operation that can step."""

    def listen_idle(self) -> None:
        """Poll all notices while nothing is in flight."""

    def stop(self) -> None:
        """End the operations in flight at exit."""


class Background:
    """Thread that polls an engine while operations are in flight for which no thread waits."""

    def __init__(self, engine: Polled) -> None:
        self._engine = engine
        self._alarm: Any = None
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._stopping = False
        self.wake = self._begin

    def _begin(self) -> None:
        """Start the thread; from then on ``wake`` makes it poll, soon or now."""
        with self._starting:
            if self._thread is None:
                self._alarm = kernels().Alarm(_DOZE, _DOZING)
                thread = Thread("hybridcomp-progress", self._run)
                try:
                    thread.start()
                except RuntimeError:
                    return  # no more threads: a waiting thread makes progress, and the next start tries again
                self._thread = thread
                atexit.register(self._engine.stop)
                self.wake = self._alarm.ring
        self.wake()

    def stop(self) -> None:
        """Stop the thread, which ends after at most one poll: MPI must not be finalised while it polls."""
        self._stopping = True
        if self._thread is not None:
            self._alarm.stop()
            self._thread.join(timeout=_STOP_SECONDS)

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._go_on()
            except BaseException as error:  # no other thread goes on with the operations in flight
                report(error, "hybridcomp's progress thread")

    def _go_on(self) -> None:
        engine = self._engine
        if engine.idle:
            if not self._alarm.wait(_IDLE if engine.listens else _FOR_EVER) and engine.idle:
                engine.listen_idle()
        elif engine.foreground.waits:
            self._alarm.wait(_ASIDE)
        else:
            engine.poll()
            time.sleep(engine.foreground.pause(_MIN, _SHARE))

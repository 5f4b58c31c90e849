"""Run callers' callbacks in threads where they may wait: never in the one that makes operations progress.

A callback may wait for another operation, for a future, for anything. So each has its turn, in the order in which
operations have ended: in the thread that waits for its operation, or in a thread of callbacks. While one waits for an
operation that it has started itself, that operation's callbacks run beside it. Where one takes long for another
reason, the next one's turn comes nevertheless.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from hybridcomp.collectives.failure.signals import deferral
from hybridcomp.collectives.failure.unraisable import report

_PATIENCE = 10e-3  # seconds after which a callback that has not come back is taken for one that waits
_END_SECONDS = 5.0  # time that an exiting process gives its callbacks


class Callback:
    """A callback that is to be called once.

    Attributes:
        ended: whether it has come back.
    """

    __slots__ = ("_began", "_run", "ended")

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._began = 0.0
        self.ended = False


class _Local(threading.local):
    """Each thread's own: the call that it runs, and the operation that it waits for."""

    call: Callback | None = None
    awaited: Any = None  # None for none


class Callbacks:
    """The callbacks of this process.

    Attributes:
        local: for each thread, the call that it runs and the operation that it waits for.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._queue: deque[Callback] = deque()
        self._beside: deque[Callback] = deque()  # whose operations were started by a callback that runs
        self._turn: Callback | None = None  # the one that runs in its turn
        self._threads: list[threading.Thread] = []
        self._idle = 0  # threads
        self._coming = (
            0  # threads that have been started, or have run a call, and have not looked for one since
        )
        self._stopping = False
        self.local = _Local()

    @property
    def current(self) -> Callback | None:
        """Return the call that this thread runs."""
        return self.local.call

    def submit(self, run: Callable[[], None], operation: Any, within: Callback | None = None) -> Callback:
        """Give a callback its turn.

        Args:
            run: function that calls it.
            operation: operation that has ended; a thread that waits for it, if this is one, runs the callback then.
            within: the call that has started the operation.
        """
        call = Callback(run)
        with self._changed:
            if within is None or within.ended:
                self._queue.append(call)
                if operation is not None and self.local.awaited is operation:
                    return call
            else:
                self._beside.append(call)
            has_thread = self._wake()
        if not has_thread:
            self.run_waiting()
        return call

    def run_waiting(self) -> None:
        """Run the callbacks whose turn it is, in this thread, as long as no other thread runs one."""
        while self._queue or self._beside:
            with deferral:
                with self._changed:
                    call = self._next()
                    if call is None:
                        self._wake()  # should the one that runs take long
                        return
                self._run(call)

    def hand_over(self) -> None:
        """Let another thread run the callbacks that are due, since this one, whose wait has ended early, does not."""
        with deferral, self._changed:
            if self._queue or self._beside:
                self._wake()

    def finish(self, call: Callback) -> None:
        """Return when a call has come back, or at once in that call itself; run others meanwhile."""
        while not call.ended and call is not self.local.call:
            with deferral:
                with self._changed:
                    mine = self._next()
                    if mine is None:
                        self._changed.wait(_PATIENCE)
                if mine is not None:
                    self._run(mine)

    def stop(self) -> None:
        """Let the callbacks that are due come back, within some seconds, and end the threads."""
        deadline = time.monotonic() + _END_SECONDS
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _next(self) -> Callback | None:
        """Take the next call that may run now, and have another thread look for the rest. With the lock."""
        if self._beside:
            call = self._beside.popleft()
        else:
            now = time.monotonic()
            if not self._queue or (self._turn is not None and now < self._turn._began + _PATIENCE):
                return None
            call = self._turn = self._queue.popleft()
            call._began = now
        if self._queue or self._beside:
            self._wake()  # this thread, which may be the only one that knows of them, may wait in the call
        return call

    def _run(self, call: Callback, *, serves: bool = False) -> None:
        """Run a call; a thread that ``serves`` looks for the next one then."""
        before, self.local.call = self.local.call, call
        awaited, self.local.awaited = self.local.awaited, None
        try:
            call._run()
        except Exception as error:
            report(error, "a callback")
        finally:
            self.local.call = before
            self.local.awaited = awaited
            with self._changed:
                call.ended = True
                self._coming += serves
                if self._turn is call:
                    self._turn = None
                self._changed.notify_all()

    def _wake(self) -> bool:
        """Have a thread look for calls; return False if there is none and none can be started. With the lock."""
        if self._idle or self._coming:
            self._changed.notify_all()
            return True
        if self._stopping:
            return False
        if not self._threads:
            atexit.register(self.stop)
        thread = threading.Thread(target=self._serve, name="hybridcomp-callbacks", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads
            return bool(self._threads)
        self._coming += 1
        self._threads.append(thread)
        return True

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._coming -= 1
                while (call := self._next()) is None:
                    if self._stopping and not self._queue:
                        return
                    self._idle += 1
                    self._changed.wait(_PATIENCE if self._queue else None)
                    self._idle -= 1
            try:
                self._run(call, serves=True)
            except BaseException as error:
                report(error, "hybridcomp's thread of callbacks")
            del call  # it may hold what the caller has given up


callbacks = Callbacks()
"""The callbacks of this process."""

os.register_at_fork(after_in_child=callbacks.__init__)  # type: ignore[misc]  # its threads are the parent's

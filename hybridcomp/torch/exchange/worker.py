"""Run the tasks of a communicator in a thread of its own, which ends before the interpreter does."""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable

Task = Callable[[], None]
_JOIN_SECONDS = 5.0  # in which exchanges under way may end when the process does
_LEAVE_SECONDS = 2.0  # in which those that have not are given up

_Queue = queue.SimpleQueue[Task | None]  # None is the last one
_running: dict[threading.Thread, _Queue] = {}
# The process ends: whoever waits for messages gives up. Whoever waits in compiled code has to look at it, for
# the interpreter ends a thread that comes back from there too late by an unwinding which C++ takes for a fault.
leaving = threading.Event()


class Worker:
    """A worker that runs tasks first in, first out, in its own thread, which does not keep this object alive."""

    def __init__(self, name: str) -> None:
        self._tasks: _Queue = queue.SimpleQueue()
        self._name = name
        self._thread: threading.Thread | None = None

    def submit(self, task: Task) -> None:
        """Queue a task, which must not raise."""
        if self._thread is None:
            if not _running:
                atexit.register(_end_all)
            self._thread = threading.Thread(target=_serve, args=(self._tasks,), name=self._name, daemon=True)
            _running[self._thread] = self._tasks
            self._thread.start()
        self._tasks.put(task)

    def close(self) -> None:
        """End the thread after the tasks that are queued."""
        self._tasks.put(None)


def _serve(tasks: _Queue) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # it may hold the worker's owner
    _running.pop(threading.current_thread(), None)


def _end_all() -> None:
    """End the threads at exit."""
    running = list(_running.items())
    for _, tasks in running:
        tasks.put(None)
    _join(running, _JOIN_SECONDS)
    leaving.set()
    _join(running, _LEAVE_SECONDS)


def _join(running: list[tuple[threading.Thread, _Queue]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for thread, _ in running:
        thread.join(max(0.0, deadline - time.monotonic()))

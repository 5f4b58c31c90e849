"""Run tasks in turn in a thread."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable

Task = Callable[[], None]
_JOIN_SECONDS = 5.0

_running: dict[threading.Thread, Tasks] = {}


class Tasks:
    """A queue, and the function that the thread calls while it is empty.

    Attributes:
        idle: is called with a condition that ends it: there is a task. Anything that returns early will do.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self.idle: Callable[[Callable[[], bool]], None] | None = None

    def put(self, task: Task | None) -> None:
        """Append a task; None is the last one."""
        self._queue.put(task)

    def get(self) -> Task | None:
        """Return the next task; waits for it."""
        if self.idle is not None and self._queue.empty():
            self.idle(lambda: not self._queue.empty())
        return self._queue.get()


class Worker:
    """A worker that runs tasks first in, first out, in its own thread, which does not keep this object alive."""

    def __init__(self, name: str) -> None:
        self.tasks = Tasks()
        self._name = name
        self._thread: threading.Thread | None = None

    def submit(self, task: Task) -> None:
        """Queue a task, which must not raise."""
        if self._thread is None:
            if not _running:
                atexit.register(_end_all)
            self._thread = threading.Thread(target=_serve, args=(self.tasks,), name=self._name, daemon=True)
            _running[self._thread] = self.tasks
            self._thread.start()
        self.tasks.put(task)

    def close(self) -> None:
        """End the thread after the tasks that are queued."""
        self.tasks.put(None)


def _serve(tasks: Tasks) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # it may hold the worker's owner
    _running.pop(threading.current_thread(), None)


def _end_all() -> None:
    """End the threads at exit: one still in torch's C++ when the interpreter ends would abort the process."""
    running = list(_running.items())
    for _, tasks in running:
        tasks.put(None)
    for thread, _ in running:
        thread.join(_JOIN_SECONDS)

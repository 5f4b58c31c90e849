"""Run several batches at a time: while the bytes of one are on the wire, another is encoded or decoded.

Exchanges start in one order on all ranks: a new batch starts its first, then each older one goes on by one. When no
other batch follows for a while, the older ones go on in turn until all have ended. A thread does all of it.
"""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable

from hybridcomp.torch.exchange.batch import Batch

Task = Callable[[], None]
_JOIN_SECONDS = 5.0

_Queue = queue.SimpleQueue[Task | None]  # None is the last one
_running: dict[threading.Thread, _Queue] = {}


class Pipeline:
    """The batches in flight; every method is called by one thread.

    Args:
        keep: function that keeps a batch which has failed, for as long as somebody may still write to its buffers.
    """

    def __init__(self, keep: Callable[[Batch], None]) -> None:
        self._flying: list[Batch] = []
        self._keep = keep

    def start(self, batch: Batch) -> None:
        """Start a batch, and let each older one go on by one exchange."""
        older = list(self._flying)
        batch.start()
        self._flying.append(batch)
        self._drop_if_ended(batch)
        for each in older:
            self._advance(each)

    def flush(self, batch: Batch | None = None) -> None:
        """Let all batches go on in turn until one has ended, or all have.

        Args:
            batch: the batch to end; None for all.
        """
        while self._flying and (batch is None or batch in self._flying):
            for each in list(self._flying):
                self._advance(each)

    def _advance(self, batch: Batch) -> None:
        batch.advance()
        self._drop_if_ended(batch)

    def _drop_if_ended(self, batch: Batch) -> None:
        if batch.ended:
            self._flying.remove(batch)
            if batch.failed:
                self._keep(batch)


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
    """End the threads at exit: one still in torch's C++ when the interpreter ends would abort the process."""
    running = list(_running.items())
    for _, tasks in running:
        tasks.put(None)
    for thread, _ in running:
        thread.join(_JOIN_SECONDS)

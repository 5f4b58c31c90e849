"""Implement torch's ``Work`` for operations in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.distributed_c10d import Work
from torch.futures import Future

from hybridcomp import trace
from hybridcomp.collectives.execution.callbacks import Callback, callbacks
from hybridcomp.collectives.execution.traced_waits import note_awake, say_slept
from hybridcomp.torch.backend.promise import Promise
from hybridcomp.torch.streams import CallerStreams
from hybridcomp.torch.untraced import untraced

if TYPE_CHECKING:
    from hybridcomp.collectives.execution.progress import Request
    from hybridcomp.torch.profiling import Range


@untraced
class CommWork(Work):
    """A work of one or several operations in flight, with the function to call when they have ended.

    Completion runs once, in the thread that sees the last operation end: the waiting one, or the background thread.
    It copies staged results to their tensors, then fills the future; on CUDA in the order of the streams that were
    current when this was made. A wait makes the current streams wait for that. Where nothing is to be copied and
    nobody has asked for the future, there is nothing to do.

    Attributes:
        requests: operations in flight.
        limit: seconds that :meth:`wait` waits if it is given no timeout; None is the group's own timeout.
    """

    limit: float | None = None
    _caller: CallerStreams | None = None
    _commit: Callable[[], None] | None = None
    _completed = False
    _error: BaseException | None = None
    _promise: Promise | None = None
    _mark: Range | None = None
    _asker: int | None = None  # the thread that asked for the future, while a trace is recorded
    _within: Callback | None = None  # the callback that asked for the future
    _left: int | None = None  # requests that have not ended; None while nobody is to see the last one end

    def __init__(
        self,
        requests: Sequence[Request],
        outputs: list[torch.Tensor],
        commit: Callable[[], None] | None = None,
    ) -> None:
        """Make a work of started operations.

        Args:
            requests: operations to wait for; may be empty.
            outputs: the tensors that hold the result; the future's value.
            commit: function to call once after all of ``requests`` ended well.
        """
        Work.__init__(self)
        self.requests = requests
        self._outputs = outputs
        self._lock = threading.Lock()
        for tensor in outputs:
            if tensor.is_cuda:
                self._caller = CallerStreams(outputs)
                break
        if commit is not None:
            self._commit = commit
            if requests:
                self._see_end()
        if not requests:
            if commit is None and self._caller is None:
                self._completed = True
            else:
                self._complete()

    # -- torch's side --------------------------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the results are in their tensors.

        Args:
            timeout: longest wait; None or zero is that of the operation's options, or else the group's own.

        Raises:
            CollectiveTimeoutError: the operation did not end in time.
            HybridcompError: the operation failed.
        """
        if self._completed and not (self.requests or self._error or self._mark or self._caller):
            return True
        seconds = timeout.total_seconds() if timeout else self.limit
        deadline = None if seconds is None else time.monotonic() + seconds
        for request in self.requests:
            request.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        self._complete()
        if self._mark is not None:
            self._mark.join()
        if self._error is not None:
            raise self._error
        if self._caller is not None:
            self._caller.join()
        return True

    def synchronize(self) -> None:
        """Wait as :meth:`wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Tell whether the operation has ended, well or not; makes progress."""
        for request in self.requests:
            if not request.done:
                with suppress(Exception):  # then it has ended; `wait` and `exception` tell how
                    request.test()
            if not request.done:
                return False
        self._complete()
        return True

    def is_success(self) -> bool:
        """Tell whether the operation has ended well."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error with which the operation ended; None if it ended well or has not ended."""
        if all(request.done for request in self.requests):
            self._complete()
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that hold the result."""
        return self._outputs

    def source_rank(self) -> int:
        """Return the sender's rank in the group, of a finished receive from any source."""
        status = self.requests[0].status if self.requests else None
        return -1 if status is None else status.Get_source()

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> Future[Any]:
        """Return a future with the result tensors.

        Its callbacks run in a thread that waits for this work, or in one of hybridcomp's, and may wait themselves.
        """
        with self._lock:
            if self._promise is None:
                self._within = callbacks.current
                cuda = sorted({t.device for t in self._outputs if t.device.type == "cuda"}, key=str)
                self._promise = Promise(cuda)
                if self._completed:
                    self._keep(self._promise)
            future = self._promise.future
        if trace.recorder is not None:
            self._asker = threading.get_native_id()
            note_awake()
        self._see_end()
        return future

    def mark(self, mark: Range) -> None:
        """End a profiler's range when the operation ends."""
        with self._lock:
            self._mark = mark
            completed = self._completed
        if completed:
            mark.end()
        else:
            self._see_end()

    # -- the engine's side ---------------------------------------------------------------------------

    def _see_end(self) -> None:
        """Arrange that the thread that sees the last operation end completes this."""
        with self._lock:
            if self._completed or self._left is not None:
                return
            self._left = len(self.requests)
        for request in self.requests:
            request.add_done_callback(self._one_done)

    def _one_done(self, request: Request) -> None:
        with self._lock:
            assert self._left is not None
            self._left -= 1
            last = self._left == 0
        if last:
            self._complete(request)

    def _complete(self, last: Request | None = None) -> None:
        with self._lock:
            if self._completed:
                return
            for request in self.requests:
                if request.exception is not None:
                    self._error = request.exception
                    break
            if self._error is None and self._commit is not None:
                try:
                    with _of(self._caller):
                        self._commit()
                    if self._caller is not None:
                        self._caller.mark()
                except Exception as error:
                    self._error = error
            self._commit = None
            self._completed = True
            promise, mark = self._promise, self._mark
        if mark is not None:
            mark.end()
        if promise is not None:
            if self._asker is not None and trace.recorder is not None:
                say_slept(trace.recorder, self.requests[-1], self._asker)
            callbacks.submit(partial(self._keep, promise), last, self._within)

    def _keep(self, promise: Promise) -> None:
        if self._error is None:
            with _of(self._caller):  # a future of CUDA tensors takes these streams' events
                promise.succeed(self._outputs)
        else:
            promise.fail(self._error)


def _of(caller: CallerStreams | None) -> AbstractContextManager[None]:
    """Make the streams of the caller that has started an operation the current ones within a block."""
    return nullcontext() if caller is None else caller.current()


def joined(works: Sequence[CommWork]) -> CommWork:
    """Return one work that ends when all of ``works`` have."""
    requests = [request for work in works for request in work.requests]
    outputs = [tensor for work in works for tensor in work._outputs]

    def commit() -> None:
        for work in works:
            work._complete()
            if work._error is not None:
                raise work._error

    return CommWork(requests, outputs, commit)

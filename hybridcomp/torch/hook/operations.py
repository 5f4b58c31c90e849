"""Average a hook's buckets by operations of a communicator: one for the parameters of each codec, or one for each.

An operation carries each parameter as if it were alone, so that the bits of results and of residuals do not depend on
which parameters share a bucket: DDP rebuilds its buckets, and a run may resume with other ones. Small uncompressed
parameters go as one array.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.futures import Future

from hybridcomp.arrays import DType, Flat, flatten
from hybridcomp.collectives.choices import OperationOptions
from hybridcomp.collectives.execution.callbacks import callbacks
from hybridcomp.collectives.operations.flat_parts import Together, allreduce_parts
from hybridcomp.collectives.operations.flat_small import allreduce_small
from hybridcomp.torch import staging
from hybridcomp.torch.backend.promise import Promise
from hybridcomp.torch.hook.counts import Counts
from hybridcomp.torch.hook.plan import Piece, Split
from hybridcomp.torch.profiling import Range, in_range, profiled

if TYPE_CHECKING:
    from hybridcomp.collectives.starting import OperationStarter
    from hybridcomp.collectives.stats import Call

_is_done = attrgetter("done")


class Follows(Protocol):
    """A bucket that operations belong to."""

    def follow(self, request: Any, call: Call) -> None:
        """Take notice of an operation that has started."""


class Operations(abc.ABC):
    """Starter of the operations of one hook.

    Attributes:
        comm: communicator that starts them; nobody else uses it.
    """

    def __init__(self, comm: OperationStarter[Any], counts: Counts) -> None:
        """Start operations on ``comm``, and count them."""
        self.comm = comm
        self._counts = counts
        self._call: Call | None = None
        self._pieces: Sequence[Piece] = ()  # of the operation that starts

    def average(self, buffer: torch.Tensor, split: Split, step: int) -> Averaging:
        """Start to average a bucket, in place.

        Args:
            buffer: bucket in host memory, or on a CUDA device; where kernels do not run, a host's copy is averaged.
            split: its pieces.
            step: step of training, for codecs that draw random numbers.
        """
        target = staging.Target(buffer.detach(), load=True)
        values = memory_of(target.data)
        averaging = Averaging(buffer, target, self._counts)
        self._note_started(averaging.requests)
        begin = partial(self.start, averaging, values, split, step, on_host=_on_host(buffer))
        if profiled():

            def begin_average() -> Averaging:
                begin()
                return averaging

            # Its bytes may go by ways that no other range tells of, such as memory that ranks of a host share.
            in_range("all_reduce", [buffer], begin_average)
        else:
            begin()
        averaging.all_started()
        return averaging

    def start(self, bucket: Follows, values: Flat, split: Split, step: int, *, on_host: bool) -> None:
        """Start to average pieces of an array, which ``bucket`` follows.

        Args:
            bucket: bucket that the operations belong to.
            values: the array.
            split: its pieces.
            step: step of training.
            on_host: whether one operation carries the pieces of one codec, where the communicator does that; the same
                on all ranks.
        """
        for part, batching in self._batches(split, values.dtype, on_host=on_host):
            with batching:
                if part.small:
                    self._try(bucket, partial(self._start_small, bucket, values, part))
                if on_host:
                    for pieces in part.alike:
                        self._try(bucket, partial(self._start_alike, bucket, values, pieces, step))
                else:
                    for piece in part.alone:
                        self._try(bucket, partial(self._start_piece, bucket, values, piece, step))

    @abc.abstractmethod
    def flush(self) -> None:
        """Say that no further bucket follows in this step."""

    @abc.abstractmethod
    def _batches(
        self, split: Split, dtype: DType, *, on_host: bool
    ) -> Iterable[tuple[Split, AbstractContextManager[None]]]:
        """Return the pieces that are started together, and the context to start them in."""

    @abc.abstractmethod
    def _start_one(self, part: Flat, piece: Piece, step: int) -> Any:
        """Start to average one piece."""

    def _note_started(self, requests: Sequence[Any]) -> None:  # noqa: B027  (most need not know)
        """Take notice of a bucket's operations, which start now."""

    def note(self, call: Call) -> None:
        """Take notice of an operation's statistics when it starts; for the communicator's ``on_start``."""
        call.kinds = self._counts.kinds(self._pieces)
        self._call = call

    def _try(self, bucket: Follows, start: Callable[[], None]) -> None:
        """Start operations; if that fails, start a failed one, since the other ranks wait for it and must be told."""
        try:
            start()
        except Exception as error:
            self._pieces = ()
            self._follow(bucket, self.comm.start_failed("all_reduce", error))

    def _start_small(self, bucket: Follows, values: Flat, part: Split) -> None:
        self._pieces = part.small
        request = allreduce_small(self.comm, values, part.all_small, "avg", part.small_as)
        self._follow(bucket, request)

    def _start_alike(self, bucket: Follows, values: Flat, together: Together, step: int) -> None:
        """Start the pieces that go by one codec."""
        pieces: Sequence[Any] = together.parts
        self._pieces = pieces
        request = allreduce_parts(self.comm, values, together, "avg", pieces[0].choice, step)
        if request is not None:
            self._follow(bucket, request)
            return
        for piece in pieces:
            self._start_piece(bucket, values, piece, step)

    def _start_piece(self, bucket: Follows, values: Flat, piece: Piece, step: int) -> None:
        part = Flat(values.data[piece.start : piece.stop], values.dtype, piece.shape, True, False)
        self._pieces = [piece]
        self._follow(bucket, self._start_one(part, piece, step))

    def _follow(self, bucket: Follows, request: Any) -> None:
        call, self._call = self._call, None
        assert call is not None
        bucket.follow(request, call)


def memory_of(tensor: torch.Tensor) -> Flat:
    """Return the memory of a tensor that operations can use as it is: the host's, or a device's."""
    return flatten(tensor, writable=True, device=True)


class MpiOperations(Operations):
    """The operations of a hook on a hybridcomp group; the backward pass waits for them once nothing else is left."""

    def __init__(self, session: Any, counts: Counts) -> None:
        """Start operations on the session of a communicator of MPI's, and count them."""
        super().__init__(session, counts)
        self._flying: list[Sequence[Any]] = []  # each bucket's requests

    def flush(self) -> None:
        """Have the engine of autograd wait for all started operations; the futures tell how they ended.

        DDP then waits in compiled code that does not know of the engine of communication.
        """
        if torch._C._current_graph_task_id() != -1:
            torch.autograd.Variable._execution_engine.queue_callback(self._wait)

    def _wait(self) -> None:
        flying, self._flying = self._flying, []
        for requests in flying:
            # The last one ends last as a rule, and the others while it is waited for.
            for request in reversed(requests):
                if not request.done:
                    with suppress(Exception):
                        request.wait()
        callbacks.run_waiting()

    def _batches(
        self, split: Split, dtype: DType, *, on_host: bool
    ) -> Iterable[tuple[Split, AbstractContextManager[None]]]:
        return ((split, nullcontext()),)

    def _start_one(self, part: Flat, piece: Piece, step: int) -> Any:
        from hybridcomp.collectives.operations import flat_reductions  # noqa: PLC0415  (initialises MPI)

        session: Any = self.comm
        options = OperationOptions(piece.name, "backward", piece.choice)
        return flat_reductions.allreduce(session, part, part, "avg", options, step=step)

    def _note_started(self, requests: Sequence[Any]) -> None:
        while self._flying and all(map(_is_done, self._flying[0])):
            del self._flying[0]
        self._flying.append(requests)


def _on_host(buffer: torch.Tensor) -> bool:
    """Tell whether a buffer is in host memory, where one operation carries several parameters.

    A rank on whose device no kernels run averages a host's copy, but starts what the other ranks start.
    """
    return not buffer.is_cuda


class Averaging:
    """A bucket's average, until its last operation has ended; callbacks of operations come in any thread.

    Attributes:
        future: future of the buffer, for torch's C++.
        requests: its operations, in the order of their starts.
    """

    def __init__(self, buffer: torch.Tensor, target: staging.Target, counts: Counts) -> None:
        self._promise = Promise([buffer.device] if buffer.is_cuda else [])
        self.future: Future[torch.Tensor] = self._promise.future
        self._buffer, self._target = buffer, target
        self._counts = counts
        self.requests: list[Any] = []
        self._left = 1  # for all_started
        self._within = callbacks.current
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Return when the average is in the buffer, by the operations' own timeouts.

        Raises:
            CollectiveTimeoutError: an operation did not end in time.
            HybridcompError: an operation failed, here or on another rank.
        """
        for request in self.requests:
            request.wait()
        if self._error is not None:
            raise self._error

    def mark(self, mark: Range) -> None:
        """End a profiler's ranges when the average has ended."""
        self.future.add_done_callback(lambda _: mark.end())

    def follow(self, request: Any, call: Call) -> None:
        """Count an operation when it has ended."""

        def done(request: Any) -> None:
            error = request.exception
            if error is None:
                try:
                    self._counts.add_operation(call)
                except Exception as failure:
                    error = failure
            self._one_done(error, request)

        with self._lock:
            self._left += 1
        self.requests.append(request)
        request.add_done_callback(done)

    def all_started(self) -> None:
        """Say that no further operation follows."""
        self._one_done(None)

    def _one_done(self, error: BaseException | None, request: Any = None) -> None:
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            if self._left:
                return
        if self._error is None:
            try:
                self._target.commit()
            except BaseException as failure:
                self._error = failure
        callbacks.submit(self._keep_promise, request, self._within)

    def _keep_promise(self) -> None:
        """Complete the future, whose callbacks are called here."""
        if self._error is None:
            # Nothing of ours is under way on a device any more: whatever comes next there may read the buffer.
            self._promise.succeed(self._buffer)
        else:
            self._promise.fail(self._error)

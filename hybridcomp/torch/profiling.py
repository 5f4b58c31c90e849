"""Mark ranges in torch's profiler: of each call of a process group, hook or FSDP2, from its start to its end.

One range has the name that torch's own backends give theirs, ``hybridcomp:all_reduce``, and the shapes of the input
tensors. For every operation of the communicator that the call makes, usually one, there is another that names the
policy's choice: ``hybridcomp all_reduce axis=dp codec=int8:block=128 bytes=4194304``, with the bytes of the caller's
buffer.

A profiler that stops ends the ranges of calls that are under way: torch frees what it has recorded of them, and a range
that ended later would write to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch.autograd import profiler
from torch.futures import Future

if TYPE_CHECKING:
    from hybridcomp.collectives.stats import Call

_here = threading.local()
_open: set[Range] = set()
_beginning = threading.Lock()
_stopping = False

profiling = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


def profiled() -> bool:
    """Tell whether a profiler of this thread is on, or one of all threads, which :data:`profiling` does not see."""
    return profiling() or profiler._is_profiler_enabled


class Range:
    """The ranges of one call, which starts in a ``with`` block; then :meth:`end` and :meth:`join`."""

    def __init__(self, op: str, tensors: Sequence[torch.Tensor]) -> None:
        """Prepare the ranges.

        Args:
            op: the call's name, such as ``all_reduce``.
            tensors: inputs of the call.
        """
        self._op, self._tensors = op, tensors
        self._ended: Future[Any] = Future()
        self._recorded: list[Any] = []

    def __enter__(self) -> Range:
        self._begin(f"hybridcomp:{self._op}", self._tensors)
        _here.open = self
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _here.open = None
        if kind is not None:
            self.end()

    def end(self) -> None:
        """Record that the call has ended, unless its ranges have.

        Another thread does so: torch takes a range that ends in the thread it began in for one that encloses all
        that this thread did meanwhile.
        """
        _ender().submit(self._end)

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)
        with _beginning:
            _open.discard(self)

    def join(self) -> None:
        """Return when the profiler has the end."""
        for recorded in self._recorded:
            recorded.wait()

    def _begin(self, name: str, tensors: Sequence[torch.Tensor] = ()) -> None:
        with _beginning:
            if _stopping or self._ended.done():
                return
            _watch_stops()
            _open.add(self)
            self._record(name, tensors)

    def _record(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        handle = torch.autograd._record_function_with_args_enter(name, *tensors)  # type: ignore[attr-defined]
        self._recorded.append(torch.ops.profiler._call_end_callbacks_on_jit_fut(handle, self._ended))


class Started(Protocol):
    """A call that is under way."""

    def mark(self, mark: Range) -> None:
        """End the call's ranges when it ends."""


StartedT = TypeVar("StartedT", bound=Started)


def in_range(op: str, tensors: Sequence[torch.Tensor], start: Callable[[], StartedT]) -> StartedT:
    """Start a call, and have the profiler see it until it ends.

    Args:
        op: the call's name, such as ``all_reduce``.
        tensors: inputs of the call.
        start: function that starts it.
    """
    with Range(op, tensors) as mark:
        call = start()
    call.mark(mark)
    return call


def note(call: Call) -> None:
    """Begin the range of an operation that the communicator is about to start, if its call is being profiled."""
    call_of: Range | None = getattr(_here, "open", None)
    if call_of is not None:
        call_of._begin(f"hybridcomp {call.op} axis={call.axis} codec={call.codec} bytes={call.raw_bytes}")


@cache
def _watch_stops() -> None:
    """Have torch's profiler, when it stops, end the ranges that are open."""
    stop = profiler._disable_profiler  # type: ignore[attr-defined]

    @wraps(stop)
    def end_ranges_and_stop() -> Any:
        global _stopping  # noqa: PLW0603
        with _beginning:
            _stopping = True
            ending = list(_open)
        try:
            for call in ending:
                call.end()
            for call in ending:
                call.join()
            return stop()
        finally:
            _stopping = False

    profiler._disable_profiler = end_ranges_and_stop  # type: ignore[attr-defined]


@cache
def _ender() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="hybridcomp-profiler")

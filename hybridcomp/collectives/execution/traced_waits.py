"""Record in the trace when threads of the program wait for operations.

A thread that waits in the engine records that itself. One that waits for a future waits in torch's code: Linux counts
how long it has slept, and the thread that completes the future reads that count.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hybridcomp import trace
from hybridcomp.steps import awake_seconds, schedstat

if TYPE_CHECKING:
    from hybridcomp.collectives.execution.request import Request

_BRIEF = 20e-6  # seconds of waits that a trace does not show
# For each thread, a time, and the seconds for which the thread had been awake by then.
_awake: dict[int, tuple[float, float]] = {}


def say_waited(recorder: trace.Recorder, request: Request | None, began: float) -> None:
    """Record that this thread has been in an operation since ``began`` and could not compute.

    Args:
        recorder: recorder of the trace.
        request: request of the operation; None for all operations in flight.
        began: start of the wait, by :func:`time.perf_counter`.
    """
    ended = time.perf_counter()
    thread = threading.get_native_id()
    if thread in _awake:
        note_awake()
    if ended - began >= _BRIEF:
        _record(recorder, request, began, ended)


def note_awake() -> None:
    """Note for how long this thread has been awake until now: it may wait for a future next."""
    awake = awake_seconds()
    if awake is not None:
        _awake[threading.get_native_id()] = time.perf_counter(), awake


def say_slept(recorder: trace.Recorder, request: Request, thread: int) -> None:
    """Record the wait of a thread, if it has waited, for the future of an operation that has just ended.

    Args:
        recorder: recorder of the trace.
        request: request of the operation.
        thread: native number of the thread that asked for the future.
    """
    known, counted = _awake.get(thread), schedstat(thread)
    if known is None or counted is None or not _sleeps(thread):
        return
    now, awake = time.perf_counter(), sum(counted)
    slept = now - known[0] - (awake - known[1])
    _awake[thread] = now, awake
    if slept >= _BRIEF:
        _record(recorder, request, max(known[0], now - slept), now)


def _record(recorder: trace.Recorder, request: Request | None, began: float, ended: float) -> None:
    if request is None or request.name is None:
        recorder.waited("wait", began, ended)
        return
    op, number, axis, *_ = request.name
    recorder.waited(
        f"wait for {op}", began, ended, op=op, axis=axis, comm=f"{request.communicator:x}", n=number
    )


def _sleeps(thread: int) -> bool:
    """Tell whether a thread is neither running nor waiting for a core: only then are its counts up to date."""
    try:
        return Path(f"/proc/self/task/{thread}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"S"
    except (OSError, IndexError):
        return False

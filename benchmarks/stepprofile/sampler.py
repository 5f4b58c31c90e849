"""Sample the main thread's Python stack, and charge its time to parts."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from types import CodeType, FrameType

from .parts import ELSEWHERE

_TO_THREAD = 4  # SIGEV_THREAD_ID
# Not SIGALRM: the library holds back the signals that programs answer until its own work can be left.
_SIGNAL = signal.SIGPROF


class _Event(ctypes.Structure):
    """The kernel's ``struct sigevent``."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("number", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("thread", ctypes.c_int),
        ("rest", ctypes.c_byte * 44),
    )


class _Interval(ctypes.Structure):
    """The kernel's ``struct itimerspec``: seconds and nanoseconds of the period, and until the first time."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns"))


class _Timer:
    """A timer of the wall clock that sends the calling thread a signal; Python's own would send another one.

    Args:
        hertz: signals a second.
    """

    def __init__(self, hertz: float) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._timer = ctypes.c_void_p()
        event = _Event(number=_SIGNAL, notify=_TO_THREAD, thread=threading.get_native_id())
        self._call("timer_create", time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer))
        every = int(1e9 / hertz)
        self._call(
            "timer_settime", self._timer, 0, ctypes.byref(_Interval(0, every, 0, every)), ctypes.c_void_p()
        )

    def _call(self, name: str, *arguments: object) -> None:
        if getattr(self._libc, name)(*arguments) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{name}: {os.strerror(number)}")

    def stop(self) -> None:
        """Remove the timer."""
        self._call("timer_delete", self._timer)


class Times:
    """Seconds that a part took.

    Attributes:
        wall: seconds by the clock.
        core: seconds on a core.
        ready: seconds in which it could run but had no core.
    """

    __slots__ = ("core", "ready", "wall")

    def __init__(self) -> None:
        self.wall = self.core = self.ready = 0.0


class Sampler:
    """A sampler of the main thread, in which it is made, started and stopped.

    Python calls a signal's handler between two instructions of the main thread: after a call of native code, if the
    signal came during it. So samples have no equal weight: all time since the last one is charged to where
    the thread is.

    Args:
        part_of: function from path and name of a function to its part, or None where it counts for its caller.

    Attributes:
        parts: times by part.
        places: seconds by the clock, by part and function.
        count: number of samples.
    """

    def __init__(self, part_of: Callable[[str, str], str | None]) -> None:
        self.parts: dict[str, Times] = defaultdict(Times)
        self.places: dict[tuple[str, str], float] = defaultdict(float)
        self.count = 0
        self._part_of = part_of
        # Keys are ids: hashing a code object takes time by its length. The objects are kept, so that ids stay valid.
        self._known: dict[int, tuple[CodeType, str | None, str]] = {}
        self._queue = os.open("/proc/thread-self/schedstat", os.O_RDONLY)  # stays the opening thread's
        self._last = (0.0, 0.0, 0.0)
        self._timer: _Timer | None = None
        self._busy = False

    def _clocks(self) -> tuple[float, float, float]:
        """Return the seconds of the wall clock, on a core, and ready for one."""
        ready = int(os.pread(self._queue, 64, 0).split()[1]) * 1e-9
        return time.perf_counter(), time.thread_time(), ready

    def start(self, hertz: float) -> None:
        """Begin to sample."""
        signal.signal(_SIGNAL, lambda _, frame: self.charge(frame))
        signal.siginterrupt(_SIGNAL, False)  # interrupted system calls are restarted
        self._last = self._clocks()
        self._timer = _Timer(hertz)

    def stop(self) -> None:
        """Charge the time since the last sample, and end."""
        if self._timer is None:
            raise RuntimeError("the sampler was not started")
        self._timer.stop()
        self.charge(sys._getframe(1))
        signal.signal(_SIGNAL, signal.SIG_IGN)  # a signal may be on its way
        self._timer = None

    def charge(self, frame: FrameType | None) -> None:
        """Charge the time since the last sample to the part of the innermost frame that has one."""
        if self._busy:  # a signal while the handler runs: its time is charged with the next one
            return
        self._busy = True
        now = self._clocks()
        wall, core, ready = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        part, place = self._find(frame)
        times = self.parts[part]
        times.wall += wall
        times.core += core
        times.ready += ready
        self.places[part, place] += wall
        self.count += 1
        self._busy = False

    def _find(self, frame: FrameType | None) -> tuple[str, str]:
        """Return the part and the function of the innermost frame that has a part."""
        while frame is not None:
            code = frame.f_code
            known = self._known.get(id(code))
            if known is None:
                place = f"{'/'.join(code.co_filename.split('/')[-3:])}:{code.co_name}"
                known = self._known[id(code)] = (code, self._part_of(code.co_filename, code.co_name), place)
            if known[1] is not None:
                return known[1], known[2]
            frame = frame.f_back
        return ELSEWHERE, ""

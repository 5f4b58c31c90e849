"""Count the calls of Python functions that an operation makes: what it costs beside the work of compiled code."""

import sys
from collections.abc import Callable
from pathlib import Path

import hybridcomp

_OURS = str(Path(hybridcomp.__file__).parent)
_TRIES = 20


def python_calls(run: Callable[[], object], meet: Callable[[], object], *, ours: bool = False) -> int:
    """Return the calls that ``run`` makes in this thread, at least: another thread, or rank, may disturb a try.

    Args:
        run: function that runs the operation.
        meet: function that waits for all ranks, before each try.
        ours: whether to count calls of functions of hybridcomp alone.
    """
    count = 0

    def profile(frame, event, _argument) -> None:
        nonlocal count
        if event == "call" and (not ours or frame.f_code.co_filename.startswith(_OURS)):
            count += 1

    least = 1 << 30
    for _ in range(_TRIES):
        meet()
        count = 0
        sys.setprofile(profile)
        try:
            run()
        finally:
            sys.setprofile(None)
        least = min(least, count - (not ours))  # without ``run`` itself
    return least

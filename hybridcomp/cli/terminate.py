"""End a command in an orderly way when a signal comes."""

from __future__ import annotations

import signal
from types import FrameType


def end_on_signals() -> None:
    """Make SIGTERM and SIGHUP unwind the stack, so that a lab is taken down; the exit code is 128 + number.

    A signal that the caller has this process ignore, as nohup does with SIGHUP, stays ignored.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)

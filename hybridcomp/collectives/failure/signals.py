"""Defer the signals that arrive while the engine works until it can be left.

Python runs a signal's handler in the main thread, between any two of its instructions, and an error of the handler goes
through any work of that thread. A generator in which an error is raised cannot be resumed, and a lock may stay locked:
so in the main thread the engine works inside a deferral, which only records that a signal has come.
"""

from __future__ import annotations

import importlib
import signal
import threading
from collections import deque
from typing import Any

from hybridcomp.errors import NativeUnavailableError
from hybridcomp.native import extension

# Signals that programs answer in Python, by handlers that may raise.
_SIGNALS = tuple(
    int(getattr(signal, name))
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT")
    if hasattr(signal, name)
)
# ``_signal`` does without the ``signal`` module's conversion to enums and back, which takes ten times as long as the
# rest.
_compiled: Any = importlib.import_module("_signal")


class _NotCompiled:
    """Stand in for the deferral where the kernels are missing: what enters it raises that."""

    def __enter__(self) -> None:
        extension()

    def __exit__(self, *_: object) -> None: ...


def _made() -> Any:
    # Where the kernels are missing modules can be imported even so: the error is that of what needs them.
    try:
        made = extension().Deferral
    except NativeUnavailableError:
        return _NotCompiled()
    return made(threading.main_thread().ident, _SIGNALS, _compiled.getsignal, _compiled.signal, deque())


deferral: Any = _made()
"""Block of this process that no signal's handler interrupts (``with deferral:``); may be entered again inside itself.

Threads other than the main one just go through. Handlers are called as the outermost block ends, or by ``answer()``,
and their errors are raised there. ``came`` has the signals that have come and are not answered.
"""

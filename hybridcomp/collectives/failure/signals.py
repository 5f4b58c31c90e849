"""Defer the signals that arrive while the engine works until it can be left.

Python runs a signal's handler in the main thread, between any two of its instructions, and an error of the handler goes
through any work of that thread. A generator in which an error is raised cannot be resumed, and a lock may stay locked:
so in the main thread the engine works inside a :class:`Deferral`, which only records that a signal has come.
"""

from __future__ import annotations

import importlib
import signal
import threading
from collections import deque
from collections.abc import Callable
from threading import get_ident
from types import FrameType, TracebackType
from typing import Any

# Signals that programs answer in Python, by handlers that may raise.
_SIGNALS = tuple(
    int(getattr(signal, name))
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT")
    if hasattr(signal, name)
)
# ``_signal`` does without the ``signal`` module's conversion to enums and back, which takes ten times as long as the
# rest.
_compiled: Any = importlib.import_module("_signal")
_get: Callable[[int], Any] = _compiled.getsignal
_set: Callable[[int, Any], Any] = _compiled.signal
_main = threading.main_thread().ident  # a forked process does not use MPI


class Deferral:
    """Block that no signal's handler interrupts; may be entered again inside itself.

    Threads other than the main one just go through.

    Handlers are called as the outermost block ends, or by :meth:`answer`. Their errors are raised there.

    Attributes:
        came: signals that have come and are not answered.
    """

    def __init__(self) -> None:
        self.came: deque[tuple[int, FrameType | None]] = deque()
        self._depth = 0
        self._replaced: list[tuple[int, Any]] = []
        self._handlers: dict[int, Any] = {}
        self._own = self._note  # one object, to tell it from other handlers

    def __enter__(self) -> None:
        if get_ident() != _main:
            return
        if not self._depth:
            self._replace()
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if get_ident() != _main:
            return
        self._depth -= 1
        if not self._depth:
            self._restore()
            self._call()

    def answer(self) -> None:
        """Call the handlers of the signals that have come, in the main thread and where its work can be left."""
        if get_ident() != _main:
            return
        self._restore()
        try:
            self._call()
        finally:
            self._replace()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came.append((number, frame))

    def _call(self) -> None:
        while self.came:
            number, frame = self.came.popleft()
            self._handlers[number](number, frame)

    def _replace(self) -> None:
        try:
            for number in _SIGNALS:
                handler = _get(number)
                # Handlers that are not Python's are numbers, or None.
                if handler.__class__ is not int and handler is not None and handler is not self._own:
                    self._replaced.append((number, handler))
                    self._handlers[number] = handler
                    _set(number, self._own)
        except BaseException:  # a handler not yet replaced has raised
            self._restore()
            raise

    def _restore(self) -> None:
        raised: BaseException | None = None
        while self._replaced:
            try:
                number, handler = self._replaced[-1]
                if _get(number) is self._own:  # and not another handler that the program has set meanwhile
                    _set(number, handler)
                self._replaced.pop()
            except BaseException as error:  # an error of a handler that is back in its place
                raised = error
        if raised is not None:
            raise raised


deferral = Deferral()
"""Deferral of this process."""

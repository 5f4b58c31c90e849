"""Report errors that no caller can catch."""

from __future__ import annotations

import weakref


def report(error: BaseException, where: str) -> None:
    """Pass an error to ``sys.unraisablehook``, as Python does with errors that no caller can catch.

    Args:
        error: error that was raised.
        where: place of the error, in words.
    """
    # Only Python itself can make the hook's argument: it does so for an error in a weak reference's callback.
    target = _Target()
    reference = weakref.ref(target, _Raising(error, where))
    del target
    del reference


class _Target:
    pass


class _Raising:
    def __init__(self, error: BaseException, where: str) -> None:
        self._error, self._where = error, where

    def __call__(self, _: object) -> None:
        raise self._error

    def __repr__(self) -> str:
        return self._where

"""Complete futures so that they carry errors into torch's C++."""

from __future__ import annotations

from typing import Any

import torch
from torch.futures import Future


class Promise:
    """A future to be completed.

    An exception that is set on a ``Future`` itself reaches C++ as its result, where DDP says only that it is no
    tensor. One that a continuation raises is an error there, too.

    Attributes:
        future: future to hand out.
    """

    def __init__(self, devices: list[torch.device] | None = None) -> None:
        """Make a future whose value has tensors on ``devices`` (CUDA ones; none for the CPU)."""
        self._inner: Future[Any] = Future(devices=[*devices]) if devices else Future()
        self.future: Future[Any] = self._inner.then(_value)

    def succeed(self, value: Any) -> None:
        """Complete it with a tensor or a list of tensors."""
        self._inner.set_result(value)

    def fail(self, error: BaseException) -> None:
        """Complete it with an error."""
        self._inner.set_exception(error if isinstance(error, Exception) else RuntimeError(str(error)))


def _value(future: Future[Any]) -> Any:
    return future.wait()

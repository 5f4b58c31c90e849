"""Wrap a work of another backend, with a function to call when it has ended."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import Work


class PendingWork(Work):
    """A work that ends when ``work`` has and ``commit`` has run, in the waiting thread and on its CUDA stream."""

    def __init__(self, work: Any, tensors: list[torch.Tensor], commit: Callable[[], None]) -> None:
        """Make a work of a started operation.

        Args:
            work: of torch's; None if it has ended.
            tensors: that it and ``commit`` use; the first is the result.
            commit: called once.
        """
        super().__init__()
        self._work = work
        self._tensors = tensors
        self._commit: Callable[[], None] | None = commit

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the result is there, on CUDA in the order of the current stream.

        Raises:
            Exception: as the backend's work, or from decoding.
        """
        commit, self._commit = self._commit, None
        if commit is None:
            return True
        if self._work is not None:
            self._work.wait() if timeout is None else self._work.wait(timeout)
        for tensor in self._tensors:
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        commit()
        return True

    def synchronize(self) -> None:
        """Wait as :meth:`wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Tell whether :meth:`wait` would not wait for the backend."""
        return self._commit is None or self._work is None or bool(self._work.is_completed())

    def result(self) -> list[torch.Tensor]:
        """Return the result's tensor."""
        return self._tensors[:1]

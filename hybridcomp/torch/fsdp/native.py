"""Run uncompressed operations by the own collectives of a backend that is none of hybridcomp's."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Work

from hybridcomp.collectives import StatRow
from hybridcomp.collectives.stats import Call, StatTable

Tensor = torch.Tensor


class NativeCollectives:
    """The collectives of a process group of torch's, which count the bytes that they carry.

    Args:
        group: process group of torch's.
        axis: mesh axis, for statistics.
    """

    def __init__(self, group: Any, axis: str) -> None:
        self._group = group
        self._axis = axis
        self._table = StatTable()
        # The names of versions before 2.13 are the second ones.
        self._all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def all_gather(self, output: Tensor, own: Tensor, reason: str, then: Callable[[], None]) -> Work:
        """Start to gather every rank's part; ``then`` is called when ``output`` is there."""
        call = self._call("all_gather", output.nbytes, output.nbytes - own.nbytes, reason)
        work = self._all_gather(output, own, group=self._group, async_op=True)

        def commit() -> None:
            self._table.add(call)
            then()

        return PendingWork(work, [output], commit)

    def reduce_scatter(self, output: Tensor, given: Tensor, op: Any, reason: str) -> None:
        """Reduce all ranks' buffers; this rank gets its part."""
        call = self._call("reduce_scatter", given.nbytes, given.nbytes - output.nbytes, reason)
        self._reduce_scatter(output, given, op=op, group=self._group)
        self._table.add(call)

    def stats(self) -> list[StatRow]:
        """Return the statistics up to now."""
        return self._table.rows()

    def _call(self, op: str, raw: int, plain: int, reason: str) -> Call:
        call = Call(self._axis, op, "none", reason, raw, plain)
        call.wire_bytes = plain
        return call


class PendingWork(Work):
    """A work that ends when ``work`` has and ``commit`` has run, in the waiting thread and on its CUDA stream."""

    def __init__(self, work: Any, tensors: list[Tensor], commit: Callable[[], None]) -> None:
        """Make a work of a started operation.

        Args:
            work: torch's work; None if it has ended.
            tensors: the result.
            commit: function that is called once.
        """
        super().__init__()
        self._work = work
        self._tensors = tensors
        self._commit: Callable[[], None] | None = commit

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the result is there, on CUDA in the order of the current stream.

        Raises:
            Exception: an error of the backend's work, or of decoding.
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

    def result(self) -> list[Tensor]:
        """Return the result."""
        return self._tensors

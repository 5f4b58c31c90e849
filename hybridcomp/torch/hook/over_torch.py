"""Average a hook's buckets over gloo, NCCL or any other backend: batches of operations that travel together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from hybridcomp.arrays import DType, Flat
from hybridcomp.collectives.memory import on_device
from hybridcomp.collectives.operations.flat_parts import allreduce_encoded
from hybridcomp.collectives.starting import Operands
from hybridcomp.collectives.stats import allreduce_bytes
from hybridcomp.torch.exchange.batch import BatchPlan
from hybridcomp.torch.exchange.communicator import TorchCommunicator
from hybridcomp.torch.hook.operations import Operations
from hybridcomp.torch.hook.plan import Piece, Split, batches


class TorchOperations(Operations):
    """The operations of a hook on a process group that is none of hybridcomp's; a thread runs them."""

    comm: TorchCommunicator

    def flush(self) -> None:
        """See :meth:`.Operations.flush`."""
        self.comm.flush()

    def _batches(
        self, split: Split, dtype: DType, *, on_host: bool
    ) -> Iterator[tuple[Split, AbstractContextManager[None]]]:
        for batch, plan in split.once_for((self.comm.topology, dtype), partial(self._planned, dtype)):
            yield batch, self.comm.coalescing(plan, on_host=on_host)

    def _planned(self, dtype: DType, split: Split) -> list[tuple[Split, BatchPlan]]:
        """Divide the pieces of a bucket into batches, and plan each."""
        found = []
        for batch in batches(split, dtype):
            parts = [(piece.choice, piece.size) for piece in batch.alone]
            if batch.small:
                parts.append((batch.small_as, sum(piece.size for piece in batch.small)))
            layout = tuple(piece.shape for piece in [*batch.alone, *batch.small])
            found.append((batch, BatchPlan.of("all_reduce", dtype, parts, layout, self.comm.topology)))
        return found

    def _start_one(self, part: Flat, piece: Piece, step: int) -> Any:
        plain = allreduce_bytes(part.nbytes, self.comm.size)
        call = self.comm.new_call("all_reduce", piece.choice, part.nbytes, plain, name=piece.name)
        operands = Operands(part, part, on_device(part))
        return allreduce_encoded(self.comm, operands, piece.choice, call, "avg", name=piece.name, step=step)

"""Make the reduction tasks of a batch in host memory; :mod:`.device_task_factory` makes those in a device's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy.typing as npt

from hybridcomp.arrays import DType, Flat
from hybridcomp.codecs import Codec, Memory
from hybridcomp.collectives.data_path.coalesced import Coalesced
from hybridcomp.policy import check_feedback
from hybridcomp.torch.hook.context import HookContext
from hybridcomp.torch.hook.linear import Linear, Rounds
from hybridcomp.torch.hook.plan import Batch, Chunk, Piece
from hybridcomp.torch.hook.reduce_tasks import EncodedTask, ReduceTask, Shards
from hybridcomp.torch.hook.summing import Buffers, Staging, Summing

Array = npt.NDArray[Any]
Memories = dict[str, tuple[Any, Codec]]
_STREAM_BYTES = 1 << 23  # of a bucket: it is not in the caches when it is read


class TaskFactory(Protocol):
    """A factory of the reduction tasks of one batch.

    Attributes:
        buffers: for their messages.
    """

    buffers: Buffers

    @property
    def staging(self) -> Staging:
        """Return the staging of the tasks that this factory makes."""

    def begin(self, batch: Batch) -> None:
        """Prepare for a batch, before any of its tasks is made."""

    def encoded(self, chunk: Chunk) -> ReduceTask:
        """Make the task that reduces a chunk by a codec that encodes elements."""

    def linear(self, piece: Piece) -> Rounds:
        """Make the rounds that reduce a piece by a linear codec."""

    def small(self, pieces: Sequence[Piece]) -> Coalesced:
        """Make the task that reduces the small uncompressed pieces."""

    def end(self) -> Summing:
        """End a batch: wait until all results are written to the bucket, which can then be read."""


class HostTaskFactory:
    """A factory of the tasks of a batch in host memory."""

    def __init__(self, values: Flat, step: int, context: HookContext, memories: Memories) -> None:
        """Prepare.

        Args:
            values: of the bucket.
            step: of training, for codecs that draw random numbers.
            context: of the hook.
            memories: of the bucket: by parameter, the feedback's memory, its step begun, and the codec of that step.
        """
        self.staging, self.buffers = Staging(), context.buffers
        self._values: Array = values.data
        self._dtype = values.dtype
        self._step, self._context, self._memories = step, context, memories
        self._stream = values.nbytes >= _STREAM_BYTES

    def begin(self, batch: Batch) -> None:
        """See :class:`TaskFactory`."""

    def encoded(self, chunk: Chunk) -> ReduceTask:
        """See :class:`TaskFactory`."""
        piece = chunk.piece
        memory, codec = self._memory(piece)
        values = self._values[piece.start + chunk.start : piece.start + chunk.stop]
        link = self._context.link
        shards = Shards.equal(values.size, link.rank, link.size)
        return EncodedTask(
            codec, values, self._dtype, shards, memory=memory, at=chunk.start, stream=self._stream
        )

    def _memory(self, piece: Piece) -> tuple[Memory | None, Codec]:
        found = self._memories.get(piece.name)
        if found is None:
            codec, form = piece.choice.codec, piece.choice.feedback
            memory = None
            if form is None:
                codec = codec.at_step(self._step)
            else:
                memory = self._context.feedback.memory(
                    (self._context.axis, piece.name), piece.size, self._dtype, form
                )
                codec = codec.at_step(memory.begin())
            found = self._memories[piece.name] = memory, codec
        return found

    def linear(self, piece: Piece) -> Rounds:
        """See :class:`TaskFactory`."""
        context, form = self._context, piece.choice.feedback
        residual = None
        if form is not None:
            check_feedback("all_reduce", piece.choice.codec, form)
            kind: DType = self._dtype.accumulator
            residual = context.feedback.residual((context.axis, piece.name), piece.size, kind)
        values = self._values[piece.start : piece.stop]
        link = context.link
        return Linear(piece, values, self._dtype, residual, context.factors, self._step, link.rank, link.size)

    def small(self, pieces: Sequence[Piece]) -> Coalesced:
        """See :class:`TaskFactory`."""
        link = self._context.link
        coalesced = Coalesced([self._values[p.start : p.stop] for p in pieces], link.size)
        coalesced.gather()
        return coalesced

    def end(self) -> Summing:
        """See :class:`TaskFactory`."""
        yield from ()

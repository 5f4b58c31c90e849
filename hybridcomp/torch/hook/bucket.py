"""A bucket of gradients on its way: its batches as things to sum, and what it counts for when they have ended."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy.typing as npt

from hybridcomp import trace
from hybridcomp.arrays import DType, Flat
from hybridcomp.codecs import Codec, ErrorFeedback, Memory
from hybridcomp.collectives.stats import record
from hybridcomp.policy import check_feedback
from hybridcomp.torch.hook.counts import Carried, Counts
from hybridcomp.torch.hook.linear import Linear
from hybridcomp.torch.hook.links import Link
from hybridcomp.torch.hook.plan import Batch, Chunk, Piece
from hybridcomp.torch.hook.rest import Rest
from hybridcomp.torch.hook.summing import Buffers, Summing, summed
from hybridcomp.torch.hook.things import NONE, Encoded, Shards, Thing

Array = npt.NDArray[Any]
_STREAM_BYTES = 1 << 23  # of a bucket: it is not in the caches when it is read
_TRANSFERS = 64  # that a batch may have: more than any codec's rounds need


class Kept:
    """What a hook keeps between steps, and where its messages go; for one thread.

    Attributes:
        axis: the policy's section, part of the memory's keys.
        link: to the other ranks.
        feedback: residuals by (axis, parameter).
        factors: PowerSGD's Q by parameter.
        counts: statistics.
        buffers: for messages.
    """

    def __init__(
        self,
        axis: str,
        link: Link,
        feedback: ErrorFeedback,
        factors: dict[str, Array],
        counts: Counts,
    ) -> None:
        self.axis, self.link = axis, link
        self.feedback, self.factors, self.counts = feedback, factors, counts
        self.buffers = Buffers()
        self._batches = itertools.count()

    def numbers(self) -> Iterator[int]:
        """Numbers of the transfers of the next batch; the same on all ranks, which have the same batches."""
        first = next(self._batches) * _TRANSFERS
        return iter(range(first, first + _TRANSFERS))


class Bucket:
    """Averages a bucket's values over all ranks, in place."""

    def __init__(self, values: Flat, batches: list[Batch], step: int, kept: Kept) -> None:
        """Prepare.

        Args:
            values: of the bucket.
            batches: its plan.
            step: of training, for codecs that draw random numbers.
            kept: of the hook.
        """
        self._values: Array = values.data
        self._dtype = values.dtype
        self._step, self._kept = step, kept
        self._memories: dict[str, tuple[Memory | None, Codec]] = {}
        self._batches = batches
        self._stream = values.nbytes >= _STREAM_BYTES

    def runs(self) -> Iterator[Summing]:
        """The batches; to be started in this order, in the worker's thread."""
        for batch in self._batches:
            yield self._run(batch, self._kept.numbers())

    def _run(self, batch: Batch, numbers: Iterator[int]) -> Summing:
        began = time.perf_counter()
        recorder = trace.active()
        parts: list[trace.Part] | None = None if recorder is None else []
        kept, values = self._kept, self._values
        link = kept.link
        things: list[Thing] = []
        encoded = [self._encoded(chunk) for chunk in batch.encoded]
        carried = [Carried([chunk], [thing]) for chunk, thing in zip(batch.encoded, encoded, strict=True)]
        things += encoded
        linear = [self._linear(piece) for piece in batch.linear]
        carried += [Carried([_whole(p)], run.things) for p, run in zip(batch.linear, linear, strict=True)]
        things += [thing for run in linear for thing in run.next()]
        rest: Rest | None = None
        if batch.rest:
            rest = Rest([values[p.start : p.stop] for p in batch.rest], link.rank, link.size)
            thing = Encoded(NONE, rest.values, self._dtype, rest.shards)
            carried.append(Carried([_whole(piece) for piece in batch.rest], [thing]))
            things.append(thing)
        while things:
            yield from summed(things, link, kept.buffers, numbers, parts)
            things = [thing for run in linear for thing in run.next()]
        for run in linear:
            run.end()
        if rest is not None:
            rest.write_back()
        ended = time.perf_counter()
        total = kept.counts.add_batch(carried, self._dtype, link.size, ended - began)
        if recorder is not None:
            names = ", ".join(chunk.piece.name for part in carried for chunk in part.chunks)
            record(recorder, total, began, ended, parts or (), names)

    def _encoded(self, chunk: Chunk) -> Encoded:
        piece = chunk.piece
        memory, codec = self._memory(piece)
        values = self._values[piece.start + chunk.start : piece.start + chunk.stop]
        link = self._kept.link
        shards = Shards.equal(values.size, link.rank, link.size)
        return Encoded(codec, values, self._dtype, shards, memory=memory, at=chunk.start, stream=self._stream)

    def _memory(self, piece: Piece) -> tuple[Memory | None, Codec]:
        """The feedback's memory of a parameter, its step begun, and the codec of that step."""
        found = self._memories.get(piece.name)
        if found is None:
            codec, form = piece.choice.codec, piece.choice.feedback
            memory = None
            if form is None:
                codec = codec.at_step(self._step)
            else:
                memory = self._kept.feedback.memory(
                    (self._kept.axis, piece.name), piece.size, self._dtype, form
                )
                codec = codec.at_step(memory.begin())
            found = self._memories[piece.name] = memory, codec
        return found

    def _linear(self, piece: Piece) -> Linear:
        kept, form = self._kept, piece.choice.feedback
        residual = None
        if form is not None:
            check_feedback("all_reduce", piece.choice.codec, form)
            kind: DType = self._dtype.accumulator
            residual = kept.feedback.residual((kept.axis, piece.name), piece.size, kind)
        values = self._values[piece.start : piece.stop]
        link = kept.link
        return Linear(piece, values, self._dtype, residual, kept.factors, self._step, link.rank, link.size)


def _whole(piece: Piece) -> Chunk:
    return Chunk(piece, 0, piece.size)

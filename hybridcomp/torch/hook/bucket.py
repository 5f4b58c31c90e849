"""Run a bucket of gradients: its batches as tasks to sum, and its statistics when they have ended."""

from __future__ import annotations

import time
from collections.abc import Iterator

from hybridcomp import trace
from hybridcomp.arrays import Flat
from hybridcomp.collectives.data_path.coalesced import Coalesced
from hybridcomp.collectives.device.streams import StreamPair
from hybridcomp.collectives.stats import record
from hybridcomp.device import DeviceArray, Event
from hybridcomp.torch.hook.context import HookContext
from hybridcomp.torch.hook.counts import Carried
from hybridcomp.torch.hook.plan import Batch, Chunk, Piece
from hybridcomp.torch.hook.reduce_tasks import NONE, EncodedTask, ReduceTask, Shards
from hybridcomp.torch.hook.summing import Summing, summed
from hybridcomp.torch.hook.task_factory import HostTaskFactory, Memories, TaskFactory


class Bucket:
    """A bucket whose values are averaged over all ranks, in place."""

    def __init__(
        self, values: Flat, batches: list[Batch], step: int, context: HookContext, ready: Event | None = None
    ) -> None:
        """Prepare.

        Args:
            values: of the bucket; of a device's memory only if all codecs have drivers.
            batches: its plan.
            step: of training, for codecs that draw random numbers.
            context: of the hook.
            ready: the values are computed; of a device's memory only.
        """
        self._values, self._batches, self._step, self._context = values, batches, step, context
        self._memories: Memories = {}
        self._ready = ready
        self._streams: StreamPair | None = None
        if isinstance(values.data, DeviceArray):
            assert ready is not None
            self._streams = context.device(values.data.runtime).pool.pair_after([ready])
        self._left = len(batches)

    def runs(self) -> Iterator[Summing]:
        """Yield the batches' tasks; to be started in this order, in the worker's thread."""
        for batch in self._batches:
            run = self._run(batch, self._factory(), self._context.numbers())
            yield run if self._streams is None else self._on(self._streams, run)

    def _factory(self) -> TaskFactory:
        if self._streams is None:
            return HostTaskFactory(self._values, self._step, self._context, self._memories)
        from hybridcomp.torch.hook.device_task_factory import DeviceTaskFactory  # noqa: PLC0415  (only who has device arrays pays for it)

        assert self._ready is not None
        return DeviceTaskFactory(
            self._values, self._step, self._context, self._memories, self._streams, self._ready
        )

    def _on(self, streams: StreamPair, run: Summing) -> Summing:
        """Run a batch whose buffers nobody may use before the device has ended, however the batch does."""
        try:
            yield from run
        except BaseException:
            streams.drain()
            raise
        finally:
            self._left -= 1
            if not self._left:
                self._context.device(streams.queue.runtime).pool.give(streams)

    def _run(self, batch: Batch, factory: TaskFactory, numbers: Iterator[int]) -> Summing:
        began = time.perf_counter()
        recorder = trace.active()
        parts: list[trace.Part] | None = None if recorder is None else []
        context, dtype = self._context, self._values.dtype
        tasks: list[ReduceTask] = []
        factory.begin(batch)
        encoded = [factory.encoded(chunk) for chunk in batch.encoded]
        carried = [Carried([chunk], [task]) for chunk, task in zip(batch.encoded, encoded, strict=True)]
        tasks += encoded
        linear = [factory.linear(piece) for piece in batch.linear]
        carried += [Carried([_whole(p)], run.tasks) for p, run in zip(batch.linear, linear, strict=True)]
        tasks += [task for run in linear for task in run.next()]
        coalesced: Coalesced | None = None
        if batch.small:
            coalesced = factory.small(batch.small)
            shards = Shards.equal(coalesced.values.size, context.link.rank, context.link.size)
            task = EncodedTask(NONE, coalesced.values, dtype, shards)
            carried.append(Carried([_whole(piece) for piece in batch.small], [task]))
            tasks.append(task)
        while tasks:
            yield from summed(tasks, context.link, factory.buffers, numbers, parts, factory.staging)
            tasks = [task for run in linear for task in run.next()]
        for run in linear:
            run.end()
        if coalesced is not None:
            coalesced.write_back()
        yield from factory.end()
        ended = time.perf_counter()
        total = context.counts.add_batch(carried, dtype, context.link.size, ended - began)
        if recorder is not None:
            names = ", ".join(chunk.piece.name for part in carried for chunk in part.chunks)
            record(recorder, total, began, ended, parts or (), names)


def _whole(piece: Piece) -> Chunk:
    return Chunk(piece, 0, piece.size)

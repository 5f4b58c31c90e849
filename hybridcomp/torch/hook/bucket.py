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
from hybridcomp.torch.hook.counts import Carried
from hybridcomp.torch.hook.kept import Kept
from hybridcomp.torch.hook.maker import HostMaker, Maker, Memories
from hybridcomp.torch.hook.plan import Batch, Chunk, Piece
from hybridcomp.torch.hook.summing import Summing, summed
from hybridcomp.torch.hook.things import NONE, Encoded, Shards, Thing


class Bucket:
    """A bucket whose values are averaged over all ranks, in place."""

    def __init__(
        self, values: Flat, batches: list[Batch], step: int, kept: Kept, ready: Event | None = None
    ) -> None:
        """Prepare.

        Args:
            values: of the bucket; of a device's memory only if all codecs have drivers.
            batches: its plan.
            step: of training, for codecs that draw random numbers.
            kept: of the hook.
            ready: the values are computed; of a device's memory only.
        """
        self._values, self._batches, self._step, self._kept = values, batches, step, kept
        self._memories: Memories = {}
        self._ready = ready
        self._lane: StreamPair | None = None
        if isinstance(values.data, DeviceArray):
            assert ready is not None
            self._lane = kept.port(values.data.runtime).depot.lane_after([ready])
        self._left = len(batches)

    def runs(self) -> Iterator[Summing]:
        """Yield the batches' tasks; to be started in this order, in the worker's thread."""
        for batch in self._batches:
            run = self._run(batch, self._maker(), self._kept.numbers())
            yield run if self._lane is None else self._on(self._lane, run)

    def _maker(self) -> Maker:
        if self._lane is None:
            return HostMaker(self._values, self._step, self._kept, self._memories)
        from hybridcomp.torch.hook.device_maker import DeviceMaker  # noqa: PLC0415  (only who has device arrays pays for it)

        assert self._ready is not None
        return DeviceMaker(self._values, self._step, self._kept, self._memories, self._lane, self._ready)

    def _on(self, lane: StreamPair, run: Summing) -> Summing:
        """Run a batch whose buffers nobody may use before the device has ended, however the batch does."""
        try:
            yield from run
        except BaseException:
            lane.drain()
            raise
        finally:
            self._left -= 1
            if not self._left:
                self._kept.port(lane.queue.runtime).depot.give(lane)

    def _run(self, batch: Batch, maker: Maker, numbers: Iterator[int]) -> Summing:
        began = time.perf_counter()
        recorder = trace.active()
        parts: list[trace.Part] | None = None if recorder is None else []
        kept, dtype = self._kept, self._values.dtype
        things: list[Thing] = []
        maker.begin(batch)
        encoded = [maker.encoded(chunk) for chunk in batch.encoded]
        carried = [Carried([chunk], [thing]) for chunk, thing in zip(batch.encoded, encoded, strict=True)]
        things += encoded
        linear = [maker.linear(piece) for piece in batch.linear]
        carried += [Carried([_whole(p)], run.things) for p, run in zip(batch.linear, linear, strict=True)]
        things += [thing for run in linear for thing in run.next()]
        rest: Coalesced | None = None
        if batch.rest:
            rest = maker.rest(batch.rest)
            shards = Shards.equal(rest.values.size, kept.link.rank, kept.link.size)
            thing = Encoded(NONE, rest.values, dtype, shards)
            carried.append(Carried([_whole(piece) for piece in batch.rest], [thing]))
            things.append(thing)
        while things:
            yield from summed(things, kept.link, maker.buffers, numbers, parts, maker.shore)
            things = [thing for run in linear for thing in run.next()]
        for run in linear:
            run.end()
        if rest is not None:
            rest.write_back()
        yield from maker.end()
        ended = time.perf_counter()
        total = kept.counts.add_batch(carried, dtype, kept.link.size, ended - began)
        if recorder is not None:
            names = ", ".join(chunk.piece.name for part in carried for chunk in part.chunks)
            record(recorder, total, began, ended, parts or (), names)


def _whole(piece: Piece) -> Chunk:
    return Chunk(piece, 0, piece.size)

"""Make the reduction tasks of a batch, of a bucket in a device's memory: see :mod:`.maker`."""

from __future__ import annotations

from collections.abc import Sequence

from hybridcomp.arrays import Flat
from hybridcomp.codecs import Codec
from hybridcomp.codecs.device import DeviceMemory, driver_of
from hybridcomp.codecs.device.driver import MODULES, modules_of
from hybridcomp.codecs.device.feedback import MODULES as FEEDBACK_MODULES
from hybridcomp.collectives.data_path.coalesced import Coalesced
from hybridcomp.collectives.device.streams import StreamPair
from hybridcomp.cuda import prepare_in_turn
from hybridcomp.device import DeviceArray, Event
from hybridcomp.policy import check_feedback
from hybridcomp.torch.hook.device_linear import DeviceLinear
from hybridcomp.torch.hook.device_things import DeviceEncoded
from hybridcomp.torch.hook.ferry import Ferry
from hybridcomp.torch.hook.kept import Kept
from hybridcomp.torch.hook.linear import Rounds
from hybridcomp.torch.hook.maker import Memories
from hybridcomp.torch.hook.plan import Batch, Chunk, Piece
from hybridcomp.torch.hook.summing import Summing
from hybridcomp.torch.hook.things import Shards, Thing


class DeviceMaker:
    """See :class:`~.maker.Maker`."""

    def __init__(
        self, values: Flat, step: int, kept: Kept, memories: Memories, lane: StreamPair, ready: Event
    ) -> None:
        """Prepare.

        Args:
            values: of the bucket.
            step: of training, for codecs that draw random numbers.
            kept: of the hook.
            memories: of the bucket, as of :class:`~.maker.HostMaker`.
            lane: of the bucket.
            ready: the event that the values are computed; the streams follow it.
        """
        self._values: DeviceArray = values.data
        self._dtype = values.dtype
        self._step, self._kept, self._memories, self._ready = step, kept, memories, ready
        self.buffers = kept.port(self._values.runtime).buffers
        self.shore = Ferry(lane, self.buffers, kept.link)

    def begin(self, batch: Batch) -> None:
        """Load kernels. Where a launch would wait for the values, the batch does; else it is launched before they are
        computed."""
        runtime = self._values.runtime
        for codec in batch.codecs():
            prepare_in_turn((*MODULES, *modules_of(codec)), runtime)
        forms = [p.choice.feedback for p in (*batch.linear, *(chunk.piece for chunk in batch.encoded))]
        if any(form is not None for form in forms):
            prepare_in_turn(FEEDBACK_MODULES, runtime)
        if not all(map(_launches_ahead, (chunk.piece for chunk in batch.encoded))):
            self.shore.first = [self._ready]

    def encoded(self, chunk: Chunk) -> Thing:
        """See :class:`~.maker.Maker`."""
        piece = chunk.piece
        memory, codec = self._memory(piece)
        values = self._values[piece.start + chunk.start : piece.start + chunk.stop]
        link = self._kept.link
        shards = Shards.equal(values.size, link.rank, link.size)
        return DeviceEncoded(codec, values, self._dtype, shards, self.shore, memory=memory, at=chunk.start)

    def _memory(self, piece: Piece) -> tuple[DeviceMemory | None, Codec]:
        found = self._memories.get(piece.name)
        if found is None:
            codec, form = piece.choice.codec, piece.choice.feedback
            memory = None
            if form is None:
                codec = codec.at_step(self._step)
            else:
                memory = self._remembered(piece)
                codec = codec.at_step(memory.begin(self.shore.queue))
            found = self._memories[piece.name] = memory, codec
        return found

    def _remembered(self, piece: Piece) -> DeviceMemory:
        key, queue = (self._kept.axis, piece.name), self.shore.queue
        memory = self._kept.feedback.device_memory(key, piece.size, self._dtype, queue, piece.choice.feedback)
        memory.follow(queue)
        return memory

    def linear(self, piece: Piece) -> Rounds:
        """See :class:`~.maker.Maker`."""
        kept, form = self._kept, piece.choice.feedback
        memory = None
        if form is not None:
            check_feedback("all_reduce", piece.choice.codec, form)
            memory = self._remembered(piece)
        values = self._values[piece.start : piece.stop]
        return DeviceLinear(
            piece, values, self._dtype, memory, kept.factors, self._step, kept.link, self.shore
        )

    def rest(self, pieces: Sequence[Piece]) -> Coalesced:
        """Copy small pieces side by side to host memory: one copy each, where a device would do one for each shard."""
        here = self.shore.bring([self._values[p.start : p.stop] for p in pieces])
        rest = Coalesced(here, self._kept.link.size)
        self.shore.then(rest.gather)
        return rest

    def end(self) -> Summing:
        """See :class:`~.maker.Maker`."""
        self.shore.take_back()
        yield from self.shore.settle()


def _launches_ahead(piece: Piece) -> bool:
    """Tell whether encoding a piece launches kernels and waits for nothing."""
    codec = piece.choice.codec
    knows = piece.choice.feedback is None or driver_of(codec.wire_id).head(codec) is not None
    return codec.fixed_size and knows

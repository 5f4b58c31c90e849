"""Make the reduction tasks of a batch in a device's memory; :mod:`.task_factory` makes those in host memory."""

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
from hybridcomp.torch.hook.context import HookContext
from hybridcomp.torch.hook.device_linear import DeviceLinear
from hybridcomp.torch.hook.device_reduce_tasks import DeviceEncodedTask
from hybridcomp.torch.hook.device_staging import DeviceStaging
from hybridcomp.torch.hook.linear import Rounds
from hybridcomp.torch.hook.plan import Batch, Chunk, Piece
from hybridcomp.torch.hook.reduce_tasks import ReduceTask, Shards
from hybridcomp.torch.hook.summing import Summing
from hybridcomp.torch.hook.task_factory import Memories


class DeviceTaskFactory:
    """A factory of the tasks of a batch in a device's memory: see :class:`~.task_factory.TaskFactory`."""

    def __init__(
        self,
        values: Flat,
        step: int,
        context: HookContext,
        memories: Memories,
        streams: StreamPair,
        ready: Event,
    ) -> None:
        """Prepare.

        Args:
            values: of the bucket.
            step: of training, for codecs that draw random numbers.
            context: of the hook.
            memories: of the bucket, as of :class:`~.task_factory.HostTaskFactory`.
            streams: of the bucket.
            ready: the event that the values are computed; the streams follow it.
        """
        self._values: DeviceArray = values.data
        self._dtype = values.dtype
        self._step, self._context, self._memories, self._ready = step, context, memories, ready
        self.buffers = context.device(self._values.runtime).buffers
        self.staging = DeviceStaging(streams, self.buffers, context.link)

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
            self.staging.first = [self._ready]

    def encoded(self, chunk: Chunk) -> ReduceTask:
        """See :class:`~.task_factory.TaskFactory`."""
        piece = chunk.piece
        memory, codec = self._memory(piece)
        values = self._values[piece.start + chunk.start : piece.start + chunk.stop]
        link = self._context.link
        shards = Shards.equal(values.size, link.rank, link.size)
        return DeviceEncodedTask(
            codec, values, self._dtype, shards, self.staging, memory=memory, at=chunk.start
        )

    def _memory(self, piece: Piece) -> tuple[DeviceMemory | None, Codec]:
        found = self._memories.get(piece.name)
        if found is None:
            codec, form = piece.choice.codec, piece.choice.feedback
            memory = None
            if form is None:
                codec = codec.at_step(self._step)
            else:
                memory = self._remembered(piece)
                codec = codec.at_step(memory.begin(self.staging.queue))
            found = self._memories[piece.name] = memory, codec
        return found

    def _remembered(self, piece: Piece) -> DeviceMemory:
        key, queue = (self._context.axis, piece.name), self.staging.queue
        memory = self._context.feedback.device_memory(
            key, piece.size, self._dtype, queue, piece.choice.feedback
        )
        memory.follow(queue)
        return memory

    def linear(self, piece: Piece) -> Rounds:
        """See :class:`~.task_factory.TaskFactory`."""
        context, form = self._context, piece.choice.feedback
        memory = None
        if form is not None:
            check_feedback("all_reduce", piece.choice.codec, form)
            memory = self._remembered(piece)
        values = self._values[piece.start : piece.stop]
        return DeviceLinear(
            piece, values, self._dtype, memory, context.factors, self._step, context.link, self.staging
        )

    def small(self, pieces: Sequence[Piece]) -> Coalesced:
        """Copy small pieces side by side to host memory: one copy each, where a device would do one for each shard."""
        here = self.staging.bring([self._values[p.start : p.stop] for p in pieces])
        coalesced = Coalesced(here, self._context.link.size)
        self.staging.then(coalesced.gather)
        return coalesced

    def end(self) -> Summing:
        """See :class:`~.task_factory.TaskFactory`."""
        self.staging.take_back()
        yield from self.staging.settle()


def _launches_ahead(piece: Piece) -> bool:
    """Tell whether encoding a piece launches kernels and waits for nothing."""
    codec = piece.choice.codec
    knows = piece.choice.feedback is None or driver_of(codec.wire_id).head(codec) is not None
    return codec.fixed_size and knows

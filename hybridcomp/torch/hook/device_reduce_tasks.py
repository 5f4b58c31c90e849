"""Average an array in a device's memory by a codec: only messages cross to the host.

Bytes and bits are those of :class:`~.reduce_tasks.EncodedTask`, so ranks on hosts and on devices may share an average.
The host checks CRCs and headers of what comes; what only a payload's end tells, the device's status does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hybridcomp import wire
from hybridcomp.arrays import ByteArray, DType, Flat
from hybridcomp.codecs import Codec
from hybridcomp.codecs.device import DeviceMemory, decode_opened, driver_of, encode_into
from hybridcomp.codecs.device import Encoded as Message
from hybridcomp.codecs.device.messages import convert, divide, head_of
from hybridcomp.device import DeviceArray
from hybridcomp.errors import WireError
from hybridcomp.torch.hook.device_staging import DeviceStaging
from hybridcomp.torch.hook.reduce_tasks import DeviceReduceTask, Shards, opened
from hybridcomp.wire import HEADER_BYTES


class DeviceEncodedTask(DeviceReduceTask):
    """The task of averaging an array by a codec, with error feedback if it has a memory."""

    def __init__(
        self,
        codec: Codec,
        values: DeviceArray,
        dtype: DType,
        shards: Shards,
        staging: DeviceStaging,
        *,
        memory: DeviceMemory | None = None,
        at: int = 0,
    ) -> None:
        """Average ``values`` in place.

        Args:
            codec: for parts and sums; it has a driver.
            values: of ``dtype``'s storage, at a multiple of an element's bytes.
            dtype: floating-point.
            shards: of ``values``.
            staging: of the batch.
            memory: of an array of which ``values`` are a part; its step has begun. None for no feedback.
            at: where in that array they begin.
        """
        self.seconds = [0.0, 0.0]
        self.sent = 0
        self.exact = codec.fixed_size
        self._codec, self._values, self._dtype, self._shards = codec, values, dtype, shards
        self._staging, self._queue = staging, staging.queue
        self._memory, self._at = memory, at
        self._kind = dtype if memory is None else memory.kind  # of the messages
        self._messages: dict[int, Message] = {}  # by shard: what the device is writing
        self._sum: tuple[DeviceArray, ByteArray] | None = None  # of its message: on the device, and fetched

    def room(self, shard: int) -> int:
        """See :class:`~.reduce_tasks.ReduceTask`."""
        return self._codec.bound(self._shards.count(shard), self._kind)

    # -- encode --------------------------------------------------------------------------------------

    def start_encode(self, shard: int) -> None:
        """See :class:`~.reduce_tasks.DeviceReduceTask`."""
        span = self._shards.span(shard)
        out = self._staging.place(self.room(shard))
        if self._memory is None:
            message = encode_into(self._codec, self._flat(span), out, self._queue)
        else:
            message = self._memory.encode(self._codec, self._flat(span), out, self._queue, self._place(span))
        self._messages[shard] = self._staging.written(message)

    def encode(self, shard: int, out: ByteArray) -> int:
        """See :class:`~.reduce_tasks.ReduceTask`."""
        return self._staging.fetch(self._messages.pop(shard), out)

    # -- sum -----------------------------------------------------------------------------------------

    def start_reduce(self, messages: Sequence[ByteArray], ranks: Sequence[int]) -> None:
        """See :class:`~.reduce_tasks.DeviceReduceTask`."""
        mine, queue, wide = self._shards.rank, self._queue, self._dtype.accumulator
        span, memory = self._shards.span(mine), self._memory
        own = self._flat(span)
        raws = opened(self._codec, self._kind, messages, ranks, [own.size] * len(ranks))
        if memory is None:
            total = queue.array(own.size, wide.storage)
            convert(queue, own.data, self._dtype, total, wide, own.size)
        else:
            total = memory.own(self._codec, own, queue, self._place(span))
        self._add(raws, ranks, total)
        out = self._staging.place(self.room(mine))
        if memory is None:
            message = self._encode_sum(total, out)
        else:
            message = memory.encode_sum(self._codec, total, out, queue, self._place(span), self._shards.size)
        self._messages[mine] = self._staging.written(message)

    def _add(self, raws: Sequence[ByteArray], ranks: Sequence[int], total: DeviceArray) -> None:
        driver = driver_of(self._codec.wire_id)
        headers = [wire.peek(raw) for raw in raws]
        heads = [head_of(header, raw) for header, raw in zip(headers, raws, strict=True)]
        payloads = []
        for header, head, raw, rank in zip(headers, heads, raws, ranks, strict=True):
            with _naming(rank):
                driver.check(header, head)
            payloads.append(self._staging.there(raw)[HEADER_BYTES : HEADER_BYTES + header.payload])
        driver.decode_sum(headers, heads, payloads, total, self._dtype.accumulator, self._queue)

    def _encode_sum(self, total: DeviceArray, out: DeviceArray) -> Message:
        queue, wide, n = self._queue, self._dtype.accumulator, total.size
        divide(queue, total, wide, self._shards.size)
        if self._dtype is not wide:
            narrow = queue.array(n, self._dtype.storage)
            convert(queue, total, wide, narrow, self._dtype, n)
            total = narrow
        return encode_into(self._codec, Flat(total, self._dtype, (n,), True, False), out, queue)

    def reduce(self, messages: Sequence[ByteArray], ranks: Sequence[int], out: ByteArray) -> int:
        """See :class:`~.reduce_tasks.ReduceTask`."""
        message = self._messages.pop(self._shards.rank)
        nbytes = self._staging.fetch(message, out)
        self._sum = message.buffer[:nbytes], out[:nbytes]
        return nbytes

    # -- decode --------------------------------------------------------------------------------------

    def decode(self, messages: Sequence[ByteArray], ranks: Sequence[int]) -> None:
        """Decode the other ranks' shards, and this rank's own, whose message the host has now seen."""
        assert self._sum is not None
        there, here = self._sum
        self._take(self._shards.rank, here, there)
        counts = [self._shards.count(q) for q in ranks]
        for raw, rank in zip(opened(self._codec, self._kind, messages, ranks, counts), ranks, strict=True):
            with _naming(rank):
                self._take(rank, raw, self._staging.there(raw))
        self._sum = None

    def _take(self, shard: int, raw: ByteArray, there: DeviceArray) -> None:
        """Start to write what a shard's message means; ``raw`` is it in host memory."""
        span, queue, memory = self._shards.span(shard), self._queue, self._memory
        header = wire.peek(raw)
        head, out = head_of(header, raw), self._values[span]
        if memory is None or not memory.tracks:
            decode_opened(header, head, there, out, self._dtype, queue)
            return
        sums = queue.array(out.size, memory.kind.storage)
        decode_opened(header, head, there, sums, memory.kind, queue)
        memory.result(sums, queue, self._place(span))
        convert(queue, sums, memory.kind, out, self._dtype, out.size)

    def _flat(self, span: slice) -> Flat:
        values = self._values[span]
        return Flat(values, self._dtype, values.shape, True, False)

    def _place(self, span: slice) -> slice:
        return slice(self._at + span.start, self._at + span.stop)


@contextmanager
def _naming(rank: int) -> Iterator[None]:
    """Add to a WireError whose message it is about."""
    try:
        yield
    except WireError as error:
        raise WireError(f"from rank {rank}: {error}") from error

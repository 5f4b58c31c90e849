"""Sum arrays over the ranks of a hook, in as many shards as there are ranks, each owned by the rank of its number.

1. Each rank encodes its values of the other ranks' shards, and sends each to its owner.
2. The owner adds them to its own, and encodes the sum once.
3. Every rank, the owner too, decodes the same message of the sum: all ranks end with the same bits.

Shards are cut from an array's own first element, so its bits do not depend on what else is sent with it: DDP may
rebuild its buckets, or a run resume with other ones.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hybridcomp import native, wire
from hybridcomp.arrays import ByteArray, DType, Flat, as_dtype
from hybridcomp.codecs import Codec, Memory, get_codec
from hybridcomp.errors import MismatchError, WireError
from hybridcomp.schedules.shards import aligned

Array = npt.NDArray[Any]
NONE = get_codec("none")


class ReduceTask(Protocol):
    """An array to sum over the ranks.

    Attributes:
        exact: its messages are exactly as long as :meth:`room` says.
        seconds: spent on encoding and summing, and on decoding, for statistics.
        sent: bytes that this rank sent.
    """

    exact: bool
    seconds: list[float]
    sent: int

    def room(self, shard: int) -> int:
        """Return the most bytes that a message of a shard has."""

    def encode(self, shard: int, out: ByteArray) -> int:
        """Write this rank's values of another rank's shard; return the message's bytes."""

    def reduce(self, messages: Sequence[ByteArray], ranks: Sequence[int], out: ByteArray) -> int:
        """Sum this rank's shard from the other ranks' messages, take it, and write the sum's message."""

    def decode(self, messages: Sequence[ByteArray], ranks: Sequence[int]) -> None:
        """Decode the other ranks' shards of the result from their owners' messages."""


class DeviceReduceTask(abc.ABC):
    """A :class:`ReduceTask` whose work a device does: it is started before messages are asked for."""

    @abc.abstractmethod
    def start_encode(self, shard: int) -> None:
        """Start the work whose result :meth:`ReduceTask.encode` of a shard returns."""

    @abc.abstractmethod
    def start_reduce(self, messages: Sequence[ByteArray], ranks: Sequence[int]) -> None:
        """Start the work whose result :meth:`ReduceTask.reduce` returns."""


class Shards:
    """The partition of an array into shards.

    Attributes:
        rank: this one.
        size: how many there are.
    """

    def __init__(self, bounds: Sequence[int], rank: int) -> None:
        """Make shards: shard r is from ``bounds[r]`` to ``bounds[r + 1]``."""
        self.rank, self.size = rank, len(bounds) - 1
        self._bounds = bounds

    @classmethod
    def equal(cls, n: int, rank: int, size: int) -> Shards:
        """Divide ``n`` elements into shards of about one size, as the schedules cut them."""
        length = aligned(-(-n // size))
        return cls([min(i * length, n) for i in range(size + 1)], rank)

    def span(self, shard: int) -> slice:
        """Return the range of a shard's elements."""
        return slice(self._bounds[shard], self._bounds[shard + 1])

    def count(self, shard: int) -> int:
        """Return the number of a shard's elements."""
        return self._bounds[shard + 1] - self._bounds[shard]


class EncodedTask:
    """The task of averaging or summing an array by a codec, with error feedback if it has a memory."""

    def __init__(
        self,
        codec: Codec,
        values: Array,
        dtype: DType,
        shards: Shards,
        *,
        mean: bool = True,
        memory: Memory | None = None,
        at: int = 0,
        stream: bool = False,
    ) -> None:
        """Sum ``values`` in place.

        Args:
            codec: for parts and sums.
            values: 1-D, contiguous, of ``dtype``'s storage.
            dtype: floating-point.
            shards: of ``values``.
            mean: divide the sum by the ranks.
            memory: of an array of which ``values`` are a part; its step has begun. None for no feedback.
            at: where in that array they begin.
            stream: the result is not read soon: write it past the caches.
        """
        self.seconds = [0.0, 0.0]
        self.sent = 0
        self.exact = codec.fixed_size
        self._codec, self._values, self._dtype, self._shards = codec, values, dtype, shards
        self._ranks = shards.size if mean else 1
        self._memory, self._at, self._stream = memory, at, stream
        self._kind = dtype if memory is None else memory.kind  # of the messages

    def room(self, shard: int) -> int:
        """See :class:`ReduceTask`."""
        return self._codec.bound(self._shards.count(shard), self._kind)

    def encode(self, shard: int, out: ByteArray) -> int:
        """See :class:`ReduceTask`."""
        span = self._shards.span(shard)
        if self._memory is None:
            nbytes: int = self._codec.encode_flat(self._flat(span), out)
            return nbytes
        return self._memory.encode(self._codec, self._flat(span), out, self._place(span))

    def reduce(self, messages: Sequence[ByteArray], ranks: Sequence[int], out: ByteArray) -> int:
        """See :class:`ReduceTask`."""
        mine = self._shards.rank
        span, codec, memory = self._shards.span(mine), self._codec, self._memory
        own = self._flat(span)
        raws = self._opened(messages, ranks, [own.size] * len(ranks))
        if memory is None:
            return codec.sum_encode(
                own, raws, self._ranks, self._dtype, out, result=own.data, stream=self._stream
            )
        total = memory.summed(codec, own, raws, self._place(span))
        nbytes = memory.encode_sum(codec, total, out, self._place(span), self._ranks)
        self._take([out[:nbytes]], [mine])
        return nbytes

    def decode(self, messages: Sequence[ByteArray], ranks: Sequence[int]) -> None:
        """See :class:`ReduceTask`."""
        self._take(self._opened(messages, ranks, [self._shards.count(q) for q in ranks]), ranks)

    def _take(self, raws: list[ByteArray], ranks: Sequence[int]) -> None:
        spans = [self._shards.span(q) for q in ranks]
        memory, dtype = self._memory, self._dtype
        if memory is None or not memory.tracks:
            outs = [self._values[span] for span in spans]
            self._codec.decode_many(raws, outs, dtype, stream=self._stream)
            return
        for raw, span in zip(raws, spans, strict=True):
            sums = np.empty(span.stop - span.start, memory.kind.storage)
            self._codec.decode_flat(raw, wire.peek(raw), sums, memory.kind)
            memory.result(sums, self._place(span))
            native.kernels().convert(sums, memory.kind, self._values[span], dtype, False)

    def _opened(
        self, messages: Sequence[ByteArray], ranks: Sequence[int], counts: Sequence[int]
    ) -> list[ByteArray]:
        return opened(self._codec, self._kind, messages, ranks, counts)

    def _flat(self, span: slice) -> Flat:
        values = self._values[span]
        return Flat(values, self._dtype, values.shape, True, False)

    def _place(self, span: slice) -> slice:
        return slice(self._at + span.start, self._at + span.stop)


class FoldedTask:
    """The task of reducing an array of integers, as they are."""

    exact = True

    def __init__(self, values: Array, fold: np.ufunc, shards: Shards) -> None:
        """Reduce ``values`` in place.

        Args:
            values: 1-D, contiguous.
            fold: what reduces two arrays.
            shards: of ``values``.
        """
        self.seconds = [0.0, 0.0]
        self.sent = 0
        self._values, self._fold, self._shards = values, fold, shards
        self._dtype = as_dtype(values.dtype)

    def room(self, shard: int) -> int:
        """See :class:`ReduceTask`."""
        return NONE.bound(self._shards.count(shard), self._dtype)

    def encode(self, shard: int, out: ByteArray) -> int:
        """See :class:`ReduceTask`."""
        part = self._values[self._shards.span(shard)]
        return NONE.encode_flat(Flat(part, self._dtype, part.shape, True, False), out)

    def reduce(self, messages: Sequence[ByteArray], ranks: Sequence[int], out: ByteArray) -> int:
        """See :class:`ReduceTask`."""
        mine = self._shards.rank
        own = self._values[self._shards.span(mine)]
        for raw in opened(NONE, self._dtype, messages, ranks, [own.size] * len(ranks)):
            self._fold(own, raw[wire.HEADER_BYTES :].view(own.dtype), out=own)
        return self.encode(mine, out)

    def decode(self, messages: Sequence[ByteArray], ranks: Sequence[int]) -> None:
        """See :class:`ReduceTask`."""
        counts = [self._shards.count(q) for q in ranks]
        for q, raw in zip(ranks, opened(NONE, self._dtype, messages, ranks, counts), strict=True):
            self._values[self._shards.span(q)] = raw[wire.HEADER_BYTES :].view(self._values.dtype)


def opened(
    codec: Codec, dtype: DType, messages: Sequence[ByteArray], ranks: Sequence[int], counts: Sequence[int]
) -> list[ByteArray]:
    """Check messages: whole, and of this codec, dtype and these counts; return them without what follows them.

    Raises:
        WireError: a damaged message, or one of a rank that failed.
        MismatchError: a rank sent something else; names both sides.
    """
    fault = wire.first_fault(messages, codec.wire_id, codec.params_hash, dtype, counts)
    if fault is not None:
        try:
            _, header = wire.open_message(messages[fault])
        except WireError as error:
            raise WireError(f"from rank {ranks[fault]}: {error}") from error
        raise MismatchError(
            f"rank {ranks[fault]} sent {header.count} {header.dtype.label} by codec {header.codec} with parameters "
            f"{header.params:#010x}; expected are {counts[fault]} {dtype.label} by {codec.spec!r}, codec "
            f"{codec.wire_id} with parameters {codec.params_hash:#010x}"
        )
    return list(messages)

"""Sum several things over all ranks in two collectives of bytes.

1. Everything is cut into as many shards as there are ranks. Each rank encodes every other rank's shards of its own
   data; one all-to-all brings them there.
2. The owner of a shard sums it, in rank order, and encodes the sum once.
3. One all-gather brings the sums to all; every rank, the owner too, decodes the same bytes.

A thing's shards and blocks are cut from its own first element, so its bits do not depend on what else travels with
it: DDP may rebuild its buckets, or a run resume with other ones. All ranks end with the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hybridcomp.arrays import ByteArray, Flat, as_dtype
from hybridcomp.codecs import Codec, Memory

_ALIGN = 64  # bytes
Array = npt.NDArray[Any]


class Channel(Protocol):
    """Collectives of bytes on a group that nobody else uses; each call returns when it has ended."""

    rank: int
    size: int

    def all_to_all(self, send: ByteArray, recv: ByteArray) -> None:
        """Send equal parts of ``send`` to all ranks."""

    def all_gather(self, send: ByteArray, recv: ByteArray) -> None:
        """Gather every rank's ``send`` in ``recv``."""


class Thing(Protocol):
    """Something to sum. Shards are numbered like the ranks that own them.

    Attributes:
        slot: bytes that hold any of its messages.
        seconds: spent encoding and decoding, for statistics.
    """

    slot: int
    seconds: list[float]

    def encode(self, shard: int, out: ByteArray) -> None:
        """Write this rank's values of another rank's shard."""

    def reduce(self, parts: Sequence[ByteArray], out: ByteArray) -> None:
        """Sum this rank's shard from all ranks' messages (its own is not one) and write the sum's message."""

    def decode(self, shard: int, message: ByteArray) -> None:
        """Take a shard of the result."""


class Exchange:
    """Sums things over a channel; keeps its buffers between calls. For one thread."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._buffers: dict[str, ByteArray] = {}

    def sum(self, things: Sequence[Thing]) -> float:
        """Sum all of ``things`` in place; return the seconds on the wire. The same call on all ranks.

        Raises:
            WireError: a damaged message.
            HybridcompError: from the channel.
        """
        rank, size = self.channel.rank, self.channel.size
        offsets = np.cumsum([0, *(_aligned(thing.slot) for thing in things)]).tolist()
        stride = offsets[-1]
        if not stride:
            return 0.0
        send, recv = self._buffer("send", size * stride), self._buffer("recv", size * stride)

        def slots(buffer: ByteArray, i: int, start: int) -> ByteArray:
            return buffer[start + offsets[i] : start + offsets[i] + things[i].slot]

        for i, thing in enumerate(things):
            with _timed(thing, 0):
                for shard in range(size):
                    if shard != rank:
                        thing.encode(shard, slots(send, i, shard * stride))
        wire = time.perf_counter()
        self.channel.all_to_all(send, recv)
        wire -= time.perf_counter()
        result = self._buffer("result", stride)
        for i, thing in enumerate(things):
            with _timed(thing, 0):
                thing.reduce([slots(recv, i, q * stride) for q in range(size)], slots(result, i, 0))
        wire += time.perf_counter()
        self.channel.all_gather(result, recv)
        wire -= time.perf_counter()
        for i, thing in enumerate(things):
            with _timed(thing, 1):
                for shard in range(size):
                    thing.decode(shard, slots(recv, i, shard * stride))
        return -wire

    def _buffer(self, use: str, nbytes: int) -> ByteArray:
        buffer = self._buffers.get(use)
        if buffer is None or buffer.size < nbytes:
            buffer = self._buffers[use] = np.zeros(nbytes, np.uint8)
        return buffer[:nbytes]


class Exact:
    """A tensor summed uncompressed: in float32 (float64 for float64), then rounded to its own dtype."""

    def __init__(self, values: torch.Tensor, rank: int, size: int, *, mean: bool) -> None:
        """Sum ``values`` in place.

        Args:
            values: 1-D, contiguous, CPU, floating-point.
            rank, size: of the channel.
            mean: divide the sum by ``size``.
        """
        self.seconds = [0.0, 0.0]
        self._values = values
        self._rank, self._size, self._mean = rank, size, mean
        self._length = -(-values.numel() // size)
        self.slot = self._length * values.element_size()

    def encode(self, shard: int, out: ByteArray) -> None:
        """See :class:`Thing`."""
        values = self._shard(shard)
        self._typed(out)[: values.numel()] = values

    def reduce(self, parts: Sequence[ByteArray], out: ByteArray) -> None:
        """See :class:`Thing`."""
        own = self._shard(self._rank)
        wide = torch.float64 if own.dtype == torch.float64 else torch.float32
        total = torch.zeros(own.numel(), dtype=wide)
        for rank, part in enumerate(parts):
            total += own if rank == self._rank else self._typed(part)[: own.numel()]
        if self._mean:
            total /= self._size
        self._typed(out)[: own.numel()] = total

    def decode(self, shard: int, message: ByteArray) -> None:
        """See :class:`Thing`."""
        values = self._shard(shard)
        values.copy_(self._typed(message)[: values.numel()])

    def _shard(self, shard: int) -> torch.Tensor:
        return self._values[shard * self._length : (shard + 1) * self._length]

    def _typed(self, raw: ByteArray) -> torch.Tensor:
        return torch.from_numpy(raw).view(self._values.dtype)


class Encoded:
    """An array averaged by a codec, with error feedback if it has a memory: as in
    :mod:`hybridcomp.collectives.allreduce`, with one chunk to a shard."""

    def __init__(self, codec: Codec, values: Array, memory: Memory | None, rank: int, size: int) -> None:
        """Average ``values`` in place.

        Args:
            codec: for parts and sums.
            values: 1-D float32 or float64.
            memory: of as many elements, its step begun; None for no feedback.
            rank, size: of the channel.
        """
        self.seconds = [0.0, 0.0]
        self._codec = codec
        self._values = values
        self._memory = memory
        self._rank, self._size = rank, size
        self._length = -(-values.size // size)
        self.slot = codec.bound(self._length, values.dtype)

    def encode(self, shard: int, out: ByteArray) -> None:
        """See :class:`Thing`."""
        span = self._span(shard)
        if self._memory is None:
            self._codec.encode(self._values[span], out=out)
        else:
            self._memory.encode(self._codec, self._flat(span), out, span)

    def reduce(self, parts: Sequence[ByteArray], out: ByteArray) -> None:
        """See :class:`Thing`."""
        span = self._span(self._rank)
        memory = self._memory
        total = (
            self._values[span].copy() if memory is None else memory.own(self._codec, self._flat(span), span)
        )
        for rank, part in enumerate(parts):
            if rank != self._rank:
                self._codec.decode_add(part, total)
        if memory is None:
            total /= self._size
            self._codec.encode(total, out=out)
        else:
            memory.encode_sum(self._codec, total, out, span, self._size)

    def decode(self, shard: int, message: ByteArray) -> None:
        """See :class:`Thing`."""
        span = self._span(shard)
        self._codec.decode(message, out=self._values[span])
        if self._memory is not None and self._memory.tracks:
            self._memory.result(self._values[span], span)

    def _flat(self, span: slice) -> Flat:
        values = self._values[span]
        return Flat(values, as_dtype(values.dtype), values.shape, True, False)

    def _span(self, shard: int) -> slice:
        start = min(shard * self._length, self._values.size)
        return slice(start, min(start + self._length, self._values.size))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


class _timed:  # noqa: N801  (a context manager, used as a function)
    """Add the time inside to one of a thing's two counters: encoding and summing, or decoding."""

    def __init__(self, thing: Thing, which: int) -> None:
        self._seconds, self._which = thing.seconds, which

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._which] += time.perf_counter() - self._began

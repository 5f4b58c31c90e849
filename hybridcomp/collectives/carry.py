"""One operation's data path: encode a slice to a message, check and decode a message into a slice."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hybridcomp import native, wire
from hybridcomp.arrays import ByteArray, DType, Flat
from hybridcomp.codecs import Codec, Memory, get_codec
from hybridcomp.collectives.stats import Call
from hybridcomp.collectives.transport import Transport
from hybridcomp.errors import MismatchError

Array = npt.NDArray[Any]

_NONE = get_codec("none")


class Carrier:
    """Codec, transport and statistics of one operation, on elements of one dtype.

    Attributes:
        transport: where messages go.
        codec: what they are encoded with.
        dtype: of the caller's elements.
        call: statistics.
    """

    def __init__(self, transport: Transport, codec: Codec, dtype: DType, call: Call) -> None:
        self.transport = transport
        self.codec = codec
        self.dtype = dtype
        self.call = call
        self._params = codec.params_hash

    def encode(self, data: Array, dtype: DType | None = None) -> tuple[ByteArray, int]:
        """Encode a contiguous slice into a pool buffer; return it and the message's length in bytes."""
        kind = dtype or self.dtype
        buffer = self.transport.take(self.codec.bound(data.size, kind))
        with self.call.encoding():
            nbytes = self.codec.encode_flat(Flat(data, kind, data.shape, True, False), buffer)
        return buffer, nbytes

    def encode_with_feedback(self, data: Array, memory: Memory, span: slice) -> tuple[ByteArray, int]:
        """Encode a span of data as ``memory`` corrects it; the message is of the accumulator's dtype.

        Data that is not finite leaves the memory of its span as it was: the overflow passes, the memory stays good.
        """
        buffer = self.transport.take(self.codec.bound(data.size, self.dtype.accumulator))
        with self.call.encoding():
            nbytes = memory.encode(self.codec, self._flat(data), buffer, span)
        return buffer, nbytes

    def own(self, data: Array, memory: Memory | None, span: slice) -> Array:
        """A new accumulator for a span that this rank owns, with its own part in it."""
        if memory is None:
            return widen(data, self.dtype)
        with self.call.encoding():
            return memory.own(self.codec, self._flat(data), span)

    def encode_sum_with_feedback(
        self, total: Array, memory: Memory, span: slice, ranks: int
    ) -> tuple[ByteArray, int]:
        """Encode the sum of a span that this rank owns, over ``ranks`` for a mean; ``total`` is used up."""
        buffer = self.transport.take(self.codec.bound(total.size, self.dtype.accumulator))
        with self.call.encoding():
            nbytes = memory.encode_sum(self.codec, total, buffer, span, ranks)
        return buffer, nbytes

    def _flat(self, data: Array) -> Flat:
        return Flat(data, self.dtype, data.shape, True, False)

    def inbox_bytes(self, n: int, dtype: DType | None = None) -> int:
        """Size of a buffer for a message of ``n`` elements.

        Room enough for what another codec would make of them, so that a peer's wrong codec is read and named
        rather than truncated; pages that are never written cost nothing.
        """
        kind = dtype or self.dtype
        return max(self.codec.bound(n, kind), _NONE.bound(n, kind.accumulator))

    def open(
        self, msg: ByteArray, n: int, peer: int, dtype: DType | None = None
    ) -> tuple[ByteArray, wire.Header]:
        """Check a received message: whole, and of the codec, dtype and count that this rank expects.

        Raises:
            WireError: damaged.
            MismatchError: the peer sent something else; names both sides.
        """
        raw, header = wire.open_message(msg)
        kind = dtype or self.dtype
        mine = (self.codec.wire_id, self._params, kind, n)
        theirs = (header.codec, header.params, header.dtype, header.count)
        if mine != theirs:
            raise MismatchError(
                f"{self.call.op} on axis {self.call.axis!r}: rank {self.transport.rank} expects {n} "
                f"{kind.label} by {self.codec.spec!r} (codec id {mine[0]}, parameters {mine[1]:#010x}), "
                f"rank {peer} sent {header.count} {header.dtype.label} "
                f"(codec id {header.codec}, parameters {header.params:#010x})"
            )
        return raw, header

    def decode(self, msg: ByteArray, out: Array, peer: int, source: DType | None = None) -> None:
        """Check a message of ``source`` elements and write its values to ``out``, of the caller's dtype."""
        with self.call.decoding():
            raw, header = self.open(msg, out.size, peer, source)
            self.codec.decode_flat(raw, header, out, self.dtype)

    def decode_result(self, msg: ByteArray, out: Array, peer: int, memory: Memory, span: slice) -> None:
        """Check a message of an owner's sum, and write what it means to ``out``, of the caller's dtype."""
        kind = self.dtype.accumulator
        if not memory.tracks:
            self.decode(msg, out, peer, kind)
            return
        values = out if self.dtype is kind else np.empty(out.size, kind.storage)
        with self.call.decoding():
            raw, header = self.open(msg, out.size, peer, kind)
            self.codec.decode_flat(raw, header, values, kind)
            memory.result(values, span)
            if values is not out:
                out[:] = narrow(values, self.dtype)

    def decode_add(self, msg: ByteArray, acc: Array, peer: int, source: DType | None = None) -> None:
        """Check a message of ``source`` elements and add its values to the fp32 or fp64 ``acc``."""
        with self.call.decoding():
            raw, header = self.open(msg, acc.size, peer, source)
            self.codec.decode_add_flat(raw, header, acc)


def widen(data: Array, dtype: DType) -> Array:
    """A copy of a slice in its accumulator's type (float32; float64 for float64)."""
    return _converted(data, dtype, dtype.accumulator)


def narrow(acc: Array, dtype: DType) -> Array:
    """An accumulator's values rounded to nearest even in ``dtype``'s storage; NaN stays NaN."""
    return acc if dtype.accumulator is dtype else _converted(acc, dtype.accumulator, dtype)


def _converted(data: Array, dtype: DType, into: DType) -> Array:
    out = np.empty(data.shape, into.storage)
    native.kernels().convert(data, dtype, out, into, False)
    return out

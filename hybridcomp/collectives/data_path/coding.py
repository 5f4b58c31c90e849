"""Encode arrays to messages and decode them, for one operation; :class:`~.data_path.carrier.Carrier` adds sums."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from hybridcomp import wire
from hybridcomp.arrays import ByteArray, DType, Flat, byte_view, narrow
from hybridcomp.codecs import Codec, ErrorFeedback, Memory, get_codec
from hybridcomp.codecs.feedback.error_feedback import Key
from hybridcomp.codecs.feedback.forms import Form
from hybridcomp.codecs.table import codec_for
from hybridcomp.collectives.stats import Call
from hybridcomp.collectives.transport.mailbox import Incoming, Mailbox, Sealed
from hybridcomp.collectives.transport.transport import Transport
from hybridcomp.device import Queue
from hybridcomp.errors import MismatchError

if TYPE_CHECKING:
    from hybridcomp.collectives.data_path.links import Link

Array = npt.NDArray[Any]

NONE = get_codec("none")


class Coder:
    """Codec, transport and statistics of one operation, on elements of one dtype.

    Attributes:
        transport: transport of the messages.
        codec: codec of the messages.
        dtype: dtype of the caller's elements.
        call: statistics of the operation.
        stream: whether the result is too large for the caches, and is written past them.
    """

    def __init__(self, transport: Transport, codec: Codec, dtype: DType, call: Call) -> None:
        self.transport = transport
        self.codec = codec
        self.dtype = dtype
        self.call = call
        self.stream = False
        self._mail: Mailbox | None = None
        self._rooms: dict[tuple[int, DType], int] = {}

    @property
    def queue(self) -> Queue | None:
        """Return the queue of a device's work; None in host memory."""
        return None

    def mailbox(self) -> Mailbox:
        """Make the mailbox for the messages of the operation; called in its first step."""
        self._mail = Mailbox(self.transport, self.call)
        return self._mail

    @property
    def _mailbox(self) -> Mailbox:
        assert self._mail is not None
        return self._mail

    def alike(self, *, codec: Codec | None = None, dtype: DType | None = None) -> Self:
        """Return a data path of the same operation and mailbox, already made, for another codec or dtype."""
        other = copy.copy(self)
        other.codec = codec or self.codec
        other.dtype = dtype or self.dtype
        other._rooms = {}
        return other

    def remember(self, feedback: ErrorFeedback, key: Key, n: int, form: Form | str) -> Any:
        """Begin a step of the error-feedback memory under a key and return the memory; use the codec of that step."""
        memory = feedback.memory(key, n, self.dtype, form)
        self.codec = self.codec.at_step(memory.begin())
        return memory

    # -- to a message --------------------------------------------------------------------------------

    def encode(self, data: Array, dtype: DType | None = None) -> Sealed:
        """Encode a contiguous slice into a pool buffer."""
        kind = dtype or self.dtype
        buffer = self.transport.take(self.codec.bound(data.size, kind))
        with self.call.encoding():
            nbytes = self.codec.encode_flat(Flat(data, kind, data.shape, True, False), buffer)
        return Sealed(buffer, nbytes)

    def encode_odd(self, data: Flat, link: Link | None) -> Sealed:
        """Encode an array, with the memory of its link if it has one.

        The message is one byte longer where its length would be even: see :mod:`.framing`.
        """
        buffer = self.transport.take(self.codec.bound(data.size, self.dtype) + 1)
        with self.call.encoding():
            nbytes = (
                self.codec.encode_flat(data, buffer)
                if link is None
                else link.encode(self.codec, data, buffer)
            )
        buffer[nbytes] = 0
        return Sealed(buffer, nbytes | 1)

    def encode_with_feedback(self, data: Array, memory: Memory, span: slice) -> Sealed:
        """Encode a span of data, corrected by ``memory``; the message is of the accumulator's dtype.

        Data that are not finite leave the memory of their span as it was: the overflow passes, the memory stays good.
        """
        buffer = self.transport.take(self.codec.bound(data.size, self.dtype.accumulator))
        with self.call.encoding():
            nbytes = memory.encode(self.codec, self._flat(data), buffer, span)
        return Sealed(buffer, nbytes)

    def encode_sum(self, total: Array, dtype: DType, ranks: int) -> Sealed:
        """Encode a sum, over ``ranks`` for a mean, as ``dtype``; ``total``, an accumulator, is used up."""
        if ranks != 1:
            total /= ranks
        return self.encode(total if dtype is self.dtype.accumulator else narrow(total, dtype), dtype)

    def encode_sum_with_feedback(self, total: Array, memory: Memory, span: slice, ranks: int) -> Sealed:
        """Encode the sum of a span that this rank owns, over ``ranks`` for a mean; ``total`` is used up."""
        buffer = self.transport.take(self.codec.bound(total.size, self.dtype.accumulator))
        with self.call.encoding():
            nbytes = memory.encode_sum(self.codec, total, buffer, span, ranks)
        return Sealed(buffer, nbytes)

    def release(self, message: Sealed) -> None:
        """Release a message that no mailbox has sent."""
        self.transport.give(message.buffer)

    def _flat(self, data: Array) -> Flat:
        return Flat(data, self.dtype, data.shape, True, False)

    def own_message(self, message: Sealed, n: int, dtype: DType) -> Sealed:
        """Return an unsent message of this rank, ``n`` elements of ``dtype``, in the form that :meth:`total` sums."""
        return message

    # -- from a message ------------------------------------------------------------------------------

    def inbox_bytes(self, n: int, dtype: DType | None = None) -> int:
        """Return the size of a buffer for a message of ``n`` elements.

        There is room for the message of another codec, so that a peer's wrong codec is read and named rather than
        truncated; pages that are never written cost nothing.
        """
        kind = dtype or self.dtype
        found = self._rooms.get((n, kind))
        if found is None:
            found = max(self.codec.bound(n, kind), NONE.bound(n, kind.accumulator))
            self._rooms[n, kind] = found
        return found

    def foresee(self, message: Any, n: int, kind: DType) -> None:
        """Take notice that a message to be received has ``n`` elements of ``kind``, and is read by this data path."""

    def _checked(
        self,
        messages: Sequence[Incoming],
        counts: Sequence[int],
        source: DType,
        codec: Codec | None = None,
    ) -> list[ByteArray]:
        """Check messages by ``codec``; None for the carrier's own."""
        raws = [self._mailbox.read(message) for message in messages]
        codec = codec or self.codec
        near = self.transport.near
        crc = not near or not near.issuperset([message.peer for message in messages])
        fault = wire.first_fault(raws, codec.wire_id, codec.params_hash, source, counts, crc=crc)
        if fault is not None:
            self.alike(codec=codec).open(raws[fault], counts[fault], messages[fault].peer, source)
        return raws

    def _let_go(self, messages: Sequence[Incoming]) -> None:
        for message in messages:
            self._mailbox.used(message)

    def open(
        self, msg: ByteArray, n: int, peer: int, dtype: DType | None = None
    ) -> tuple[ByteArray, wire.Header]:
        """Check a received message: whole, and of the codec, dtype and count that this rank expects.

        Raises:
            WireError: the message is damaged.
            MismatchError: the peer sent something else; names both sides.
        """
        raw, header = wire.open_message(msg)
        self.compare(header, n, peer, dtype or self.dtype)
        return raw, header

    def compare(self, header: wire.Header, n: int, peer: int, kind: DType) -> None:
        """Raise MismatchError unless a message is of this codec and ``n`` elements of ``kind``."""
        mine = (self.codec.wire_id, self.codec.params_hash, kind, n)
        theirs = (header.codec, header.params, header.dtype, header.count)
        if mine != theirs:
            raise MismatchError(
                f"{self.call.op} on axis {self.call.axis!r}: rank {self.transport.rank} expects {n} "
                f"{kind.label} by {self.codec.spec!r} (codec id {mine[0]}, parameters {mine[1]:#010x}), "
                f"rank {peer} sent {header.count} {header.dtype.label} "
                f"(codec id {header.codec}, parameters {header.params:#010x})"
            )

    def decode(self, message: Incoming, out: Array, source: DType | None = None) -> None:
        """Check a message of ``source`` elements and write its values to ``out``, of the caller's dtype."""
        with self.call.decoding():
            raws = self._checked([message], [out.size], source or self.dtype)
            self.codec.decode_many(raws, [out], self.dtype, stream=self.stream)
            self._mailbox.used(message)

    def decode_own(self, message: Sealed, out: Array, source: DType | None = None) -> None:
        """Write the values of this rank's own message to ``out``: the owner, too, takes the decoded values."""
        self._decode(message.wire(), out, self.transport.rank, source)

    def _decode(self, msg: ByteArray, out: Array, peer: int, source: DType | None) -> None:
        with self.call.decoding():
            raw, header = self.open(msg, out.size, peer, source)
            self.codec.decode_flat(raw, header, out, self.dtype)

    def decode_result(self, message: Incoming, out: Array, memory: Memory, span: slice) -> None:
        """Check a message of an owner's sum, and write its values to ``out``, of the caller's dtype."""
        self._decode_result(self._mailbox.read(message), out, message.peer, memory, span)
        self._mailbox.used(message)

    def decode_own_result(self, message: Sealed, out: Array, memory: Memory, span: slice) -> None:
        """Decode the message of this rank's own sum to ``out``, as :meth:`decode_result` does of another rank's."""
        self._decode_result(message.wire(), out, self.transport.rank, memory, span)

    def _decode_result(self, msg: ByteArray, out: Array, peer: int, memory: Memory, span: slice) -> None:
        kind = self.dtype.accumulator
        if not memory.tracks:
            self._decode(msg, out, peer, kind)
            return
        values = out if self.dtype is kind else np.empty(out.size, kind.storage)
        with self.call.decoding():
            raw, header = self.open(msg, out.size, peer, kind)
            self.codec.decode_flat(raw, header, values, kind)
            memory.result(values, span)
            if values is not out:
                out[:] = narrow(values, self.dtype)

    def checked(self, message: Incoming, n: int, dtype: DType | None = None) -> Sealed:
        """Check a message of ``n`` elements of ``dtype`` and return it to be sent on; the mailbox keeps its buffer."""
        message.kept = True
        raw, _ = self.open(self._mailbox.read(message), n, message.peer, dtype)
        return Sealed(raw, raw.size)

    def take(self, message: Incoming, nbytes: int, out: Array) -> int:
        """Check a message of any codec, and write its values to the beginning of ``out``; return their number.

        Raises:
            WireError: the message is damaged.
            MismatchError: the message has another dtype, or more elements than fit.
        """
        with self.call.decoding():
            raw, header = wire.open_message(message.buffer[:nbytes])
            self.fits(header, message.peer, out.size)
            codec_for(header).decode_flat(raw, header, out[: header.count], self.dtype)
        return header.count

    def take_plain(self, message: Incoming, nbytes: int, out: Array) -> None:
        """Copy a message of ``nbytes`` plain bytes to the beginning of ``out``."""
        byte_view(out)[:nbytes] = message.buffer[:nbytes]

    def fits(self, header: wire.Header, peer: int, room: int) -> None:
        """Raise MismatchError unless a message is of the caller's dtype and has at most ``room`` elements."""
        if header.dtype is not self.dtype or header.count > room:
            raise MismatchError(
                f"recv on axis {self.call.axis!r}: rank {self.transport.rank} has room for {room} "
                f"{self.dtype.label}, rank {peer} sent {header.count} {header.dtype.label}"
            )

    def room(self, n: int, dtype: DType) -> Array:
        """Return room for ``n`` elements."""
        return np.empty(n, dtype.storage)

    # -- copies --------------------------------------------------------------------------------------

    def copy(self, source: Array, out: Array) -> None:
        """Copy elements as they are."""
        out[:] = source

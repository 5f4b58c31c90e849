"""Encode an operation's slices to messages, and check and decode messages into slices.

The algorithms are written once, over this class; :class:`~.device.data_path.DeviceCarrier` does the same for a device's
memory, where an encoded message is not ready at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from hybridcomp import native
from hybridcomp.arrays import ByteArray, DType, Flat, narrow, widen
from hybridcomp.codecs import ErrorFeedback, Memory
from hybridcomp.codecs.feedback.error_feedback import Key
from hybridcomp.codecs.feedback.forms import Form
from hybridcomp.collectives.data_path.coding import NONE, Array, Coder
from hybridcomp.collectives.transport.mailbox import Incoming, Sealed

STREAM_BYTES = 1 << 23  # larger results are written past the caches


class Carrier(Coder):
    """Codec, transport and statistics of one operation, and its sums."""

    def sum_encode(
        self,
        data: Array,
        messages: Sequence[Incoming],
        source: DType,
        dtype: DType,
        ranks: int,
        out: Array | None,
        plain: Sequence[Incoming] = (),
    ) -> Sealed:
        """Sum messages and this rank's own part, encode the sum, and decode the message as its receivers will.

        Args:
            data: part of this rank.
            messages: messages to check, and to add to the part in this order.
            source: dtype of the messages.
            dtype: dtype of the sum's message.
            ranks: divisor of the sum: the number of ranks for a mean, else 1.
            out: room for the decoded values, of the caller's dtype; may be ``data``; None if they are not needed.
            plain: messages by the codec ``none``, of the caller's dtype: checked, and added before the others.
        """
        buffer = self.transport.take(self.codec.bound(data.size, dtype))
        with self.call.decoding():
            raws = self._addends(data.size, plain, messages, source)
            nbytes = self.codec.sum_encode(
                self._flat(data), raws, ranks, dtype, buffer, result=out, stream=self.stream
            )
            self._let_go(plain)
            self._let_go(messages)
        return Sealed(buffer, nbytes)

    def sum_into(
        self,
        data: Array,
        messages: Sequence[Incoming],
        source: DType,
        ranks: int,
        out: Array,
        plain: Sequence[Incoming] = (),
    ) -> None:
        """Sum messages and this rank's own part, as :meth:`sum_encode` does, into ``out`` of the caller's dtype."""
        with self.call.decoding():
            raws = self._addends(data.size, plain, messages, source)
            self.codec.sum_into(self._flat(data), raws, ranks, out, stream=self.stream)
            self._let_go(plain)
            self._let_go(messages)

    def _addends(
        self, n: int, plain: Sequence[Incoming], messages: Sequence[Incoming], source: DType
    ) -> list[ByteArray]:
        raws = self._checked(messages, [n] * len(messages), source)
        if plain:
            raws = [*self._checked(plain, [n] * len(plain), self.dtype, NONE), *raws]
        return raws

    def summed(self, data: Array, messages: Sequence[Incoming], source: DType) -> Array:
        """Sum messages and this rank's own part into an accumulator, to be given back by :meth:`spent`."""
        wide = self.dtype.accumulator
        room = self.transport.take(data.size * wide.itemsize)
        acc: Array = room.view(wide.storage)
        if self.dtype is wide:
            self.sum_into(data, messages, source, 1, acc)
        else:
            native.kernels().convert(data, self.dtype, acc, wide, False)
            self.add(messages, acc, source)
        return acc

    def spent(self, acc: Array) -> None:
        """Release an accumulator that :meth:`summed` returned."""
        self.transport.give(acc.view(np.uint8))

    def own(self, data: Array, memory: Memory | None, span: slice) -> Array:
        """Return a new accumulator for a span that this rank owns, with its own part in it."""
        if memory is None:
            return widen(data, self.dtype)
        with self.call.encoding():
            return memory.own(self.codec, self._flat(data), span)

    def add(self, messages: Sequence[Incoming], acc: Array, source: DType | None = None) -> None:
        """Check messages of ``source`` elements and add their values, in this order, to the fp32 or fp64 ``acc``."""
        with self.call.decoding():
            mail = self._mailbox
            for message in messages:
                raw, header = self.open(mail.read(message), acc.size, message.peer, source)
                self.codec.decode_add_flat(raw, header, acc)
                mail.used(message)

    def total(self, messages: Sequence[Incoming], own: Sealed, out: Array, source: DType) -> Array:
        """Return the sum of all ranks' messages of ``source`` elements, in rank order.

        Args:
            messages: messages of the other ranks.
            own: message of this rank, from :meth:`own_message`.
            out: room of the caller's dtype, whose content is not needed.
            source: dtype of the messages.

        Returns:
            An accumulator: ``out`` itself if it has the accumulator's dtype.
        """
        wide, rank = self.dtype.accumulator, self.transport.rank
        acc = out if self.dtype is wide else np.empty(out.size, wide.storage)
        mail = self._mailbox
        raw = [(m.peer, mail.read(m)) for m in messages]
        raw.append((rank, own.wire()))
        with self.call.decoding():
            opened = [
                self.open(message, acc.size, peer, source) for peer, message in sorted(raw, key=itemgetter(0))
            ]
            self.codec.decode_sum_flat(opened, acc)
        self._let_go(messages)
        return acc

    def store(self, acc: Array, out: Array, ranks: int) -> None:
        """Write an accumulator, over ``ranks`` for a mean, to ``out`` of the caller's dtype; ``acc`` is used up."""
        if ranks != 1:
            acc /= ranks
        if acc is not out:
            out[:] = narrow(acc, self.dtype)

    # -- error feedback of linear codecs -------------------------------------------------------------

    def memory(self, feedback: ErrorFeedback, key: Key, n: int, form: Form | str) -> Any:
        """Return the error-feedback memory under a key, of ``n`` elements of the accumulator's dtype."""
        return feedback.memory(key, n, self.dtype, form)

    def corrected(self, data: Flat, memory: Any, room: Array) -> Flat:
        """Return data corrected by a memory, in the accumulator's dtype: in ``room`` where that has this dtype."""
        kind = data.dtype.accumulator
        # The result will be written to the same place: no other pages are touched.
        in_place = data.dtype is kind and room.flags.aligned
        values = room if in_place else np.empty(data.size, kind.storage)
        memory.native.correct(data.data, data.dtype, 0, values)
        return Flat(values, kind, data.shape, True, False)

    def keep_lost(self, corrected: Flat, own: Array, memory: Any) -> None:
        """Keep in the memory the corrected data minus ``own``, unless that is not finite."""
        # A copy, since ``own`` is the result, too, and would be used up.
        memory.native.keep(corrected.data, own.copy(), 0, 1.0)

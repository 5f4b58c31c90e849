"""Encode, send, receive and decode on a device's memory; see :class:`~.data_path.carrier.Carrier`.

All work is put on the operation's stream pair and is done in its order. The host reads a message's header and the
first bytes of its payload; the device checks the CRC and the rest, and the operation's end reports the outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from hybridcomp import wire
from hybridcomp.arrays import DType, Flat
from hybridcomp.codecs import Codec, ErrorFeedback
from hybridcomp.codecs.device.driver import driver_of, has_driver
from hybridcomp.codecs.device.feedback import MODULES as FEEDBACK_MODULES
from hybridcomp.codecs.device.memory import DeviceMemory, Keep
from hybridcomp.codecs.device.messages import Encoded, convert, decode_opened, divide, encode_into
from hybridcomp.codecs.feedback.error_feedback import Key
from hybridcomp.codecs.feedback.forms import Form
from hybridcomp.codecs.table import codec_for
from hybridcomp.collectives.data_path.coding import NONE
from hybridcomp.collectives.data_path.links import Link
from hybridcomp.collectives.device.mailbox import DECODES, Arriving, Outgoing, Own, Passing
from hybridcomp.collectives.device.reader import DeviceReader
from hybridcomp.cuda import prepare_in_turn
from hybridcomp.device import DeviceArray
from hybridcomp.wire import HEADER_BYTES, Header

_ENCODES = "encode"  # forks of an operation's queue that write messages


class DeviceCarrier(DeviceReader):
    """Codec, transport and statistics of one operation on a device's memory."""

    def remember(self, feedback: ErrorFeedback, key: Key, n: int, form: Form | str) -> DeviceMemory:
        """Begin a step of the error-feedback memory under a key and return the memory; use the codec of that step.

        Called in the operation's first step.
        """
        memory = self.memory(feedback, key, n, form)
        self.codec = self.codec.at_step(memory.begin(self.queue))
        return memory

    def memory(self, feedback: ErrorFeedback, key: Key, n: int, form: Form | str) -> DeviceMemory:
        """Return the error-feedback memory under a key; the operation's work comes next in its order."""
        prepare_in_turn(FEEDBACK_MODULES, self._runtime)
        memory: DeviceMemory = feedback.device_memory(key, n, self.dtype, self.queue, form)
        memory.follow(self.queue)
        return memory

    def corrected(self, data: Flat, memory: Any, room: Any) -> Flat:
        """Return data corrected by a memory, in the accumulator's dtype."""
        values = memory.correct(self._aligned_flat(data), self.queue, slice(0, data.size))
        return Flat(values, memory.kind, data.shape, True, False)

    def keep_lost(self, corrected: Flat, own: Any, memory: Any) -> None:
        """Keep in the memory the corrected data minus ``own``, unless that is not finite."""
        memory.keep(corrected.data, own, self.queue, slice(0, corrected.size))

    # -- to a message --------------------------------------------------------------------------------

    def encode(self, data: Any, dtype: DType | None = None) -> Any:
        """Start to encode a slice."""
        kind = dtype or self.dtype
        queue = self.streams.queue.fork(_ENCODES)
        with self.call.encoding():
            buffer = queue.empty(self.codec.bound(data.size, kind))
            encoded = encode_into(self.codec, Flat(data, kind, data.shape, True, False), buffer, queue)
            return self._outgoing(encoded)

    def encode_odd(self, data: Flat, link: Link | None) -> Any:
        """Start to encode an array to a message of odd length; arrays with a link are encoded on the host."""
        assert link is None
        queue = self.streams.queue
        with self.call.encoding():
            buffer = queue.empty(self.codec.bound(data.size, self.dtype) + 1)
            message = self._outgoing(encode_into(self.codec, self._aligned_flat(data), buffer, queue))
        message.odd = True
        return message

    def encode_with_feedback(self, data: Any, memory: Any, span: slice) -> Any:
        """Start to encode a span of data, corrected by ``memory``."""
        queue = self.streams.queue.fork(_ENCODES) if memory.apart else self.streams.queue
        with self.call.encoding():
            buffer = queue.empty(self.codec.bound(data.size, memory.kind))
            return self._kept(
                memory.encode_first(self.codec, self._flat(data), buffer, queue, span), data, memory
            )

    def encode_sum_with_feedback(self, total: Any, memory: Any, span: slice, ranks: int) -> Any:
        """Start to encode the sum of a span that this rank owns."""
        queue = self.streams.queue
        with self.call.encoding():
            buffer = queue.empty(self.codec.bound(total.size, memory.kind))
            first = memory.encode_sum_first(self.codec, total, buffer, queue, span, ranks)
            return self._kept(first, total, memory)

    def _kept(self, first: tuple[Encoded, Keep | None], data: Any, memory: Any) -> Outgoing:
        """Return a message whose error is kept, once it is sent if that needs its head."""
        encoded, keep = first
        message = self._outgoing(encoded)
        if keep is not None:
            message.then.append(partial(self._keep, keep, message, data.size, memory))
        return message

    def _keep(self, keep: Keep, message: Outgoing, n: int, memory: Any) -> None:
        queue = self.streams.queue.fork(_ENCODES) if memory.apart else self.streams.queue
        with self.call.encoding():
            keep(queue, *self._beginning(message, n, memory.kind))

    def _outgoing(self, encoded: Encoded) -> Outgoing:
        return Outgoing(self.streams, encoded, self.codec, direct=self._direct)

    def _flat(self, data: Any) -> Flat:
        return Flat(self._aligned(data), self.dtype, data.shape, True, False)

    def _aligned_flat(self, data: Flat) -> Flat:
        return data._replace(data=self._aligned(data.data))

    def encode_sum(self, total: Any, dtype: DType, ranks: int) -> Any:
        """Start to encode a sum, over ``ranks`` for a mean, as ``dtype``; ``total`` is used up."""
        wide = self.dtype.accumulator
        divide(self.streams.queue, total, wide, ranks)
        if dtype is wide:
            return self.encode(total, dtype)
        queue = self.streams.queue
        narrow = queue.array(total.size, dtype.storage)
        convert(queue, total, wide, narrow, dtype, total.size)
        return self.encode(narrow, dtype)

    def own_message(self, message: Any, n: int, dtype: DType) -> Any:
        """Return this rank's own message, which is summed once it is sent: then its length and head are known."""
        own = Own(message.buffer)
        message.then.append(partial(self._learn, own, message, n, dtype))
        return own

    def _learn(self, own: Own, message: Outgoing, n: int, dtype: DType) -> None:
        own.header, own.head = self._beginning(message, n, dtype)

    def release(self, message: Any) -> None:
        """Release a message that no mailbox has sent."""
        message.release()

    # -- sums ----------------------------------------------------------------------------------------

    def sum_encode(
        self,
        data: Any,
        messages: Sequence[Any],
        source: DType,
        dtype: DType,
        ranks: int,
        out: Any,
        plain: Sequence[Any] = (),
    ) -> Any:
        """Start to sum messages and this rank's own part, to encode the sum, and to decode the message."""
        acc = self._added(data, plain, messages, source)
        result = self.encode_sum(acc, dtype, ranks)
        if out is not None:
            self.decode_own(result, out, dtype)
        return result

    def sum_into(
        self,
        data: Any,
        messages: Sequence[Any],
        source: DType,
        ranks: int,
        out: Any,
        plain: Sequence[Any] = (),
    ) -> None:
        """Start to sum messages and this rank's own part into ``out``."""
        self.store(self._added(data, plain, messages, source), out, ranks)

    def _added(self, data: Any, plain: Sequence[Any], messages: Sequence[Any], source: DType) -> Any:
        acc = self.own(data, None, slice(0, data.size))
        if plain:
            self.alike(codec=NONE).add(plain, acc, self.dtype)
        self.add(messages, acc, source)
        return acc

    def own(self, data: Any, memory: Any, span: slice) -> Any:
        """Return a new accumulator with this rank's own part in it."""
        if memory is not None:
            acc: DeviceArray = memory.own(self.codec, self._flat(data), self.queue, span)
            return acc
        queue, wide = self.streams.queue, self.dtype.accumulator
        acc = queue.array(data.size, wide.storage)
        convert(queue, self._aligned(data), self.dtype, acc, wide, data.size)
        return acc

    def add(self, messages: Sequence[Any], acc: Any, source: DType | None = None) -> None:
        """Start to add the values of messages, in this order, to ``acc``."""
        queue, wide = self.streams.queue, self.dtype.accumulator
        with self.call.decoding():
            opened = []
            for message in messages:
                with self._naming(message):
                    opened.append(self._open(message, acc.size, source or self.dtype, queue.fork(DECODES)))
            driver = driver_of(self.codec.wire_id)
            for message, (header, head, _) in zip(messages, opened, strict=True):
                with self._naming(message):
                    driver.check(header, head)
            if opened:
                headers, heads, _ = zip(*opened, strict=True)
                payloads = [raw[HEADER_BYTES : HEADER_BYTES + h.payload] for h, _, raw in opened]
                driver.decode_sum(headers, heads, payloads, acc, wide, queue)
        self._used(messages)

    def total(self, messages: Sequence[Any], own: Any, out: Any, source: DType) -> Any:
        """Start to sum all ranks' messages, in rank order, to a new accumulator."""
        queue, wide, rank = self.streams.queue, self.dtype.accumulator, self.transport.rank
        acc = queue.zeros(out.size * wide.itemsize).view(wide.storage)
        self.add([m for m in messages if m.peer < rank], acc, source)
        with self.call.decoding():
            payload = own.buffer[HEADER_BYTES : HEADER_BYTES + own.header.payload]
            driver_of(self.codec.wire_id).decode_sum([own.header], [own.head], [payload], acc, wide, queue)
        self.add([m for m in messages if m.peer > rank], acc, source)
        return acc

    def store(self, acc: Any, out: Any, ranks: int) -> None:
        """Start to write an accumulator, over ``ranks`` for a mean, to ``out``."""
        queue, wide = self.streams.queue, self.dtype.accumulator
        divide(queue, acc, wide, ranks)
        if out.ptr % self.dtype.component_bytes == 0:
            convert(queue, acc, wide, out, self.dtype, acc.size)
        else:
            narrow = queue.array(acc.size, self.dtype.storage)
            convert(queue, acc, wide, narrow, self.dtype, acc.size)
            queue.copy(out, narrow)

    def _aligned(self, data: DeviceArray) -> DeviceArray:
        if data.ptr % self.dtype.component_bytes == 0:
            return data
        copy = self.streams.queue.array(data.size, data.dtype)
        self.streams.queue.copy(copy, data)
        return copy

    # -- from a message ------------------------------------------------------------------------------

    def inbox_bytes(self, n: int, dtype: DType | None = None) -> int:
        """Return the bytes of the longest message of ``n`` elements, and no more, since pinned memory is expensive."""
        return self.codec.bound(n, dtype or self.dtype)

    def decode(self, message: Any, out: Any, source: DType | None = None) -> None:
        """Start to write the values of a message to ``out``."""
        queue = self.streams.queue.fork(DECODES)
        with self.call.decoding(), self._naming(message):
            header, head, raw = self._open(message, out.size, source or self.dtype, queue)
            decode_opened(header, head, raw, out, self.dtype, queue)
        self._used([message])

    def summed(self, data: Any, messages: Sequence[Any], source: DType) -> Any:
        """Start to sum messages and this rank's own part into an accumulator."""
        acc = self.own(data, None, slice(0, data.size))
        self.add(messages, acc, source)
        return acc

    def spent(self, acc: Any) -> None:
        """Do nothing: the queue frees an accumulator after the work that uses it."""

    def decode_own(self, message: Any, out: Any, source: DType | None = None) -> None:
        """Write the values of this rank's own message to ``out``: now, or when its length and head are known."""
        self._when_known(message, partial(self._decode_own, message, out, source or self.dtype))

    def decode_result(self, message: Any, out: Any, memory: Any, span: slice) -> None:
        """Start to write the values of a message of an owner's sum to ``out``."""
        kind = self.dtype.accumulator
        if not memory.tracks:
            self.decode(message, out, kind)
            return
        values = self.queue.array(out.size, kind.storage)
        with self.call.decoding(), self._naming(message):
            header, head, raw = self._open(message, out.size, kind, self.queue)
            decode_opened(header, head, raw, values, kind, self.queue)
        self._used([message])
        self._take_result(values, out, memory, span)

    def decode_own_result(self, message: Any, out: Any, memory: Any, span: slice) -> None:
        """Start to decode the message of this rank's own sum to ``out``, as :meth:`decode_result` does for others."""
        kind = self.dtype.accumulator
        if not memory.tracks:
            self.decode_own(message, out, kind)
            return
        values = self.queue.array(out.size, kind.storage)
        self._when_known(message, partial(self._decode_own, message, values, kind, kind))
        self._when_known(message, partial(self._take_result, values, out, memory, span))

    def _when_known(self, message: Outgoing, step: Callable[[], None]) -> None:
        known = message.nbytes is not None or driver_of(self.codec.wire_id).reads_lengths(self.codec)
        if self._head is None or not known:
            message.then.append(step)
        else:
            step()

    def _take_result(self, values: DeviceArray, out: DeviceArray, memory: Any, span: slice) -> None:
        memory.result(values, self.queue, span)
        self.store(values, out, 1)

    def _decode_own(
        self, message: Outgoing, out: DeviceArray, kind: DType, dtype: DType | None = None
    ) -> None:
        header, head = self._beginning(message, out.size, kind)
        with self.call.decoding():
            raw = message.buffer[: message.nbytes]
            decode_opened(header, head, raw, out, dtype or self.dtype, self.streams.queue)

    def _beginning(self, message: Outgoing, n: int, kind: DType) -> tuple[Header, bytes]:
        size = message.buffer.size if message.nbytes is None else message.nbytes
        header = Header(self.codec.wire_id, kind, n, size - HEADER_BYTES, self.codec.params_hash)
        known = None if message.here else self._head
        return header, message.head(header) if known is None else known

    def checked(self, message: Any, n: int, dtype: DType | None = None) -> Any:
        """Return a message of ``n`` elements of ``dtype`` to be sent on; the rank that decodes it checks its CRC."""
        with self._naming(message):
            return Passing(message, HEADER_BYTES + self._see(message, n, dtype or self.dtype)[0].payload)

    def take(self, message: Any, nbytes: int, out: Any) -> int:
        """Start to write the values of a message of any codec to the beginning of ``out``; return their number."""
        message.buffer = message.buffer[:nbytes]
        with self.call.decoding(), self._naming(message):
            header, head = message.see()
            codec = codec_for(header)
            if not has_driver(codec) or driver_of(codec.wire_id).on_host(head):
                return self._take_on_host(message, codec, out)
            self._fits(message, header, out.size)
            raw = self._raw(message, header, self.queue)
            decode_opened(header, head, raw, out[: header.count], self.dtype, self.streams.queue)
        self._used([message])
        return int(header.count)

    def take_plain(self, message: Any, nbytes: int, out: Any) -> None:
        """Start to copy a message of plain bytes."""
        target, source = out.view(np.dtype(np.uint8))[:nbytes], message.buffer[:nbytes]
        if isinstance(source, DeviceArray):
            self.streams.queue.copy(target, source)
        else:
            self.streams.upload(target, source)
        self._used([message])

    def _take_on_host(self, message: Arriving, codec: type[Codec], out: DeviceArray) -> int:
        """Decode a message by a codec that has no kernels here."""
        raw, header = wire.open_message(self._host_bytes(message))
        self.fits(header, message.peer, out.size)
        mail = self._mailbox
        values = mail.inbox(header.count * self.dtype.itemsize)
        codec.decode_flat(raw, header, values.buffer.view(self.dtype.storage), self.dtype)
        self.streams.upload(out, values.buffer)
        self._used([message, values])
        return header.count

    def room(self, n: int, dtype: DType) -> Any:
        """Return room for ``n`` elements on the device."""
        return self.queue.array(n, dtype.storage)

    # -- copies --------------------------------------------------------------------------------------

    def copy(self, source: Any, out: Any) -> None:
        """Start to copy elements as they are."""
        self.streams.queue.copy(out, source)

"""``randomblock`` on a device: its values are a message of their own, which the values' codec writes and reads."""

from __future__ import annotations

import numpy as np

from hybridcomp.arrays import DType, Flat
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.device.driver import driver_of, suffix
from hybridcomp.codecs.device.linear import base
from hybridcomp.codecs.device.messages import convert, encode_into, open_message
from hybridcomp.codecs.linear.base import Reduced, Reduction, Round, Terms
from hybridcomp.codecs.linear.randomblock import PREFIX, RandomBlockCodec, open_prefix, parts
from hybridcomp.device import DeviceArray, Queue
from hybridcomp.wire import HEADER_BYTES, Header

_NAN = {
    DType.FLOAT32: 0x7FC0_0000,
    DType.FLOAT64: 0x7FF8_0000_0000_0000,
    DType.FLOAT16: 0x7E00,
    DType.BFLOAT16: 0x7FC0,
}


class RandomBlockDriver(base.LinearDriver):
    """The driver of ``randomblock``."""

    def modules(self) -> tuple[str, ...]:
        return ("linear", "convert")

    def encode(
        self, codec: Codec, src: DeviceArray, dtype: DType, payload: DeviceArray, queue: Queue
    ) -> int | DeviceArray:
        assert isinstance(codec, RandomBlockCodec)
        start, k = codec.start(src.size), codec.k(src.size)
        most = _outside(queue, src, dtype, start, k)
        ratio = int(np.float64(codec.ratio_kept).view(np.uint64))
        prefix = (payload, start, ratio, most, base.infinity(dtype))
        queue.launch("linear", "randomblock_prefix", 1, 32, *prefix)
        block = Flat(_block(queue, src, start, k), dtype, (k,), True, False)
        values = encode_into(codec.values, block, payload[PREFIX.size :], queue)
        assert values.size is not None  # the codecs of values have messages of a fixed size
        return PREFIX.size + values.size

    def check(self, header: Header, head: bytes) -> None:
        _, _, inner = open_prefix(head, header)
        driver_of(inner.codec).check(inner, _inner_head(head, inner))

    def decode(
        self,
        header: Header,
        head: bytes,
        payload: DeviceArray,
        out: DeviceArray,
        dtype: DType,
        add: bool,
        queue: Queue,
    ) -> None:
        start, poisoned, inner = open_prefix(head, header)
        message = queue.empty(header.payload - PREFIX.size)  # at an address that the values' kernels take
        queue.copy(message, payload[PREFIX.size :])
        open_message(queue, message)  # checks its CRC: sets the status
        if poisoned:
            base.fill(queue, out, _NAN[dtype])
            return
        first, last = parts(start, inner.count, header.count)
        if not add:
            for rest in (out[last.stop : first.start], out[first.stop :]):
                base.fill(queue, rest)
        driver, body, inner_head = driver_of(inner.codec), message[HEADER_BYTES:], _inner_head(head, inner)
        if not last.stop:
            driver.decode(inner, inner_head, body, out[first], dtype, add, queue)
            return
        values = queue.array(inner.count, dtype.storage)
        driver.decode(inner, inner_head, body, values, dtype, False, queue)
        split = first.stop - first.start
        for piece, part in ((first, values[:split]), (last, values[split:])):
            convert(queue, part, dtype, out[piece], dtype, part.size, add=add)

    def finds_faults(self) -> bool:
        return True

    def reduce(self, codec: Codec, x: Flat, terms: Terms, staging: base.Staging) -> Reduction:
        """Reduce as on the CPU, in one round: the block, and a number, NaN if an element outside is not finite."""
        assert isinstance(codec, RandomBlockCodec)
        queue, kind = staging.queue, x.dtype.accumulator
        there = codec.at_step(terms.step)
        start, k = there.start(x.size), there.k(x.size)
        block = queue.array(k + 1, kind.storage)
        convert(queue, _block(queue, x.data, start, k), x.dtype, block, kind, k)
        most = _outside(queue, x.data, x.dtype, start, k)
        queue.launch("linear", f"randomblock_mark_{suffix(kind)}", 1, 32, block[k:], most)
        mine = _spread(queue, block[:k], start, x.size) if terms.own else None
        sums, ready = staging.fetch(block)
        yield Round(sums, "sum", ready)
        if terms.mean:
            sums /= sums.dtype.type(terms.ranks)
        if np.isfinite(sums[k]):
            return Reduced(_spread(queue, staging.send(sums[:k]), start, x.size), mine)
        total = queue.array(x.size, kind.storage)
        base.fill(queue, total, _NAN[kind])
        return Reduced(total, mine)


def _block(queue: Queue, data: DeviceArray, start: int, k: int) -> DeviceArray:
    first, last = parts(start, k, data.size)
    if not last.stop:
        return data[first]
    block = queue.array(k, data.dtype)
    queue.copy(block, data[first])
    queue.copy(block[first.stop - first.start :], data[last])
    return block


def _spread(queue: Queue, block: DeviceArray, start: int, n: int) -> DeviceArray:
    """Return an array of ``n`` elements with the block in its place, zeros around it."""
    out = queue.zeros(n * block.dtype.itemsize).view(block.dtype)
    first, last = parts(start, block.size, n)
    split = first.stop - first.start
    queue.copy(out[first], block[:split])
    queue.copy(out[last], block[split:])
    return out


def _outside(queue: Queue, data: DeviceArray, dtype: DType, start: int, k: int) -> DeviceArray:
    """Find the largest magnitude outside of the block."""
    first, last = parts(start, k, data.size)
    most = base.peak(queue, data[last.stop : first.start], dtype)
    return base.peak(queue, data[first.stop :], dtype, most)


def _inner_head(head: bytes, inner: Header) -> bytes:
    begin = PREFIX.size + HEADER_BYTES
    return head[begin : begin + inner.payload]

"""``lattice`` on a device: the largest magnitude in one pass, the integers in another, which makes the scale."""

from __future__ import annotations

import numpy as np

from hybridcomp import native
from hybridcomp.arrays import DType, Flat
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.device.driver import suffix
from hybridcomp.codecs.device.linear import base
from hybridcomp.codecs.linear.base import Reduced, Reduction, Round, Terms, derived_seed
from hybridcomp.codecs.linear.lattice import INTEGERS, PREFIX, LatticeCodec
from hybridcomp.device import DeviceArray, Queue
from hybridcomp.wire import Header

_THREADS = 256
_EACH = 16  # elements of a thread at a time


class LatticeDriver(base.LinearDriver):
    """The driver of ``lattice``."""

    def modules(self) -> tuple[str, ...]:
        return ("linear", *(f"lattice{bits}" for bits in INTEGERS))

    def encode(
        self, codec: Codec, src: DeviceArray, dtype: DType, payload: DeviceArray, queue: Queue
    ) -> int | DeviceArray:
        assert isinstance(codec, LatticeCodec)
        peak = base.peak(queue, src, dtype)
        _quantize(queue, codec, src, dtype, peak, codec.ranks, codec.seed, payload, payload[PREFIX.size :])
        return PREFIX.size + src.size * (codec.bits // 8)

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
        bits, *_, scale = PREFIX.unpack_from(head)
        _dequantize(queue, payload[PREFIX.size :], bits, header.dtype, scale, out, dtype, add=add)

    def reduce(self, codec: Codec, x: Flat, terms: Terms, staging: base.Staging) -> Reduction:
        """Reduce as on the CPU, in two rounds: the largest magnitude, and the integers."""
        assert isinstance(codec, LatticeCodec)
        codec.check_ranks(terms.ranks)
        queue, kind, bits = staging.queue, x.dtype.accumulator, codec.bits
        peak = base.peak(queue, x.data, x.dtype)
        word = peak.view(f"u{kind.itemsize}")[:1]
        most, ready = staging.fetch(word)
        yield Round(most, "max", ready)
        scale, _ = native.kernels().lattice_scale(int(most[0]), x.dtype, bits, terms.ranks)
        staging.send(most, word)
        seed = derived_seed(codec.seed, terms.step, terms.rank)
        q = queue.array(x.size, INTEGERS[bits])
        _quantize(queue, codec, x.data, x.dtype, peak, terms.ranks, seed, None, q)
        mine = queue.array(x.size, kind.storage) if terms.own else None
        if mine is not None:
            _dequantize(queue, q, bits, x.dtype, scale, mine, kind)
        integers, ready = staging.fetch(q)
        yield Round(integers, "sum", ready)
        staging.send(integers, q)
        total = queue.array(x.size, kind.storage)
        unit = scale / terms.ranks if terms.mean else scale
        _dequantize(queue, q, bits, x.dtype, unit, total, kind)
        return Reduced(total, mine)


def _quantize(
    queue: Queue,
    codec: LatticeCodec,
    src: DeviceArray,
    dtype: DType,
    peak: DeviceArray,
    ranks: int,
    seed: int,
    prefix: DeviceArray | None,
    q: DeviceArray,
) -> None:
    blocks = max(1, queue.blocks(src.size, _THREADS * _EACH))
    name = f"lattice_quantize_{suffix(dtype)}_{codec.rounding}"
    args = (src, src.size, peak, codec.limit(ranks), seed, ranks, prefix, q)
    queue.launch(f"lattice{codec.bits}", name, blocks, _THREADS, *args)


def _dequantize(
    queue: Queue,
    q: DeviceArray,
    bits: int,
    source: DType,
    scale: float,
    out: DeviceArray,
    dtype: DType,
    *,
    add: bool = False,
) -> None:
    name = f"lattice_dequantize_{suffix(source.accumulator)}_{suffix(dtype)}{'_add' if add else ''}"
    unit = int(np.float64(scale).view(np.uint64))
    blocks = queue.blocks(out.size, _THREADS * _EACH)
    queue.launch(f"lattice{bits}", name, blocks, _THREADS, q, out.size, unit, out, queue.status)

"""``randomblock``: one contiguous block of the elements, at a place that all ranks draw alike; the rest is zero.

Foroutan, Jaggi: "Sparse communication for training deep networks" (arXiv:2009.09271). The block has
k = ceil(ratio * n) elements, begins anywhere with equal chances, and goes on from the start where it runs past
the end. Its place comes from the seed and n alone, so no indices are sent, and ranks sum their blocks as they
are: an all-reduce of k numbers. :meth:`RandomBlockCodec.at_step` gives the codec of another step, whose block
lies elsewhere.

The values are not scaled up: the expectation over all places is ratio * x. It goes with error feedback, which
sends later what a step left out.

A NaN or an infinity outside of the block is not sent, but flagged: then all elements decode to NaN.

Payload: uint64 first element of the block, float64 ratio, uint32 1 if an element outside is not finite, uint32 zero,
then the k values, in the block's order, as a message of their own (the ``values`` codec's).
"""

from __future__ import annotations

import functools
import struct
from fractions import Fraction
from typing import Any

import numpy as np

from hybridcomp import arrays, native, wire
from hybridcomp.arrays import ByteArray, DType, Flat
from hybridcomp.codecs import checks
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.linear.base import Array, LinearCodec, Reduced, Reduction, Round, Terms, derived_seed
from hybridcomp.codecs.registry import get_codec
from hybridcomp.codecs.table import classes, codec_for, register
from hybridcomp.errors import WireError
from hybridcomp.wire import HEADER_BYTES

PREFIX = struct.Struct("<QdII")
_MOST = 65536  # elements for one that is sent: a short message cannot ask for any amount of memory


@register
class RandomBlockCodec(LinearCodec):
    """A random block with a shared seed.

    Args:
        ratio: share of the elements that is sent, from 1/65536 to 1.
        seed: seed of the block's place, from 0 to 2^63 - 1.
        values: codec of the sent values: ``none`` (the input's dtype), ``fp16``, ``bf16``, ``int8`` or
            ``int4``. For messages only: a reduction sums float32 (float64 for float64).
    """

    name = "randomblock"
    wire_id = 19
    examples = (
        "randomblock:ratio=0.05",
        "randomblock:ratio=0.7,seed=3,values=(int8:block=64)",
    )
    sums = 1
    partial = True

    def __init__(self, ratio: float = 0.01, seed: int = 0, values: str | Codec = "none") -> None:
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 1 / _MOST <= ratio <= 1:
            raise ValueError(f"ratio must be a number from 1/{_MOST} to 1, not {ratio!r}")
        self._ratio = float(ratio)
        self._seed = checks.integer("seed", seed, 0, 2**63 - 1)
        self._values = get_codec(values)
        if not _carries_values(type(self._values)):
            allowed = ", ".join(sorted(cls.name for cls in classes() if _carries_values(cls)))
            raise ValueError(f"values must be one of {allowed}, not {self._values.name!r}")

    @property
    def ratio_kept(self) -> float:
        """Return the share of the elements that is sent."""
        return self._ratio

    @property
    def seed(self) -> int:
        """Return the seed of the block's place."""
        return self._seed

    @property
    def values(self) -> Codec:
        """Return the codec of the sent values."""
        return self._values

    @property
    def params(self) -> dict[str, Any]:
        return {"ratio": self._ratio, "seed": self._seed, "values": self._values.spec}

    @checks.once_a_step
    def at_step(self, step: int) -> RandomBlockCodec:
        return RandomBlockCodec(self._ratio, checks.stepped(self._seed, step), self._values)

    def k(self, n: int) -> int:
        """Return how many of ``n`` elements are sent."""
        return _share(self._ratio, n)

    def start(self, n: int) -> int:
        """Return the index of the first of the elements that are sent."""
        return (derived_seed(self._seed, n) * n) >> 63

    def bound(self, n: int, dtype: arrays.DTypeLike = DType.FLOAT32) -> int:
        return HEADER_BYTES + PREFIX.size + self._values.bound(self.k(n), dtype)

    def encode_flat(self, src: Flat, out: ByteArray) -> int:
        start, k = self.start(src.size), self.k(src.size)
        block = _block(src.data, start, k)
        PREFIX.pack_into(out.data, HEADER_BYTES, start, self._ratio, _overflows(src, start, k), 0)
        end = HEADER_BYTES + PREFIX.size
        end += self._values.encode_flat(Flat(block, src.dtype, block.shape, True, False), out[end:])
        return wire.seal(
            out, self.wire_id, self.params_hash, dtype=src.dtype, count=src.size, payload=end - HEADER_BYTES
        )

    def reduce(self, x: Flat, terms: Terms) -> Reduction:
        """Reduce in one round: the block, and a number that is NaN where an element outside of it is not finite."""
        there = self.at_step(terms.step)
        start, k = there.start(x.size), there.k(x.size)
        kind = x.dtype.accumulator
        block = np.empty(k + 1, kind.storage)
        native.kernels().convert(_block(x.data, start, k), x.dtype, block[:k], kind, False)
        block[k] = np.nan if _overflows(x, start, k) else 0
        mine = _spread(block[:k], start, x.size) if terms.own else None
        yield Round(block, "sum")
        if terms.mean:
            block /= block.dtype.type(terms.ranks)
        if np.isfinite(block[k]):
            return Reduced(_spread(block[:k], start, x.size), mine)
        return Reduced(np.full(x.size, np.nan, kind.storage), mine)

    @classmethod
    def check_payload(cls, msg: ByteArray, header: wire.Header) -> None:
        _open(msg, header)

    @classmethod
    def decode_flat(
        cls, msg: ByteArray, header: wire.Header, out: np.ndarray[Any, Any], dtype: DType
    ) -> None:
        start, poisoned, message, inner = _open(msg, header)
        if poisoned:
            native.kernels().convert(_nans(out.size), DType.FLOAT32, out, dtype, False)
            return
        first, last = parts(start, inner.count, header.count)
        out[last.stop : first.start] = 0
        out[first.stop :] = 0
        decoder = codec_for(inner)
        if last.stop:
            values = np.empty(inner.count, dtype.storage)
            decoder.decode_flat(message, inner, values, dtype)
            out[first], out[last] = np.split(values, [first.stop - first.start])
        else:
            decoder.decode_flat(message, inner, out[first], dtype)

    @classmethod
    def decode_add_flat(cls, msg: ByteArray, header: wire.Header, acc: np.ndarray[Any, Any]) -> None:
        start, poisoned, message, inner = _open(msg, header)
        if poisoned:
            acc[...] = np.nan
            return
        first, last = parts(start, inner.count, header.count)
        decoder = codec_for(inner)
        if last.stop:
            values = np.empty(inner.count, acc.dtype)
            decoder.decode_flat(message, inner, values, header.dtype.accumulator)
            head, tail = np.split(values, [first.stop - first.start])
            for part, place in ((head, first), (tail, last)):
                kind, convert = header.dtype.accumulator, native.kernels().convert
                convert(part, kind, acc[place], kind, True)
        else:
            decoder.decode_add_flat(message, inner, acc[first])


def _share(ratio: float, n: int) -> int:
    """Compute ceil(ratio * n), in whole numbers of the ratio as written: in floating point, 0.07 * 100 is over 7."""
    numerator, denominator = _whole_numbers(ratio)
    return -(-n * numerator // denominator)


@functools.lru_cache(maxsize=64)
def _whole_numbers(ratio: float) -> tuple[int, int]:
    return Fraction(str(ratio)).as_integer_ratio()


def _carries_values(cls: type[Codec]) -> bool:
    return cls.carries_values and cls.fixed_size  # so that messages are of a fixed size


def parts(start: int, k: int, n: int) -> tuple[slice, slice]:
    """Return the block as the part before the end of the elements, and the part at their start."""
    return slice(start, min(start + k, n)), slice(0, max(0, start + k - n))


def _block(data: Array, start: int, k: int) -> Array:
    first, last = parts(start, k, data.size)
    return np.concatenate([data[first], data[last]]) if last.stop else data[first]


def _spread(block: Array, start: int, n: int) -> Array:
    """Return an array of ``n`` elements with the block in its place, zeros around it."""
    out = np.zeros(n, block.dtype)
    first, last = parts(start, block.size, n)
    out[first], out[last] = np.split(block, [first.stop - first.start])
    return out


def _overflows(src: Flat, start: int, k: int) -> bool:
    """Tell whether an element outside of the block is not finite."""
    first, last = parts(start, k, src.size)
    infinity = 0x7FF0_0000_0000_0000 if src.dtype is DType.FLOAT64 else 0x7F80_0000
    peak = native.kernels().lattice_peak
    outside = (src.data[last.stop : first.start], src.data[first.stop :])
    return any(peak(part, src.dtype) >= infinity for part in outside)


def _nans(n: int) -> Array:
    return np.full(n, np.nan, np.float32)


def open_prefix(payload: bytes | memoryview, header: wire.Header) -> tuple[int, bool, wire.Header]:
    """Check all of a payload but the values themselves.

    Args:
        payload: first bytes of the payload: the prefix and the header of the values' message.
        header: header of the message.

    Returns:
        The index at which the block begins, whether all is NaN, and the header of the values' message.

    Raises:
        WireError: the headers and the prefix do not fit together.
    """
    checks.floating(header, RandomBlockCodec.name)
    if header.payload < PREFIX.size:
        raise WireError(f"malformed randomblock payload: {header.payload} bytes are too few")
    start, ratio, poisoned, zero = PREFIX.unpack_from(payload, 0)
    n = header.count
    if not 1 / _MOST <= ratio <= 1 or start > max(0, n - 1) or poisoned > 1 or zero:
        raise WireError(f"malformed randomblock payload: a share of {ratio} of {n} elements from {start}")
    k = _share(ratio, n)
    inner = wire.peek(np.frombuffer(payload, np.uint8)[PREFIX.size :], header.payload - PREFIX.size)
    cls = codec_for(inner)
    if not _carries_values(cls) or inner.count != k or inner.dtype is not header.dtype:
        raise WireError(
            f"malformed randomblock payload: {inner.count} {inner.dtype.label} values by codec {cls.name!r} "
            f"for {k} {header.dtype.label} elements"
        )
    if HEADER_BYTES + inner.payload != header.payload - PREFIX.size:
        raise WireError("malformed randomblock payload: bytes after the values")
    return start, bool(poisoned), inner


def _open(msg: ByteArray, header: wire.Header) -> tuple[int, bool, ByteArray, wire.Header]:
    """Check a message; return where its block begins, whether all is NaN, the values' message and its header."""
    start, poisoned, inner = open_prefix(msg[HEADER_BYTES:].data, header)
    values, _ = wire.open_message(msg[HEADER_BYTES + PREFIX.size :])
    codec_for(inner).check_payload(values, inner)
    return start, poisoned, values, inner

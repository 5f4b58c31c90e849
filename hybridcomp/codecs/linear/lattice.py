"""``lattice``: integers on one scale, which ranks share, so that they add up without being decoded.

The scale of a tensor is its largest magnitude over L, and each element becomes the nearest integer multiple of
it, ties to even, or with ``rounding=stochastic`` one of the two multiples around it at random, so that the
expectation is the element. L = floor((2^(bits - 1) - 1) / ranks): the sum of as many contributions fits the
integers. A reduction takes the largest magnitude over all ranks first, then sums the integers: exactly, in any
order, by any means. The error is the rounding of each rank's own elements, at most half a step each (one step
where it is stochastic).

A tensor that holds NaN or infinity decodes to NaN throughout; one whose largest magnitude is below 2^-100
(2^-90 for 32 bits, 2^-900 for float64) decodes to zeros, which keeps denormal numbers, and processor modes that
flush them, out of the arithmetic. One scale serves the whole tensor: small elements beside a large one are lost,
where ``int8`` has a scale per block.

Payload: uint32 bits, uint32 ranks (contributions that there is room for), uint32 parts (contributions that it is
the sum of), uint32 zero, float64 scale, then the integers of 1, 2 or 4 bytes.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np

from hybridcomp import arrays, native, wire
from hybridcomp.arrays import ByteArray, DType, Flat
from hybridcomp.codecs import checks
from hybridcomp.codecs.kernel_codec import KernelCodec
from hybridcomp.codecs.linear.base import LinearCodec, Reduced, Reduction, Round, Terms, derived_seed
from hybridcomp.codecs.table import register
from hybridcomp.errors import CodecMismatchError
from hybridcomp.wire import HEADER_BYTES

PREFIX = struct.Struct("<IIIId")
INTEGERS: dict[int, np.dtype[Any]] = {8: np.dtype(np.int8), 16: np.dtype(np.int16), 32: np.dtype(np.int32)}
_ROUNDINGS = ("nearest", "stochastic")


@register
class LatticeCodec(KernelCodec, LinearCodec):
    """Quantization on a shared scale, summed as integers.

    Args:
        bits: bits of an integer: 8, 16 or 32.
        rounding: ``nearest`` or ``stochastic``.
        seed: seed of stochastic rounding, from 0 to 2^63 - 1.
        ranks: contributions that a message has room for, see :meth:`add`; a reduction knows its own number.
    """

    name = "lattice"
    wire_id = 33
    examples = (
        "lattice",
        "lattice:bits=16:rounding=stochastic:seed=5",
        "lattice:bits=32:ranks=3",
    )
    sums = 2
    seldom = frozenset({"rounding", "seed", "ranks"})

    def __init__(self, bits: int = 8, rounding: str = "nearest", seed: int = 0, ranks: int = 1) -> None:
        if isinstance(bits, bool) or bits not in INTEGERS:
            raise ValueError(f"bits must be 8, 16 or 32, not {bits!r}")
        if rounding not in _ROUNDINGS:
            raise ValueError(f"rounding must be one of {', '.join(_ROUNDINGS)}, not {rounding!r}")
        self._bits = int(bits)
        self._rounding = rounding
        self._seed = checks.integer("seed", seed, 0, 2**63 - 1)
        self._ranks = checks.integer("ranks", ranks, 1, 2 ** (bits - 1) - 1)

    @property
    def bits(self) -> int:
        """Return the bits of an integer."""
        return self._bits

    @property
    def rounding(self) -> str:
        """Return the rounding: ``nearest`` or ``stochastic``."""
        return self._rounding

    @property
    def seed(self) -> int:
        """Return the seed of stochastic rounding."""
        return self._seed

    @property
    def ranks(self) -> int:
        """Return the number of contributions whose sum a message can hold."""
        return self._ranks

    @property
    def params(self) -> dict[str, Any]:
        return {"bits": self._bits, "rounding": self._rounding, "seed": self._seed, "ranks": self._ranks}

    def at_step(self, step: int) -> LatticeCodec:
        if self._rounding == "nearest":
            return self
        return LatticeCodec(self._bits, self._rounding, checks.stepped(self._seed, step), self._ranks)

    def limit(self, ranks: int | None = None) -> int:
        """Return the largest integer of one contribution of ``ranks`` (:attr:`ranks` if None)."""
        return int((2 ** (self._bits - 1) - 1) // (self._ranks if ranks is None else ranks))

    def check_ranks(self, ranks: int) -> None:
        """Raise ValueError unless the integers can hold a sum of so many contributions."""
        if self.limit(ranks) < 1:
            raise ValueError(f"bits={self._bits} cannot hold the sum of {ranks} ranks")

    def bound(self, n: int, dtype: arrays.DTypeLike = DType.FLOAT32) -> int:
        return HEADER_BYTES + PREFIX.size + n * (self._bits // 8)

    # -- messages ------------------------------------------------------------------------------------

    def scale_for(self, peak: float, dtype: arrays.DTypeLike = DType.FLOAT32) -> float:
        """Return the scale for :meth:`encode_with_scale`, of a tensor of ``dtype`` with largest magnitude ``peak``."""
        kind = arrays.as_dtype(dtype)
        bits = native.kernels().lattice_peak(np.array([peak], kind.accumulator.storage), kind.accumulator)
        return float(native.kernels().lattice_scale(bits, kind, self._bits, self._ranks)[0])

    def encode_with_scale(self, x: Any, scale: float) -> Any:
        """Encode ``x`` on a given scale: messages of one scale can be added.

        Args:
            x: array as :meth:`encode` takes it. If it is not finite, neither is the message, and its scale is NaN.
            scale: at least :meth:`scale_for` of the largest magnitude.

        Raises:
            CodecMismatchError: this codec cannot carry ``x``.
            ValueError: an element is too large for the scale, or the scale is not one.
        """
        src = arrays.flatten(x)
        reason = self.refuses(src)
        if reason is not None:
            raise CodecMismatchError(f"codec {self.spec!r} cannot carry this array: {reason}")
        wide = self._bits == 32 or src.dtype is DType.FLOAT64
        kind: type[np.floating[Any]] = np.float64 if wide else np.float32
        least = 2.0**-1000 if src.dtype is DType.FLOAT64 else 2.0**-124
        if scale != 0 and not (math.isfinite(scale) and scale >= least and float(kind(scale)) == scale):
            raise ValueError(f"scale must be 0 or a {kind.__name__} of at least {least:g}, not {scale!r}")
        raw = native.kernels().lattice_peak(src.data, src.dtype)
        storage = src.dtype.accumulator.storage
        peak = np.array([raw], f"u{storage.itemsize}").view(storage)[0]
        inverse = kind(1) / kind(scale) if scale else kind(0)
        if not np.isfinite(peak):
            scale, inverse = math.nan, kind(0)
        elif (scale or self.scale_for(float(peak), src.dtype)) and np.rint(
            kind(peak) * inverse
        ) > self.limit():
            raise ValueError(f"scale {scale!r} is too small: {float(peak)!r} is over {self.limit()} times it")
        elif not scale and self.scale_for(float(peak), src.dtype):
            raise ValueError(f"scale 0 is too small: the largest magnitude is {float(peak)!r}")
        buf: ByteArray = np.empty(self.bound(src.size, src.dtype), np.uint8)
        self._write(src, scale, float(inverse), buf)
        return arrays.like(buf, src)

    def add(self, a: Any, b: Any) -> Any:
        """Sum two messages of this codec without decoding them.

        Args:
            a, b: messages of the same dtype, count and scale. A scale of NaN goes with any, and stays.

        Returns:
            A new message, in ``a``'s library.

        Raises:
            WireError: a message is damaged, or of another codec.
            ValueError: they do not go together, or are the sum of more contributions than there is room for.
        """
        (one, first), (two, second) = wire.open_message(a), wire.open_message(b)
        for raw, header in ((one, first), (two, second)):
            self._check_mine(header)
            self.check_payload(raw, header)
        if (first.dtype, first.count) != (second.dtype, second.count):
            raise ValueError(
                f"a message of {first.count} {first.dtype.label} and one of {second.count} {second.dtype.label}"
            )
        _, ranks, parts, _, scale = PREFIX.unpack_from(one.data, HEADER_BYTES)
        _, _, more, _, other = PREFIX.unpack_from(two.data, HEADER_BYTES)
        spoilt = math.isnan(scale) or math.isnan(other)
        if scale != other and not spoilt:
            raise ValueError(f"messages on the scales {scale!r} and {other!r} cannot be added")
        if parts + more > ranks:
            raise ValueError(f"the sum of {parts + more} contributions, and room for {ranks}")
        out = one.copy()
        payload = HEADER_BYTES + PREFIX.size
        total = out[payload:].view(INTEGERS[self._bits])
        total += two[payload:].view(INTEGERS[self._bits])
        joined = math.nan if spoilt else scale
        PREFIX.pack_into(out.data, HEADER_BYTES, self._bits, ranks, parts + more, 0, joined)
        wire.seal(
            out, self.wire_id, self.params_hash, dtype=first.dtype, count=first.count, payload=first.payload
        )
        return arrays.like(out, arrays.flatten(a)) if arrays.is_torch(a) else out

    def _write(self, src: Flat, scale: float, inverse: float, out: ByteArray) -> int:
        size: int = native.kernels().lattice_encode(
            src.data,
            src.dtype,
            self._bits,
            self._ranks,
            scale,
            inverse,
            self._rounding == "stochastic",
            self._seed,
            self.wire_id,
            self.params_hash,
            out,
        )
        return size

    # -- the reduction -------------------------------------------------------------------------------

    def reduce(self, x: Flat, terms: Terms) -> Reduction:
        """Reduce in two rounds: the largest magnitude (as bits, with NaN above infinity), and the integers."""
        self.check_ranks(terms.ranks)
        kernels = native.kernels()
        kind = x.dtype.accumulator
        peak = np.array([kernels.lattice_peak(x.data, x.dtype)], f"u{kind.itemsize}")
        yield Round(peak, "max")
        scale, inverse = kernels.lattice_scale(int(peak[0]), x.dtype, self._bits, terms.ranks)
        seed = derived_seed(self._seed, terms.step, terms.rank)
        stochastic = self._rounding == "stochastic"
        q = np.empty(x.size, INTEGERS[self._bits])
        kernels.lattice_quantize(x.data, x.dtype, self._bits, terms.ranks, inverse, stochastic, seed, q)
        mine = np.empty(x.size, kind.storage) if terms.own else None
        if mine is not None:
            kernels.lattice_dequantize(q, x.dtype, self._bits, scale, mine, kind, False)
        yield Round(q, "sum")
        total = np.empty(x.size, kind.storage)
        unit = scale / terms.ranks if terms.mean else scale
        kernels.lattice_dequantize(q, x.dtype, self._bits, unit, total, kind, False)
        return Reduced(total, mine)

"""``int8``, ``int4``, ``int2``: blocks of elements, each with a scale and packed integers.

A block's scale is its largest magnitude over Q (127 for int8, 7 for int4, 1 for int2); each element becomes the
nearest integer multiple of it, ties to even. A block that holds NaN or infinity decodes to NaN throughout; a
block whose largest magnitude is below 2^-100 (2^-900 for float64) decodes to zeros, which keeps denormal
numbers, and processor modes that flush them, out of the arithmetic.

*   ``symmetric=false``: the integers run from 0 to 2^bits - 1, from the block's smallest to its largest value.
    One level more, and much better where a block's values have one sign or where bits are few: int2 then has
    four levels instead of three.
*   ``rounding=stochastic``: up or down at random, so that the expectation is the value itself (to 2^-17 of a
    step): x * inverse + u is rounded, u uniform between -1/2 and 1/2, a function of ``seed`` and the
    element's index alone (:file:`kernels/include/hybridcomp/random.hpp`).
*   ``hadamard=true``: whole blocks are transformed before they are quantized: random signs, then a Hadamard
    matrix (Suresh et al., "Distributed Mean Estimation with Limited Communication", arXiv:1611.00429, section
    3). Outliers spread over their block. A short last block is not transformed; magnitudes above the largest
    number over ``block`` can overflow to NaN.

Payload: uint32 block, uint32 flags (1: with offsets, 2: transformed), with flag 2 a uint64 seed, then per block
a scale (float32; float64 for float64 input) and with flag 1 an offset, then the integers. With b bits and
h = ceil(m b / 8), field p of byte j of a block of m elements holds element j + p h. A value is q * scale, or
2 * (offset + q * scale).
"""

from __future__ import annotations

from typing import Any, ClassVar

from hybridcomp import arrays
from hybridcomp.arrays import DType
from hybridcomp.codecs import checks
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.kernel_codec import KernelCodec
from hybridcomp.codecs.table import register
from hybridcomp.wire import HEADER_BYTES

_PREFIX_BYTES = 8
_SEED_BYTES = 8
MAX_HADAMARD = 2048
MAX_BLOCK = 65536


class BlockCodec(KernelCodec):
    """Block quantization to ``bits`` bits.

    Args:
        block: elements that share a scale; a multiple of 8 from 8 to 65536.
        rounding: ``nearest`` or ``stochastic``.
        seed: seed of the random numbers, from 0 to 2^63 - 1. Ranks whose errors should average out take different
            ones.
        symmetric: whether blocks have a scale alone, without an offset.
        hadamard: whether to transform blocks first; ``block`` must then be a power of two up to 2048.
    """

    bits: ClassVar[int]
    carries_values = True
    seldom = frozenset({"rounding", "seed", "symmetric", "hadamard"})

    def __init__(
        self,
        block: int = 128,
        rounding: str = "nearest",
        seed: int = 0,
        symmetric: bool = True,
        hadamard: bool = False,
    ) -> None:
        self._block = checks.integer("block", block, 8, MAX_BLOCK, step=8)
        self._rounding = checks.choice("rounding", rounding, ("nearest", "stochastic"))
        self._seed = checks.integer("seed", seed, 0, 2**63 - 1)
        self._symmetric = checks.flag("symmetric", symmetric)
        self._hadamard = checks.flag("hadamard", hadamard)
        if hadamard and (block & (block - 1) or block > MAX_HADAMARD):
            raise ValueError(
                f"block must be a power of two from 8 to {MAX_HADAMARD} with hadamard=true, not {block}"
            )

    @property
    def block(self) -> int:
        """Return the number of elements that share a scale."""
        return self._block

    @property
    def rounding(self) -> str:
        """Return the rounding: ``nearest`` or ``stochastic``."""
        return self._rounding

    @property
    def seed(self) -> int:
        """Return the seed of the random numbers."""
        return self._seed

    @property
    def symmetric(self) -> bool:
        """Tell whether blocks have a scale alone, without an offset."""
        return self._symmetric

    @property
    def hadamard(self) -> bool:
        """Tell whether blocks are transformed first."""
        return self._hadamard

    @property
    def params(self) -> dict[str, Any]:
        return {
            "block": self._block,
            "rounding": self._rounding,
            "seed": self._seed,
            "symmetric": self._symmetric,
            "hadamard": self._hadamard,
        }

    @checks.once_a_step
    def at_step(self, step: int) -> Codec:
        if self._rounding == "nearest" and not self._hadamard:
            return self
        return type(self)(**{**self.params, "seed": checks.stepped(self._seed, step)})

    @property
    def integer_blocks(self) -> tuple[int, int] | None:
        plain = self._rounding == "nearest" and self._symmetric and not self._hadamard
        return (self.bits, self._block) if plain else None

    def bound(self, n: int, dtype: arrays.DTypeLike = DType.FLOAT32) -> int:
        full, rest = divmod(n, self._block)
        scale = (8 if arrays.as_dtype(dtype) is DType.FLOAT64 else 4) * (1 if self._symmetric else 2)
        prefix = _PREFIX_BYTES + (_SEED_BYTES if self._hadamard else 0)
        packed = full * (self._block * self.bits // 8) + -(-rest * self.bits // 8)
        return HEADER_BYTES + prefix + (full + (rest > 0)) * scale + packed


@register
class Int8Codec(BlockCodec):
    """Quantization to 8 bits an element: relative L2 error about 0.6 % on Gaussian data with blocks of 128."""

    name = "int8"
    wire_id = 3
    examples = (
        "int8",
        "int8:block=8",
        "int8:block=65536",
        "int8:block=32:hadamard=true",
    )
    bits = 8


@register
class Int4Codec(BlockCodec):
    """Quantization to 4 bits an element: relative L2 error about 11 % on Gaussian data with blocks of 128."""

    name = "int4"
    wire_id = 4
    examples = (
        "int4",
        "int4:block=24",
        "int4:rounding=stochastic:seed=5",
        "int4:block=64:symmetric=false",
        "int4:block=2048:hadamard=true",
    )
    bits = 4


@register
class Int2Codec(BlockCodec):
    """Quantization to 2 bits an element: for data sent with error feedback, or ``symmetric=false``."""

    name = "int2"
    wire_id = 5
    examples = (
        "int2",
        "int2:block=4096:symmetric=false",
        "int2:block=8:symmetric=false:hadamard=true:rounding=stochastic",
    )
    bits = 2

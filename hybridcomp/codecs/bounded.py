"""``bounded``: an error-bounded codec: no element is ever off by more than a bound.

Error-bounded compression with quantization and fixed-length blocks, as in cuSZp (Huang et al., "cuSZp: An
Ultra-fast GPU Error-bounded Lossy Compression Framework", SC'23) and SZx (Yu et al., HPDC'22). Of each block of
64 elements the integers q = rint(x / step) are kept, as so many bit planes as the largest needs; or, where that
saves two planes or more, the differences of neighbours, after the first integer (smooth data; looked at if the
first 16 elements' differences would save as much). ``step`` is a little less than twice the bound (the power of
two below for fp16 and bf16). The encoder computes what the
decoder will: a block of which any element would be off by more than the bound, or is not finite, or is too large
for its integer (of 22 bits, 30 for float64), is kept bit for bit.

The bound is that of the values in the message's own type, and holds in wider types too. Decoding to a shorter type
adds that type's rounding; ``decode_add`` adds that of the sum. A bound below 2^-100 (2^-900 for float64) keeps
every block that is not zero or constant.

Payload: float64 absolute bound, uint32 64, uint32 zero, a byte per block (its code), the blocks one after another:

===== ===================================================================================================
code   block
===== ===================================================================================================
0-31  so many bit planes of q in two's complement, lowest first, 8 bytes each: bit i belongs to element i
32-63 int32 first q; code - 32 bit planes of each q minus the one before it (the first: 0)
64    the elements as they are
65    one element, which the others are bit for bit equal to
===== ===================================================================================================

The last block's planes count missing elements as equal to the last one.
"""

from __future__ import annotations

import math
from typing import Any

from hybridcomp import arrays
from hybridcomp.arrays import DType
from hybridcomp.codecs.kernel_codec import KernelCodec
from hybridcomp.codecs.table import register
from hybridcomp.wire import HEADER_BYTES

_PREFIX_BYTES = 16
_BLOCK = 64
_DEFAULT_REL = 1e-3


@register
class BoundedCodec(KernelCodec):
    """Error-bounded compression: give one of the two bounds.

    Args:
        rel: bound as a share of the range (largest minus smallest) of the finite values; 0.001 unless ``abs``
            is given.
        abs: bound in the values' own unit.
    """

    name = "bounded"
    wire_id = 11
    carries_values = True
    fixed_size = False

    def __init__(self, rel: float | None = None, abs: float | None = None) -> None:
        if rel is not None and abs is not None:
            raise ValueError(f"give rel or abs, not both: rel={rel!r}, abs={abs!r}")
        if rel is None and abs is None:
            rel = _DEFAULT_REL
        self._rel = None if rel is None else _bound("rel", rel)
        self._abs = None if abs is None else _bound("abs", abs)

    @property
    def rel(self) -> float | None:
        """Bound as a share of the range of the finite values."""
        return self._rel

    @property
    def abs(self) -> float | None:
        """Bound in the values' own unit."""
        return self._abs

    @property
    def params(self) -> dict[str, Any]:
        return {"abs": self._abs} if self._rel is None else {"rel": self._rel}

    def bound(self, n: int, dtype: arrays.DTypeLike = DType.FLOAT32) -> int:
        return HEADER_BYTES + _PREFIX_BYTES + -(-n // _BLOCK) + n * arrays.as_dtype(dtype).itemsize


def _bound(name: str, value: Any) -> float:
    """Return ``value`` as a float; ValueError unless a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, not {value!r}")
    return float(value)

"""``bounded``: an error-bounded codec: no element is ever off by more than a bound.

Error-bounded compression with quantization and fixed-length blocks, as in cuSZp (Huang et al., "cuSZp: An
Ultra-fast GPU Error-bounded Lossy Compression Framework", SC'23) and SZx (Yu et al., HPDC'22). Each block of 64
elements keeps the integers q = rint(x / step), as so many bit planes as the largest needs; or, where that saves
two planes or more, the differences of neighbours, after the first integer (smooth data; looked at if the first 16
elements' differences would save as much). ``step`` is a little less than twice the bound (the power of two below
for fp16 and bf16). The encoder computes what the decoder will: a block with any element that would be off by more
than the bound, or is not finite, or is too large for its integer (of 22 bits, 30 for float64), is kept bit for bit.

The bound is that of the values in the message's own type, and holds in wider types too. Decoding to a shorter type
adds that type's rounding; ``decode_add`` adds that of the sum. A bound below 2^-100 (2^-900 for float64) keeps
every block that is not zero or constant.

In a reduction the errors of several encodings add up (:meth:`.Promise.encodings`). With ``bound=result`` each of them
has its share, so that the bound holds for what the caller gets; with ``bound=message`` each has the whole. The payload
says which bound its message has kept.

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

Two other coders take the same integers one by one, and keep single elements bit for bit, after "Accelerating
Communication in Deep Learning Recommendation Model Training with Dual-Level Adaptive Lossy Compression" (Feng et al.,
SC'24, arXiv:2407.04272). In their payloads the two uint32 are the elements of a row and 1 (``lz``), or 32,768 and 2
(``huffman``); :file:`kernels/codecs/bounded/rows.cpp` and :file:`huffman.hpp` document the bytes that follow.

*   ``coder=lz``: a row of ``vector`` elements, an embedding, that equals one of the last 255 distinct rows is sent as
    one byte; others as integers of as many bits as the row needs.
*   ``coder=huffman``: a canonical Huffman code of up to 12 bits for each 32,768 elements.
"""

from __future__ import annotations

import functools
import math
import sys
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from hybridcomp import arrays
from hybridcomp.arrays import DType
from hybridcomp.codecs import checks
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.kernel_codec import KernelCodec
from hybridcomp.codecs.table import register
from hybridcomp.wire import HEADER_BYTES

_PREFIX_BYTES = 16
_BLOCK = 64
_DEFAULT_REL = 1e-3
CODERS = ("planes", "lz", "huffman")
MOST_VECTOR = 1024
_BOUNDED = ("result", "message")
_DEFAULT_VECTOR = 16
_CHUNK = 32768


@register
class BoundedCodec(KernelCodec):
    """Codec with an error bound: one of ``rel`` and ``abs``.

    Args:
        rel: bound as a share of the range (largest minus smallest) of the finite values; 0.001 unless ``abs``
            is given.
        abs: bound in the values' own unit.
        coder: coder of the integers: ``planes`` of bits in blocks, ``lz`` of rows, or ``huffman``.
        vector: elements of a row of ``lz``, from 1 to 1024; 16 unless given. Only with ``lz``.
        bound: what has the bound: the ``result`` of an operation, or each ``message``. ``rel`` is then a share of the
            largest range of the operation's messages, or of each one's.
    """

    name = "bounded"
    wire_id = 11
    examples = (
        "bounded",
        "bounded:abs=0.01",
        "bounded:rel=1e-6",
        "bounded:coder=lz",
        "bounded:abs=0.3,coder=lz,vector=3",
        "bounded:coder=huffman",
        "bounded:abs=0.3,coder=huffman",
    )
    carries_values = True
    fixed_size = False
    seldom = frozenset({"coder", "bound"})
    bounds = MappingProxyType(
        {
            "abs": "in the values' own unit: bounded:abs=1e-4",
            "rel": "as a share of the values' range: bounded:rel=1e-3",
        }
    )

    def __init__(
        self,
        rel: float | None = None,
        abs: float | None = None,
        coder: str = "planes",
        vector: int | None = None,
        bound: str = _BOUNDED[0],
    ) -> None:
        if rel is not None and abs is not None:
            raise ValueError(f"give rel or abs, not both: rel={rel!r}, abs={abs!r}")
        if rel is None and abs is None:
            rel = _DEFAULT_REL
        self._rel = None if rel is None else checks.number("rel", rel)
        self._abs = None if abs is None else checks.number("abs", abs)
        self._coder = checks.choice("coder", coder, CODERS)
        if vector is not None and coder != "lz":
            raise ValueError(f"vector goes with coder=lz, not with coder={coder}")
        chosen = _DEFAULT_VECTOR if vector is None else vector
        self._vector = checks.integer("vector", chosen, 1, MOST_VECTOR) if coder == "lz" else None
        self._bounded = checks.choice("bound", bound, _BOUNDED)

    @property
    def rel(self) -> float | None:
        """Bound as a share of the range of the finite values."""
        return self._rel

    @property
    def abs(self) -> float | None:
        """Bound in the values' own unit."""
        return self._abs

    @property
    def coder(self) -> str:
        """Return the coder of the integers: ``planes``, ``lz`` or ``huffman``."""
        return self._coder

    @property
    def vector(self) -> int | None:
        """Return the elements of a row of ``lz``; None for the other coders."""
        return self._vector

    @property
    def bounds_result(self) -> bool:
        """Tell whether the bound is that of an operation's result, not of each message (``bound=``)."""
        return self._bounded == _BOUNDED[0]

    def sharing(self, encodings: Fraction) -> Codec:
        return _Share(self, encodings) if self.bounds_result and encodings != 1 else self

    @property
    def on_device(self) -> bool:
        return self._coder == "planes"

    @property
    def params(self) -> dict[str, Any]:
        error = {"abs": self._abs} if self._rel is None else {"rel": self._rel}
        row = {} if self._vector is None else {"vector": self._vector}
        return {**error, "coder": self._coder, **row, "bound": self._bounded}

    def bound(self, n: int, dtype: arrays.DTypeLike = DType.FLOAT32) -> int:
        if self._vector is not None:
            heads = 2 * -(-n // self._vector)
        else:
            heads = 5 * -(-n // _CHUNK) if self._coder == "huffman" else -(-n // _BLOCK)
        return HEADER_BYTES + _PREFIX_BYTES + heads + n * arrays.as_dtype(dtype).itemsize


class _Share(BoundedCodec):
    """``bounded`` for one of several encodings whose errors add up: with its share of the bound, rounded down.

    Args:
        whole: codec of the operation; the headers of messages name it.
        encodings: number of errors that add up, each of one encoding.
    """

    def __init__(self, whole: BoundedCodec, encodings: Fraction) -> None:
        name = "rel" if whole.abs is None else "abs"
        error = Fraction(whole.params[name])
        share = float(min(error / encodings, Fraction(sys.float_info.max)))
        if Fraction(share) * encodings > error:
            share = math.nextafter(share, 0.0)
        share = share or math.nextafter(0.0, 1.0)  # so narrow a bound keeps all values as they are
        super().__init__(**{**whole.params, name: share})
        self._whole = whole
        self._encodings = encodings

    @functools.cached_property
    def spec(self) -> str:
        return self._whole.spec

    def sharing(self, encodings: Fraction) -> Codec:
        return self._whole.sharing(encodings)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Share, (self._whole, self._encodings)

"""``threshold``: the elements of at least a given magnitude; the rest decode to zero.

It sends the elements with ``|x| >= abs``, or with ``|x| >= rel`` times the root mean square of the tensor's
finite elements, and every NaN. Their number depends on the data, so ``bound`` is that of all elements.

The comparison is exact, in the tensor's own type. The mean square is summed in double, in an order that does
not depend on threads: 16 lanes over each block of 65,536 elements, the lanes halved until one is left, the
blocks in turn. Magnitudes below 2^-100 count as zero in it; those of a float64 tensor below 2^-400, and above
2^400 as 2^400.

The payload is that of :mod:`~hybridcomp.codecs.sparse.base`.
"""

from __future__ import annotations

from typing import Any

from hybridcomp import native
from hybridcomp.arrays import Flat
from hybridcomp.codecs import checks
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.sparse.base import SparseCodec
from hybridcomp.codecs.table import register

_DEFAULT_REL = 3.0


@register
class ThresholdCodec(SparseCodec):
    """Codec with a magnitude threshold: one of ``abs`` and ``rel``; without either, ``rel`` is 3.

    Args:
        abs: the least magnitude that is sent; above 0.
        rel: the least magnitude as a multiple of the tensor's root mean square; above 0.
        values: codec of the sent values, as for ``topk``.
    """

    name = "threshold"
    wire_id = 17
    examples = (
        "threshold:abs=0.7",
        "threshold:rel=2.0,values=int4",
    )

    def __init__(
        self, abs: float | None = None, rel: float | None = None, values: str | Codec = "none"
    ) -> None:
        super().__init__(values)
        if abs is not None and rel is not None:
            raise ValueError(f"abs={abs!r} and rel={rel!r}: give only one of them")
        self._abs = None if abs is None else checks.number("abs", abs)
        self._rel = None if abs is not None else checks.number("rel", _DEFAULT_REL if rel is None else rel)

    @property
    def abs(self) -> float | None:
        """Return the least magnitude that is sent, or None."""
        return self._abs

    @property
    def rel(self) -> float | None:
        """Return the least magnitude that is sent over the root mean square, or None."""
        return self._rel

    @property
    def params(self) -> dict[str, Any]:
        return {**self.selection, "values": self._values.spec}

    def most(self, n: int) -> int:
        return n

    @property
    def selection(self) -> dict[str, Any]:
        return {"abs": self._abs} if self._rel is None else {"rel": self._rel}

    def select(self, src: Flat) -> Any:
        return native.kernels().sparse_threshold(src.data, src.dtype, *self._limit)

    @property
    def _limit(self) -> tuple[float | None, bool]:
        """Return the limit, and whether it is relative."""
        return (self._abs, False) if self._rel is None else (self._rel, True)

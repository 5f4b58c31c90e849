"""``topk``: exactly the k elements of largest magnitude; the rest decode to zero.

k = ceil(ratio * n). Among equal magnitudes the lower indices are taken; NaN counts as the largest. The selection
is exact. A sample gives two limits between which the k-th magnitude nearly always lies; one pass over the
tensor takes the elements that reach the lower one; radix selection on the bits of those in between (as in Alabi
et al., "Fast k-Selection Algorithms for Graphics Processing Units", 2012) finds the rest. Where the sample
misled, radix selection goes over the whole tensor: the message is the same.

The payload is that of :mod:`~hybridcomp.codecs.sparse.base`.
"""

from __future__ import annotations

from typing import Any

from hybridcomp import native
from hybridcomp.arrays import Flat
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.sparse.base import RatioCodec
from hybridcomp.codecs.table import register


@register
class TopKCodec(RatioCodec):
    """Codec of the k largest magnitudes.

    Args:
        ratio: share of the elements that is sent; above 0, at most 1.
        values: codec of the sent values: ``none`` (the input's dtype), a cast or a quantizer, with its
            parameters if need be: ``topk:values=(int8:block=64)``.
    """

    name = "topk"
    wire_id = 16
    examples = (
        "topk:ratio=0.01",
        "topk:ratio=0.3,values=bf16",
        "topk:ratio=1.0",
        "topk:ratio=0.05,values=(int8:block=64)",
    )

    def __init__(self, ratio: float = 0.01, values: str | Codec = "none") -> None:
        super().__init__(ratio, values)

    @property
    def params(self) -> dict[str, Any]:
        return {"ratio": self._ratio, "values": self._values.spec}

    def most(self, n: int) -> int:
        return self.k(n)

    def select(self, src: Flat) -> Any:
        return native.kernels().sparse_topk(src.data, src.dtype, self.k(src.size))

"""``none``: the bytes as they are. Carries every dtype."""

from __future__ import annotations

from typing import Any

from hybridcomp import arrays
from hybridcomp.arrays import DType
from hybridcomp.codecs.kernel_codec import KernelCodec
from hybridcomp.codecs.table import register
from hybridcomp.wire import HEADER_BYTES


@register
class NoneCodec(KernelCodec):
    """Codec without compression. Payload: the elements, little-endian."""

    name = "none"
    wire_id = 0
    lossless = True
    carries_values = True

    @property
    def params(self) -> dict[str, Any]:
        return {}

    def bound(self, n: int, dtype: arrays.DTypeLike = DType.FLOAT32) -> int:
        return HEADER_BYTES + n * arrays.as_dtype(dtype).itemsize

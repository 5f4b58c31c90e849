"""``fp16`` and ``bf16``: every element rounded to nearest even in 16 bits."""

from __future__ import annotations

from typing import Any

from hybridcomp import arrays
from hybridcomp.arrays import DType
from hybridcomp.codecs.kernel_codec import KernelCodec
from hybridcomp.codecs.table import register
from hybridcomp.wire import HEADER_BYTES


class _CastCodec(KernelCodec):
    """Base of the codecs that cast elements to another type.

    The payload is the elements, little-endian. float64 is rounded once, not by way of float32.
    """

    carries_values = True

    @property
    def params(self) -> dict[str, Any]:
        return {}

    def bound(self, n: int, dtype: arrays.DTypeLike = DType.FLOAT32) -> int:
        return HEADER_BYTES + 2 * n


@register
class Float16Codec(_CastCodec):
    """IEEE half precision: 11 significant bits. Magnitudes from 65520 up become infinity; NaN stays NaN."""

    name = "fp16"
    wire_id = 1


@register
class BFloat16Codec(_CastCodec):
    """bfloat16: 8 significant bits, the range of float32. NaN stays NaN."""

    name = "bf16"
    wire_id = 2

"""``fp16`` and ``bf16``: every element rounded to nearest even in 16 bits."""

from __future__ import annotations

import functools
import warnings
from typing import Any

from hybridcomp import arrays, native
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
    """IEEE half precision: 11 significant bits. Magnitudes from 65520 up become infinity; NaN stays NaN.

    The first array in host memory whose finite values are seen to become infinite is warned of, once in a process: all
    values are looked at of up to 1024, and one in 32 of more.
    """

    name = "fp16"
    wire_id = 1

    @functools.cached_property
    def encoder(self) -> Any:
        _listen()
        return native.kernels().encoder(self.wire_id, self.params_hash)


@functools.cache
def _listen() -> None:
    """Have the first overflow warned of."""
    native.kernels().listen_for_overflow(_warn)


def _warn() -> None:
    warnings.warn(
        "fp16 has made finite values infinite: its largest number is 65,504; bf16 has float32's range, and int8 and "
        "fp8 scale their blocks",
        RuntimeWarning,
        stacklevel=2,
    )


@register
class BFloat16Codec(_CastCodec):
    """bfloat16: 8 significant bits, the range of float32. NaN stays NaN."""

    name = "bf16"
    wire_id = 2

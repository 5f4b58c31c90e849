"""``sign``: a bit for each element's sign, and each block's mean magnitude.

Scaled signs (Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
arXiv:1901.09847): an element decodes to the mean magnitude of its block with its own sign, zeros too. Made for
gradients with error feedback. The mean is a float32 sum (float64 for float64) in the order that
:file:`kernels/include/hybridcomp/sign.hpp` fixes; magnitudes below 2^-100 (2^-900) count as zero in it. A block
that holds NaN or infinity decodes to NaN throughout.

Payload: uint32 block, uint32 zero, a mean per block (float32; float64 for float64 input), then the signs: bit
i % 8 of byte i / 8 is set where element i is negative.
"""

from __future__ import annotations

from typing import Any

from hybridcomp import arrays
from hybridcomp.arrays import DType
from hybridcomp.codecs import checks
from hybridcomp.codecs.kernel_codec import KernelCodec
from hybridcomp.codecs.table import register
from hybridcomp.wire import HEADER_BYTES

_PREFIX_BYTES = 8


@register
class SignCodec(KernelCodec):
    """Sign compression: 1 bit an element and a scale per block.

    Args:
        block: elements that share a mean; a multiple of 8 from 8 to 65536.
    """

    name = "sign"
    wire_id = 6
    examples = (
        "sign",
        "sign:block=24",
    )
    carries_values = True

    def __init__(self, block: int = 1024) -> None:
        self._block = checks.integer("block", block, 8, 65536, step=8)

    @property
    def block(self) -> int:
        """Return the number of elements that share a mean."""
        return self._block

    @property
    def params(self) -> dict[str, Any]:
        return {"block": self._block}

    def bound(self, n: int, dtype: arrays.DTypeLike = DType.FLOAT32) -> int:
        scale = 8 if arrays.as_dtype(dtype) is DType.FLOAT64 else 4
        return HEADER_BYTES + _PREFIX_BYTES + -(-n // self._block) * scale + (n + 7) // 8

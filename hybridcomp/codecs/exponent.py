"""``exponent``: exact and nearly free: exponents in three or four bits, all other bits as they are.

The data of training are near Gaussian: the exponents of 256 values lie within seven of their largest, but for one in
forty, as ZipCCL (arXiv:2604.27844) and UCCL-Zip (arXiv:2604.17172) measure. A code of such distances needs no
statistics and no search, and comes within a few hundredths of what ``lossless`` reaches.

Floats are cut into blocks of 256, and each block is coded apart from all others. The exponents are stored as
distances below the block's largest, in 3 or 4 bits; the largest code is an escape, whose exponents follow in a list.
Signs and mantissas are stored as they are. A block that would grow is stored whole, and so is a last, shorter block; a
block of zeros takes a byte. Elements that are not floating-point are carried as they are.

Payload: a code for each block, then the blocks (``kernels/include/hybridcomp/exponent.hpp`` has the details).
"""

from __future__ import annotations

from typing import Any

from hybridcomp import arrays
from hybridcomp.arrays import DType
from hybridcomp.codecs.kernel_codec import KernelCodec
from hybridcomp.codecs.table import register
from hybridcomp.wire import HEADER_BYTES

BLOCK = 256  # elements


@register
class ExponentCodec(KernelCodec):
    """Codec of exponents in few bits: exact for every dtype, smaller for floats whose magnitudes are alike."""

    name = "exponent"
    wire_id = 14
    fixed_size = False
    lossless = True

    @property
    def params(self) -> dict[str, Any]:
        return {}

    def bound(self, n: int, dtype: arrays.DTypeLike = DType.FLOAT32) -> int:
        kind = arrays.as_dtype(dtype)
        return HEADER_BYTES + (-(-n // BLOCK) if kind.is_float else 0) + n * kind.itemsize

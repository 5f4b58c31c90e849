"""``exponent``: exact and nearly free: exponents in three or four bits, all other bits as they are.

What training sends is near Gaussian, and there the exponents of 256 values lie within seven of their largest, but for
one in forty: ZipCCL (arXiv:2604.27844) and UCCL-Zip (arXiv:2604.17172) measure it. A code of such distances needs no
statistics and no search, and comes within a few hundredths of what ``lossless`` reaches.

Floats are cut into blocks of 256, and each block is coded apart from all others. The exponents are stored as
distances below the block's largest, in 3 or 4 bits; the largest code is an escape, whose exponents follow in a list.
Signs and mantissas are stored as they are. A block that would grow is stored whole, so is what is less than a block,
and one of zeros takes a byte. Elements that are not floating-point are carried as they are.

Payload: a code for each block, then the blocks (``kernels/include/hybridcomp/exponent.hpp`` says all).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hybridcomp import arrays, native, wire
from hybridcomp.arrays import ByteArray, DType, Flat
from hybridcomp.codecs import checks
from hybridcomp.codecs.kernel_codec import KernelCodec
from hybridcomp.codecs.table import register
from hybridcomp.wire import HEADER_BYTES

BLOCK = 256  # elements


@register
class ExponentCodec(KernelCodec):
    """Exponents in few bits: exact for every dtype, smaller for floats whose magnitudes are alike."""

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

    def make_encoder(self) -> Any:
        return native.kernels().exponent_encoder(self.wire_id, self.params_hash)

    def encode_flat(self, src: Flat, out: ByteArray) -> int:
        if src.dtype.is_float:
            return super().encode_flat(src, out)
        out[HEADER_BYTES : HEADER_BYTES + src.nbytes] = arrays.byte_view(src.data)
        return wire.seal(
            out, self.wire_id, self.params_hash, dtype=src.dtype, count=src.size, payload=src.nbytes
        )

    @classmethod
    def check_payload(cls, msg: ByteArray, header: wire.Header) -> None:
        if header.dtype.is_float:
            super().check_payload(msg, header)
        else:
            checks.payload_bytes(header, header.count * header.dtype.itemsize, cls.name)

    @classmethod
    def decode_flat(
        cls, msg: ByteArray, header: wire.Header, out: np.ndarray[Any, Any], dtype: DType
    ) -> None:
        if header.dtype.is_float:
            super().decode_flat(msg, header, out, dtype)
        else:
            cls.check_payload(msg, header)
            arrays.byte_view(out)[:] = msg[HEADER_BYTES:]

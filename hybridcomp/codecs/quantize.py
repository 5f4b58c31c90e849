"""``int8`` and ``int4``: blocks of elements share a scale.

A block's scale is its largest magnitude over Q (127 for int8, 7 for int4); each element becomes the nearest
integer multiple of it, ties to even. A block that holds NaN or infinity decodes to NaN throughout; a block
whose largest magnitude is below 2^-100 (2^-900 for float64) decodes to zeros, which keeps denormal numbers,
and processor modes that flush them, out of the arithmetic.

Payload: uint32 block, uint32 zero, a scale per block (float32; float64 for float64 input), then the integers:
one byte each, or for int4 two in a byte: with h = ceil(m / 2), byte j of a block of m elements holds element
j in its low half and element j + h in its high half.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from hybridcomp import arrays, native, wire
from hybridcomp.arrays import ByteArray, DType, Flat
from hybridcomp.codecs import checks
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.registry import register
from hybridcomp.wire import HEADER_BYTES

_PREFIX_BYTES = 8
MAX_BLOCK = 65536


class _BlockCodec(Codec):
    """Block quantization to ``bits`` bits.

    Args:
        block: elements that share a scale; a multiple of 8 from 8 to 65536.
    """

    bits: ClassVar[int]

    def __init__(self, block: int = 128) -> None:
        self._block = checks.integer("block", block, 8, MAX_BLOCK, step=8)

    @property
    def block(self) -> int:
        """Elements that share a scale."""
        return self._block

    @property
    def params(self) -> dict[str, Any]:
        return {"block": self._block}

    def bound(self, n: int, dtype: arrays.DTypeLike = DType.FLOAT32) -> int:
        full, rest = divmod(n, self._block)
        scale = 8 if arrays.as_dtype(dtype) is DType.FLOAT64 else 4
        packed = n if self.bits == 8 else full * (self._block // 2) + (rest + 1) // 2
        return HEADER_BYTES + _PREFIX_BYTES + (full + (rest > 0)) * scale + packed

    def encode_flat(self, src: Flat, out: ByteArray) -> int:
        size: int = native.kernels().quantize_encode(
            src.data, src.dtype, self.bits, self._block, self.wire_id, self.params_hash, out
        )
        return size

    @classmethod
    def check_payload(cls, msg: ByteArray, header: wire.Header) -> None:
        checks.floating(header, cls.name)
        code = native.kernels().quantize_check(msg[HEADER_BYTES:], header.count, header.dtype, cls.bits)
        checks.status(code, cls.name)

    @classmethod
    def decode_flat(
        cls, msg: ByteArray, header: wire.Header, out: np.ndarray[Any, Any], dtype: DType
    ) -> None:
        checks.floating(header, cls.name)
        code = native.kernels().quantize_decode(
            msg[HEADER_BYTES:], header.count, header.dtype, cls.bits, out, dtype, False
        )
        checks.status(code, cls.name)

    @classmethod
    def decode_add_flat(cls, msg: ByteArray, header: wire.Header, acc: np.ndarray[Any, Any]) -> None:
        checks.floating(header, cls.name)
        code = native.kernels().quantize_decode(
            msg[HEADER_BYTES:], header.count, header.dtype, cls.bits, acc, header.dtype.accumulator, True
        )
        checks.status(code, cls.name)


@register
class Int8Codec(_BlockCodec):
    """8 bits an element: relative L2 error about 0.6 % on Gaussian data with blocks of 128."""

    name = "int8"
    wire_id = 3
    bits = 8


@register
class Int4Codec(_BlockCodec):
    """4 bits an element: relative L2 error about 11 % on Gaussian data with blocks of 128."""

    name = "int4"
    wire_id = 4
    bits = 4

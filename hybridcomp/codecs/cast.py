"""``fp16`` and ``bf16``: every element rounded to nearest even in 16 bits."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from hybridcomp import arrays, native, wire
from hybridcomp.arrays import ByteArray, DType, Flat
from hybridcomp.codecs import checks
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.registry import register
from hybridcomp.wire import HEADER_BYTES


class _CastCodec(Codec):
    """Payload: the elements in ``target``, little-endian. float64 is rounded once, not by way of float32."""

    target: ClassVar[DType]
    carries_values = True

    @property
    def params(self) -> dict[str, Any]:
        return {}

    def bound(self, n: int, dtype: arrays.DTypeLike = DType.FLOAT32) -> int:
        return HEADER_BYTES + 2 * n

    def encode_flat(self, src: Flat, out: ByteArray) -> int:
        size: int = native.kernels().cast_encode(
            src.data, src.dtype, self.target, self.wire_id, self.params_hash, out
        )
        return size

    @classmethod
    def check_payload(cls, msg: ByteArray, header: wire.Header) -> None:
        checks.floating(header, cls.name)
        checks.payload_bytes(header, 2 * header.count, cls.name)

    @classmethod
    def decode_flat(
        cls, msg: ByteArray, header: wire.Header, out: np.ndarray[Any, Any], dtype: DType
    ) -> None:
        cls.check_payload(msg, header)
        native.kernels().convert(msg[HEADER_BYTES:], cls.target, out, dtype, False)

    @classmethod
    def decode_add_flat(cls, msg: ByteArray, header: wire.Header, acc: np.ndarray[Any, Any]) -> None:
        cls.check_payload(msg, header)
        native.kernels().convert(msg[HEADER_BYTES:], cls.target, acc, header.dtype.accumulator, True)


@register
class Float16Codec(_CastCodec):
    """IEEE half precision: 11 significant bits. Magnitudes from 65520 up become infinity; NaN stays NaN."""

    name = "fp16"
    wire_id = 1
    target = DType.FLOAT16


@register
class BFloat16Codec(_CastCodec):
    """bfloat16: 8 significant bits, the range of float32. NaN stays NaN."""

    name = "bf16"
    wire_id = 2
    target = DType.BFLOAT16

"""``none``: the bytes as they are. Carries every dtype."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from hybridcomp import arrays, native, wire
from hybridcomp.arrays import ByteArray, DType, Flat
from hybridcomp.codecs import checks
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.table import register
from hybridcomp.wire import HEADER_BYTES


@register
class NoneCodec(Codec):
    """No compression. Payload: the elements, little-endian."""

    name = "none"
    wire_id = 0
    lossless = True
    carries_values = True

    @property
    def params(self) -> dict[str, Any]:
        return {}

    @functools.cached_property
    def encoder(self) -> Any:
        return native.kernels().cast_encoder(0, self.wire_id, self.params_hash)

    def bound(self, n: int, dtype: arrays.DTypeLike = DType.FLOAT32) -> int:
        return HEADER_BYTES + n * arrays.as_dtype(dtype).itemsize

    def encode_flat(self, src: Flat, out: ByteArray) -> int:
        if src.dtype.is_float:  # copies and checksums in one pass
            size: int = self.encoder.encode(src.data, src.dtype, out)
            return size
        out[HEADER_BYTES : HEADER_BYTES + src.nbytes] = arrays.byte_view(src.data)
        return wire.seal(
            out, self.wire_id, self.params_hash, dtype=src.dtype, count=src.size, payload=src.nbytes
        )

    @classmethod
    def check_payload(cls, msg: ByteArray, header: wire.Header) -> None:
        checks.payload_bytes(header, header.count * header.dtype.itemsize, cls.name)

    @classmethod
    def decode_flat(
        cls, msg: ByteArray, header: wire.Header, out: np.ndarray[Any, Any], dtype: DType
    ) -> None:
        cls.check_payload(msg, header)
        if dtype is header.dtype:
            arrays.byte_view(out)[:] = msg[HEADER_BYTES:]
        else:
            native.kernels().convert(msg[HEADER_BYTES:], header.dtype, out, dtype, False)

    @classmethod
    def decode_add_flat(cls, msg: ByteArray, header: wire.Header, acc: np.ndarray[Any, Any]) -> None:
        cls.check_payload(msg, header)
        checks.floating(header, "added")
        native.kernels().convert(msg[HEADER_BYTES:], header.dtype, acc, header.dtype.accumulator, True)

"""``topk``: exactly the k elements of largest magnitude; the rest decode to zero.

k = ceil(ratio * n). Of equal magnitudes the lower indices are taken; NaN counts as
the largest. The selection is exact: radix selection on the magnitudes' bits (as in Alabi et al., "Fast
k-Selection Algorithms for Graphics Processing Units", 2012), a few passes over the data and no sorting.

Payload: uint64 k, uint64 bytes of the index section, the index section, then the k values, ascending by
index, as a message of their own (the ``values`` codec's). The index section is a uint32 count per block of
65,536 elements, then per block the indices within it: uint16 each, or a bitmap where that is smaller.
"""

from __future__ import annotations

import struct
from fractions import Fraction
from typing import Any

import numpy as np

from hybridcomp import arrays, native, wire
from hybridcomp.arrays import ByteArray, DType, Flat
from hybridcomp.codecs import checks
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.registry import codec_for, get_codec, register
from hybridcomp.errors import WireError
from hybridcomp.wire import HEADER_BYTES

_PREFIX = struct.Struct("<QQ")
_VALUE_CODECS = ("none", "fp16", "bf16", "int8", "int4")


@register
class TopKCodec(Codec):
    """Magnitude top-k.

    Args:
        ratio: share of the elements that is sent; above 0, at most 1.
        values: codec of the sent values: ``none`` (the input's dtype), ``fp16``, ``bf16``, ``int8`` or
            ``int4``, with its parameters if need be: ``topk:values=(int8:block=64)``.
    """

    name = "topk"
    wire_id = 16
    fixed_size = False

    def __init__(self, ratio: float = 0.01, values: str | Codec = "none") -> None:
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
            raise ValueError(f"ratio must be a number above 0 and at most 1, not {ratio!r}")
        self._ratio = float(ratio)
        # In whole numbers of the ratio as written: 0.07 * 100 is 7.000000000000001 in floating point.
        self._share = Fraction(str(self._ratio)).as_integer_ratio()
        self._values = get_codec(values)
        if self._values.name not in _VALUE_CODECS:
            raise ValueError(f"values must be one of {', '.join(_VALUE_CODECS)}, not {self._values.name!r}")

    @property
    def ratio_kept(self) -> float:
        """Share of the elements that is sent."""
        return self._ratio

    @property
    def values(self) -> Codec:
        """Codec of the sent values."""
        return self._values

    @property
    def params(self) -> dict[str, Any]:
        return {"ratio": self._ratio, "values": self._values.spec}

    def k(self, n: int) -> int:
        """How many of ``n`` elements are sent."""
        if n == 0:
            return 0
        numerator, denominator = self._share
        return -(-n * numerator // denominator)

    def bound(self, n: int, dtype: arrays.DTypeLike = DType.FLOAT32) -> int:
        k = self.k(n)
        indices = native.kernels().topk_index_bound(n, k)
        return HEADER_BYTES + _PREFIX.size + int(indices) + self._values.bound(k, dtype)

    def encode_flat(self, src: Flat, out: ByteArray) -> int:
        k = self.k(src.size)
        values = np.empty(k, src.dtype.storage)
        start = HEADER_BYTES + _PREFIX.size
        index_bytes = native.kernels().topk_select(src.data, src.dtype, k, out[start:], values)
        _PREFIX.pack_into(out.data, HEADER_BYTES, k, index_bytes)
        end = start + index_bytes
        end += self._values.encode_flat(Flat(values, src.dtype, values.shape, True, False), out[end:])
        return wire.seal(
            out, self.wire_id, self.params_hash, dtype=src.dtype, count=src.size, payload=end - HEADER_BYTES
        )

    @classmethod
    def check_payload(cls, msg: ByteArray, header: wire.Header) -> None:
        _open(msg, header)

    @classmethod
    def decode_flat(
        cls, msg: ByteArray, header: wire.Header, out: np.ndarray[Any, Any], dtype: DType
    ) -> None:
        _scatter(msg, header, out, dtype, add=False)

    @classmethod
    def decode_add_flat(cls, msg: ByteArray, header: wire.Header, acc: np.ndarray[Any, Any]) -> None:
        _scatter(msg, header, acc, header.dtype.accumulator, add=True)


def _open(msg: ByteArray, header: wire.Header) -> tuple[ByteArray, ByteArray, wire.Header]:
    """Check and split a message: its index section, the values' message and that one's header."""
    checks.floating(header, TopKCodec.name)
    if header.payload < _PREFIX.size:
        raise WireError(f"malformed topk payload: {header.payload} bytes are too few")
    k, index_bytes = _PREFIX.unpack_from(msg.data, HEADER_BYTES)
    start = HEADER_BYTES + _PREFIX.size
    if index_bytes > msg.size - start or k > header.count:
        raise WireError(
            f"malformed topk payload: {k} of {header.count} elements in {index_bytes} bytes of indices"
        )
    if index_bytes < 4 * -(-header.count // 65536):
        raise WireError(f"malformed topk payload: {index_bytes} bytes of indices for {header.count} elements")
    values, inner = wire.open_message(msg[start + index_bytes :])
    cls = codec_for(inner)
    if cls.name not in _VALUE_CODECS or inner.count != k or inner.dtype is not header.dtype:
        raise WireError(
            f"malformed topk payload: {inner.count} {inner.dtype.label} values by codec {cls.name!r} "
            f"for {k} {header.dtype.label} elements"
        )
    if values.size != msg.size - start - index_bytes:
        raise WireError("malformed topk payload: bytes after the values")
    cls.check_payload(values, inner)
    return msg[start : start + index_bytes], values, inner


def _scatter(
    msg: ByteArray, header: wire.Header, out: np.ndarray[Any, Any], dtype: DType, *, add: bool
) -> None:
    indices, message, inner = _open(msg, header)
    values = np.empty(inner.count, dtype.storage)
    codec_for(inner).decode_flat(message, inner, values, dtype)
    code = native.kernels().topk_scatter(indices, header.count, inner.count, values, out, dtype, add)
    checks.status(code, TopKCodec.name)

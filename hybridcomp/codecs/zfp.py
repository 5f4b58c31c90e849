"""``zfp``: zfp's own fixed-rate stream of one dimension, bit for bit.

Lindstrom, "Fixed-Rate Compressed Floating-Point Arrays" (2014), and zfp's documentation of its algorithm. Four
values share an exponent; their integers are decorrelated by a lifting transform, written in base -2 and coded
bit plane by bit plane until the block's bits are full. The ``zfpy`` library decodes the streams, and its own
streams decode here: see :meth:`ZfpCodec.stream` and :meth:`ZfpCodec.from_stream`.

Two rules are ours. A block that holds NaN or infinity, for which zfp has no rule, decodes to infinity, in zfp
too. A block whose values are all below 2^-98 (2^-962 for float64) overflows the scale that zfp computes and makes
it write other numbers; here its integers are exact. The decoder gives zfp's values throughout.

float16 and bfloat16 are coded as float32, float64 by zfp's stream of doubles.

Payload: uint32 bits of a block, uint32 zero, then the stream without zfp's header: a block's bits follow those of
the block before, least significant first, in 64-bit words, the last filled with zeros. A last block of fewer than
four values is filled as zfp does.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hybridcomp import arrays, wire
from hybridcomp.arrays import ByteArray, DType
from hybridcomp.codecs.kernel_codec import KernelCodec
from hybridcomp.codecs.table import register
from hybridcomp.wire import HEADER_BYTES

_PREFIX_BYTES = 8
_BLOCK = 4
_LEAST_BITS = {DType.FLOAT64: 14}  # least bits of a block, so that infinity fits; 11 for the other types
_MOST_BITS = {DType.FLOAT64: 256}  # 128 for the other types
_LEAST, _MOST = 2.75, 64


@register
class ZfpCodec(KernelCodec):
    """Codec of fixed-rate zfp streams.

    Args:
        rate: bits a value, 2.75 to 64, rounded to a quarter as zfp does. At most 32 unless the values are
            float64, which need 3.5.
    """

    name = "zfp"
    wire_id = 10
    examples = (
        "zfp:rate=8",
        "zfp:rate=7.25",
        "zfp:rate=24",
    )
    carries_values = True

    def __init__(self, rate: float = 8) -> None:
        number = isinstance(rate, int | float) and not isinstance(rate, bool)
        if not number or not _LEAST <= rate <= _MOST:  # NaN fails this, too
            raise ValueError(f"rate must be a number of bits from {_LEAST} to {_MOST}, not {rate!r}")
        self._bits = math.floor(_BLOCK * rate + 0.5)

    @property
    def rate(self) -> int | float:
        """Return the bits per value, a multiple of a quarter."""
        return self._bits / _BLOCK if self._bits % _BLOCK else self._bits // _BLOCK

    @property
    def params(self) -> dict[str, Any]:
        return {"rate": self.rate}

    def can_carry(self, dtype: DType, shape: tuple[int, ...]) -> str | None:
        reason = super().can_carry(dtype, shape)
        least, most = _LEAST_BITS.get(dtype, 11), _MOST_BITS.get(dtype, 128)
        if reason is None and not least <= self._bits <= most:
            limits = f"from {least / _BLOCK:g} to {most // _BLOCK}"
            reason = f"rate {self.rate} is not one of {dtype.label}'s, {limits}"
        return reason

    def bound(self, n: int, dtype: arrays.DTypeLike = DType.FLOAT32) -> int:
        return HEADER_BYTES + _PREFIX_BYTES + _stream_bytes(n, self._bits)

    # -- zfp's own streams -------------------------------------------------------------------------------

    def stream(self, msg: Any) -> ByteArray:
        """Return the zfp stream in a message of this codec: a view of its bytes.

        ``zfpy._decompress(bytes, zfpy.type_float, (n,), rate=codec.rate)`` decodes it (``type_double`` for a
        float64 message; it needs at least one element).

        Raises:
            WireError: the message is damaged, or of another codec or rate.
        """
        raw, header = wire.open_message(msg)
        self._check_mine(header)
        self.check_payload(raw, header)
        return raw[HEADER_BYTES + _PREFIX_BYTES :]

    def from_stream(self, stream: Any, n: int, dtype: arrays.DTypeLike = DType.FLOAT32) -> ByteArray:
        """Make the message of a stream that zfp wrote: ``zfpy.compress_numpy(x, rate=codec.rate, write_header=False)``.

        Args:
            stream: the stream: bytes, or a 1-D uint8 array.
            n: number of elements, all of one dimension.
            dtype: float64 for a stream of doubles; else the floating-point type that the message decodes to.

        Raises:
            ValueError: this codec cannot carry that dtype, or the stream is not as long as ``n`` elements make it.
        """
        kind = arrays.as_dtype(dtype)
        reason = self.can_carry(kind, (n,))
        if reason is not None:
            raise ValueError(f"codec {self.spec!r} cannot carry such a stream: {reason}")
        data = np.frombuffer(stream, np.uint8)
        if n < 0 or data.size != _stream_bytes(n, self._bits):
            raise ValueError(f"stream has {data.size} bytes, not the {_stream_bytes(n, self._bits)} of n={n}")
        out = np.empty(self.bound(n, kind), np.uint8)
        prefix = out[HEADER_BYTES : HEADER_BYTES + _PREFIX_BYTES]
        prefix[:] = np.array([self._bits, 0], "<u4").view(np.uint8)
        out[HEADER_BYTES + _PREFIX_BYTES :] = data
        wire.seal(out, self.wire_id, self.params_hash, dtype=kind, count=n, payload=_PREFIX_BYTES + data.size)
        return out


def _stream_bytes(n: int, bits: int) -> int:
    blocks = -(-n // _BLOCK)
    return -(-blocks * bits // 64) * 8

"""``example.ternary``: -s, 0 or s for each value, and one scale s for each block: 2 bits a value.

Values below half a block's mean magnitude become 0, and s is the mean magnitude of the others, as in ternary weight
networks (arXiv:1605.04711, with another threshold). What is not finite decodes to NaN.

Payload: the values of a block, uint32; the scales, float32, all little-endian; then the codes of four values in a
byte, the first in its lowest bits: 0 is 0, 1 is s, 2 is -s, 3 is NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hybridcomp.codecs import NumpyCodec

Array = npt.NDArray[Any]
_SHIFTS = np.arange(0, 8, 2, dtype=np.uint8)
_HUGE = float(np.finfo(np.float32).max)


class TernaryCodec(NumpyCodec):
    """Codec of two bits a value.

    Args:
        block: values of a block; from 8 to 65536.
    """

    name = "example.ternary"
    wire_id = 128  # noted in hybridcomp/codecs/table.py
    speed = (0.4, 0.9, 0.5, 30, 0.07)  # for the cost model
    examples = ("example.ternary", "example.ternary:block=24")  # which the shared checks take

    def __init__(self, block: int = 256) -> None:
        if not isinstance(block, int) or isinstance(block, bool) or not 8 <= block <= 65536:
            raise ValueError(f"block must be an integer from 8 to 65536, not {block!r}")
        self._block = block

    @property
    def block(self) -> int:
        """Return the values of a block."""
        return self._block

    @property
    def params(self) -> dict[str, Any]:
        return {"block": self._block}

    def payload_bytes(self, n: int, dtype: Any) -> int:
        return 4 + 4 * -(-n // self._block) + -(-n // 4)

    def pack(self, values: Array) -> Array:
        blocks = -(-values.size // self._block)
        finite = np.isfinite(values)
        sizes = np.zeros(blocks * self._block)  # float64: no sum of these overflows
        sizes[: values.size] = np.where(finite, np.minimum(np.abs(values), _HUGE), 0)
        sizes = sizes.reshape(blocks, self._block)
        kept = (sizes > sizes.mean(axis=1, keepdims=True) / 2) & (sizes > 0)
        scales = (sizes.sum(axis=1, where=kept) / np.maximum(kept.sum(axis=1), 1)).astype("<f4")
        codes = np.zeros(-(-values.size // 4) * 4, np.uint8)
        signs = np.where(values < 0, 2, 1)
        codes[: values.size] = np.where(finite, np.where(kept.reshape(-1)[: values.size], signs, 0), 3)
        packed = np.bitwise_or.reduce(codes.reshape(-1, 4) << _SHIFTS, axis=1)
        head = np.array([self._block], "<u4").view(np.uint8)
        return np.concatenate([head, scales.view(np.uint8), packed])

    @classmethod
    def check(cls, payload: Array, n: int, dtype: Any) -> str | None:
        if payload.size < 4:
            return f"{payload.size} bytes"
        block = int(payload[:4].view("<u4")[0])
        if not 8 <= block <= 65536:
            return f"blocks of {block} values"
        wanted = cls(block).payload_bytes(n, dtype)
        return None if payload.size == wanted else f"{payload.size} bytes where {n} values take {wanted}"

    @classmethod
    def unpack(cls, payload: Array, n: int, dtype: Any) -> Array:
        block = int(payload[:4].view("<u4")[0])
        blocks = -(-n // block)
        scales = np.repeat(payload[4 : 4 + 4 * blocks].copy().view("<f4"), block)[:n]
        codes = ((payload[4 + 4 * blocks :, None] >> _SHIFTS) & 3).reshape(-1)[:n]
        return np.choose(codes, [np.zeros_like(scales), scales, -scales, np.full_like(scales, np.nan)])

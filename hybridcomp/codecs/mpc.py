"""``mpc``: exact, and fast: differences, bit transposition, and no zeros (LNVs | BIT | LNV1s | ZE).

Yang, Mukka, Hesaaraki, Burtscher, "MPC: A Massively Parallel Compression Algorithm for Scientific Data", IEEE
Cluster 2015. It shrinks smooth data, and leaves noise as it is: random mantissas and signs have no zeros to
drop.

Elements are words of 2, 4 or 8 bytes (complex ones two; of 1-byte types four make one word), and 1,024 words
a chunk, coded apart from all others. All arithmetic is on unsigned integers, modulo the words' size:

1. LNVs: from each word the one ``lag`` places back is subtracted; before the chunk there are zeros. A last
   chunk is filled up with zeros.
2. BIT: a lane is one bit of each word of a tile: of 32 consecutive words, or of 64 words of 8 bytes; its bit i
   is from word i. Rows of lanes, one for each tile of the chunk, go from the highest bit to the lowest.
3. LNV1s: from each lane that of the bit above is subtracted, row by row; the first row stays. (The paper's
   order is tile by tile, with the first lane's difference taken to the tile before. Row by row, a tile whose
   differences are positive has a first lane of zero, and the tiles are independent.)
4. ZE: a bitmap of the lanes that are not zero, in that order, the lowest bit first; then those lanes.

A chunk that would not become smaller is stored as it is, which its size tells.

Payload: uint32 lag, uint32 zero, a uint16 for each chunk: its bytes, the chunks, and the bytes that are less
than a word (of 1-byte types).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hybridcomp import arrays, native, wire
from hybridcomp.arrays import ByteArray, DType, Flat
from hybridcomp.codecs import checks
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.kernel_codec import decode_floats
from hybridcomp.codecs.table import register
from hybridcomp.wire import HEADER_BYTES

MAX_LAG = 32


@register
class MPCCodec(Codec):
    """MPC: exact for every dtype.

    Args:
        lag: how many words back the predicting word is, from 1 to 32: as many as repeat in turn.
    """

    name = "mpc"
    wire_id = 13
    fixed_size = False
    lossless = True

    def __init__(self, lag: int = 6) -> None:
        self._lag = checks.integer("lag", lag, 1, MAX_LAG)

    @property
    def lag(self) -> int:
        """Return how many words back the predicting word is."""
        return self._lag

    @property
    def params(self) -> dict[str, Any]:
        return {"lag": self._lag}

    def bound(self, n: int, dtype: arrays.DTypeLike = DType.FLOAT32) -> int:
        kind = arrays.as_dtype(dtype)
        return HEADER_BYTES + int(native.kernels().mpc_bound(n * kind.itemsize, word_bytes(kind)))

    def encode_flat(self, src: Flat, out: ByteArray) -> int:
        size: int = native.kernels().mpc_encode(
            src.data,
            word_bytes(src.dtype),
            self._lag,
            self.wire_id,
            src.dtype,
            src.size,
            self.params_hash,
            out,
        )
        return size

    @classmethod
    def check_payload(cls, msg: ByteArray, header: wire.Header) -> None:
        nbytes = header.count * header.dtype.itemsize
        checks.status(
            native.kernels().mpc_check(msg[HEADER_BYTES:], nbytes, word_bytes(header.dtype)), cls.name
        )

    @classmethod
    def decode_flat(
        cls, msg: ByteArray, header: wire.Header, out: np.ndarray[Any, Any], dtype: DType
    ) -> None:
        if not header.dtype.is_float:
            checks.status(native.kernels().mpc_decode(msg[HEADER_BYTES:], word_bytes(dtype), out), cls.name)
            return
        checks.status(decode_floats(cls, msg, header, out, dtype, False), cls.name)

    @classmethod
    def decode_add_flat(cls, msg: ByteArray, header: wire.Header, acc: np.ndarray[Any, Any]) -> None:
        checks.floating(header, "added")
        checks.status(decode_floats(cls, msg, header, acc, header.dtype.accumulator, True), cls.name)


def word_bytes(dtype: DType) -> int:
    """Return the number of bytes of a word."""
    return 4 if dtype.itemsize == 1 else dtype.component_bytes

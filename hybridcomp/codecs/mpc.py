"""``mpc``: exact, and fast: differences, bit transposition, and no zeros (LNVs | BIT | LNV1s | ZE).

Yang, Mukka, Hesaaraki, Burtscher, "MPC: A Massively Parallel Compression Algorithm for Scientific Data", IEEE
Cluster 2015. It shrinks smooth data, and leaves noise as it is: random mantissas and signs have no zeros to
drop.

Elements are words of 2, 4 or 8 bytes (complex ones two; of 1-byte types four make one word), and 1,024 words
make a chunk, coded apart from all others. All arithmetic is on unsigned integers, modulo the words' size:

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

from hybridcomp import arrays
from hybridcomp.arrays import DType
from hybridcomp.codecs import checks
from hybridcomp.codecs.kernel_codec import KernelCodec
from hybridcomp.codecs.table import register

MAX_LAG = 32


@register
class MPCCodec(KernelCodec):
    """MPC: exact for every dtype.

    Args:
        lag: distance to the predicting word, in words, from 1 to 32: as many as repeat in turn.
    """

    name = "mpc"
    wire_id = 13
    examples = (
        "mpc",
        "mpc:lag=1",
    )
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
        return int(self.encoder.bound(n, arrays.as_dtype(dtype)))


def word_bytes(dtype: DType) -> int:
    """Return the number of bytes of a word."""
    return 4 if dtype.itemsize == 1 else dtype.component_bytes

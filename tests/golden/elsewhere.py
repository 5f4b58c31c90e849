"""Compare two machines' kernels: ``python -m tests.golden.elsewhere write FILE`` on one, ``check FILE`` on the other.

The golden messages are short and of plain numbers. These are longer, of ordinary numbers and of any bits at all
(denormals, infinities, every NaN); a checksum is kept of each, and of everything that a codec makes.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np

import hybridcomp as hc
from hybridcomp.arrays import DType, Flat
from hybridcomp.testing import message as message_of
from tests.codecs.common import SPECS

DTYPES = (DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16)
COUNTS = (1, 129, 4099)
KINDS = ("ordinary", "finite", "anything")


def values(kind: str, n: int, dtype: DType) -> np.ndarray:
    """Make the same bits on every machine: of integers, without its library of mathematics."""
    rng = np.random.default_rng(n)
    if kind == "ordinary":  # a sum of uniform numbers, exact in float64
        exact = (rng.integers(-(2**15), 2**15, (4, n)).sum(axis=0) / 2**15).astype(np.float64)
        if dtype is DType.BFLOAT16:
            return (exact.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return exact.astype(dtype.storage)
    word = np.dtype(f"u{dtype.itemsize}")
    bits = rng.integers(0, np.iinfo(word).max, n, word, endpoint=True)
    if kind == "finite":
        exponent = {2: 0x7C00, 4: 0x7F800000, 8: 0x7FF0 << 48}[dtype.itemsize]
        if dtype is DType.BFLOAT16:
            exponent = 0x7F80
        bits[(bits & word.type(exponent)) == exponent] = 0
    return bits.view(dtype.storage)


def plain(x: np.ndarray) -> bytes:
    """Return the bytes of numbers; which NaN does not matter once decoded."""
    x[np.isnan(x)] = np.nan
    return x.tobytes()


def made(spec: str, data: np.ndarray, dtype: DType) -> Iterator[bytes]:
    """Yield all that a codec makes of flat storage: the message, what it decodes to, sums, and the message of a sum."""
    codec = hc.get_codec(spec)
    message = message_of(spec, data, dtype)
    yield message
    for target in (np.float64, np.float32, np.float16):
        out = np.empty(data.size, target)
        hc.decode(message, out=out)
        yield plain(out)
    total = np.arange(data.size, dtype=dtype.accumulator.storage)
    hc.decode_add(message, total)
    yield plain(total)
    out = np.empty(codec.bound(data.size, dtype), np.uint8)
    own = Flat(data, dtype, data.shape, True, False)
    size = codec.sum_encode(own, [np.frombuffer(message, np.uint8)], 3, dtype, out)
    yield out[:size].tobytes()


def main(what: str, file: str) -> int:
    """Write the checksums, or name the codecs whose are others."""
    found = {}
    for spec, dtype, kind, n in product(SPECS, DTYPES, KINDS, COUNTS):
        with np.errstate(all="ignore"):
            found[f"{spec} {dtype.label} {kind} {n}"] = [
                zlib.crc32(one) for one in made(spec, values(kind, n, dtype), dtype)
            ]
    if what == "write":
        Path(file).write_text(json.dumps(found))
        return 0
    written = json.loads(Path(file).read_text())
    differ = [
        f"{k} {[i for i in range(6) if written[k][i] != found[k][i]]}"
        for k in found
        if found[k] != written[k]
    ]
    print(*differ, sep="\n")
    print(f"{len(found)} cases of {len(SPECS)} codecs: {len(differ)} differ")
    return bool(differ)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""The least time of each operation on a link, by codec: the table of docs/performance.md."""

from __future__ import annotations

import numpy as np

import hybridcomp as hc

CODECS = (
    "none",
    "bf16",
    "int8",
    "fp8:e4m3",
    "int4",
    "mxfp4",
    "int2",
    "sign",
    "topk:ratio=0.01",
    "threshold:abs=2.5758",
)
RANKS, SIZE, RATE = 4, 64 << 20, 1e9  # one rank a host; bytes; bits per second
_SAMPLE = 1 << 20


def bits_per_value(spec: str) -> float:
    """Return the bits that a codec takes for a value of Gaussian float32, by encoding a sample."""
    x = np.random.default_rng(0).standard_normal(_SAMPLE, np.float32)
    return hc.get_codec(spec).encode(x).size * 8 / _SAMPLE


def seconds(factor: float, bits: float) -> float:
    """Return the seconds in which the busiest link carries ``factor`` times the size, at ``bits`` of 32 a value."""
    return factor * SIZE * bits / 32 * 8 / RATE


def codec_seconds(nbytes: float, ranks: int, encode: float, decode: float, decode_add: float) -> float:
    """Return the seconds in which a rank's core encodes and decodes for an all-reduce that is encoded once.

    Args:
        nbytes: bytes of a rank's array.
        ranks: number of ranks, one a host.
        encode, decode, decode_add: uncompressed bytes per second.
    """
    reduced = nbytes / encode + nbytes * (ranks - 1) / ranks / decode_add
    return reduced + nbytes / ranks / encode + nbytes / decode


def table() -> list[str]:
    """Return the table as lines of Markdown, in milliseconds."""
    p = RANKS
    factors = (2 * (p - 1) / p, (p - 1) / p, 1.0, 2.0)
    lines = [
        "| codec | bits per value | all-reduce | reduce-scatter, all-gather, all-to-all "
        "| sendrecv, any broadcast at best | broadcast by a tree |",
        "|---|---|---|---|---|---|",
    ]
    for spec in CODECS:
        bits = bits_per_value(spec)
        times = " | ".join(f"{seconds(factor, bits) * 1e3:.1f}" for factor in factors)
        lines.append(f"| `{spec}` | {bits:.2f} | {times} |")
    return lines

"""The random start of PowerSGD's power iteration: the same bits on every machine."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float32]

DEVIATION = math.sqrt(4 * (65536.0**2 - 1) / 12)  # deviation of the sum of four uniform 16-bit numbers
_STEP = np.uint64(0x9E3779B97F4A7C15)


def initial_q(cols: int, rank: int, seed: int) -> Matrix:
    """Draw a random start: float32 of (cols, rank), mean 0, variance 1, the same on every machine.

    Each element is the sum of four uniform 16-bit numbers, which is near enough to Gaussian and exact; they
    come from the splitmix64 hash of its index (Steele, Lea, Flood: "Fast splittable pseudorandom number
    generators", 2014) offset by the seed.
    """
    with np.errstate(over="ignore"):
        start_at = np.uint64(initial_state(seed))
        bits = _splitmix64(start_at + (np.arange(cols * rank, dtype=np.uint64) + np.uint64(1)) * _STEP)
    total = sum((bits >> np.uint64(16 * i)) & np.uint64(0xFFFF) for i in range(4))
    centred = np.asarray(total).astype(np.float64) - 2 * 65535
    return (centred / DEVIATION).astype(np.float32).reshape(cols, rank)


def initial_state(seed: int) -> int:
    """Return the offset of the hashes of :func:`initial_q`'s elements."""
    with np.errstate(over="ignore"):
        return int(_splitmix64(np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64) * _STEP + _STEP)[0])


def _splitmix64(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))

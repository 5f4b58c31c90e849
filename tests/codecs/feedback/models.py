"""The shared random bits (kernels/include/hybridcomp/random.hpp) in NumPy, for models of what draws them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
_GOLDEN = np.uint32(0x9E3779B9)


def _words(value: Any) -> Words:
    return np.atleast_1d(np.asarray(value).astype(np.uint64) & np.uint64(0xFFFFFFFF)).astype(np.uint32)


def mix32(h: Words) -> Words:
    """Return the hash lowbias32 of each word."""
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D)
    h = (h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B)
    return h ^ (h >> np.uint32(16))


def uniform_bits(seed: int, index: Any, high: Any = 0) -> Words:
    """Return random bits of elements by the low and the high half of their indices."""
    a = mix32(_words(seed) + _GOLDEN)
    b = mix32(a ^ _words(seed >> 32))
    first = mix32(b + _words(high))
    second = mix32(first + _GOLDEN)
    h = _words(index) ^ first
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D)
    h = h ^ second
    h = (h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B)
    return h ^ (h >> np.uint32(16))

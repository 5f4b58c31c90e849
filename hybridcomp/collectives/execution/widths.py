"""Convert between a dtype and its accumulator's dtype: float32; float64 for float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hybridcomp import native
from hybridcomp.arrays import DType

Array = npt.NDArray[Any]


def widen(data: Array, dtype: DType) -> Array:
    """Return a copy of a slice in its accumulator's dtype (float32; float64 for float64)."""
    return _converted(data, dtype, dtype.accumulator)


def narrow(acc: Array, dtype: DType) -> Array:
    """Return an accumulator's values rounded to nearest even in ``dtype``'s storage; NaN stays NaN."""
    return acc if dtype.accumulator is dtype else _converted(acc, dtype.accumulator, dtype)


def _converted(data: Array, dtype: DType, into: DType) -> Array:
    out = np.empty(data.shape, into.storage)
    native.kernels().convert(data, dtype, out, into, False)
    return out

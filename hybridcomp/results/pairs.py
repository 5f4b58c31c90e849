"""Tell the mean of paired differences from noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

# Student's t at 97.5 %, for 1 degree of freedom on; past these the normal distribution's is near enough.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
      2.110, 2.101, 2.093, 2.086)  # fmt: skip


def paired(differences: Sequence[float]) -> tuple[float, float]:
    """Return the mean of differences of pairs, and what it takes to tell it from noise.

    Returns:
        The mean, and half the width of its 95 % confidence interval by Student's t: a mean that is smaller may be
        noise. NaN for less than two pairs, which tell nothing of the noise, and where a difference is not finite.
    """
    n = len(differences)
    mean = statistics.fmean(differences) if n else math.nan
    if n < 2 or not all(map(math.isfinite, differences)):
        return mean, math.nan
    return mean, (_T[n - 2] if n - 2 < len(_T) else 1.96) * statistics.stdev(differences) / math.sqrt(n)

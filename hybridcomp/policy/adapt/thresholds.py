"""Find thresholds that a wanted share of magnitudes reaches, and tell when they no longer do.

They follow the rule of DCT (Gupta et al. 2021, arXiv:2010.08899): a threshold is a quantile, found anew every so many
steps and kept between; and earlier, where the share that reaches it has left the wanted one by too much. :mod:`.dct`
applies it to gradients, the trainer's ``pp_neurons`` to activations.
"""

from __future__ import annotations

from decimal import ROUND_DOWN, Context

import numpy as np

from hybridcomp.policy.adapt.controller import Array

DRIFT = 0.25
"""Part of a wanted share by which the share that reaches a threshold may be off until the threshold is found anew."""

_SIX_DIGITS = Context(prec=6, rounding=ROUND_DOWN)


def upper_quantile(values: Array, weights: Array, share: float) -> float:
    """Return the largest of values [m] such that a share of the weights [m] belongs to values that reach it."""
    order = np.argsort(-values, kind="stable")
    passed = np.cumsum(weights[order])
    at = int(np.searchsorted(passed, share * passed[-1]))
    return float(values[order[min(at, order.size - 1)]])


def is_stale(reached: float, wanted: float, drift: float = DRIFT) -> bool:
    """Tell whether the share that reaches a threshold is off the wanted one by more than ``drift`` of it."""
    return abs(reached / wanted - 1) > drift


def threshold_of(quantile: float) -> float | None:
    """Return the threshold for a quantile, the first six of its digits; None where the quantile gives none."""
    if not (np.isfinite(quantile) and quantile > 0):
        return None
    # Few digits, since people read specs. The others are cut off: the quantile itself reaches the threshold.
    return float(_SIX_DIGITS.create_decimal_from_float(quantile))

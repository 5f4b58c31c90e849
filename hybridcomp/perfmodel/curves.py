"""Model the time of MPI's own collectives over their size: a curve of three parts, fitted to measurements.

The model is that of Lin et al., "Towards Universal Performance Modeling for Machine Learning Training on Multi-GPU
Platforms" (arXiv 2404.12674). A collective of s bytes has a bus bandwidth of s times a factor of its operation over its
time. Up to a size 2^ln_p a collective takes its latency, from 2^sat_p on the bus bandwidth is at its maximum, and
between them its logarithm is a sigmoid of the size's:

    t(s) = overhead                                                         log2 s <= ln_p
           s factor / 10^(L / (1 + exp(-k (log2 s - x0))) + b)              between
           s factor / max_bw + overhead                                     log2 s > sat_p
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
_SEARCHED = 2048  # bytes from which on the end of the latency part is searched
_SLOPE = 0.1  # relative growth from one size to the next, past which size counts
_SATURATED = 0.95  # share of the largest bus bandwidth, from which on it counts as reached
_BEYOND = 2  # sizes after the last one below _SATURATED
_POINTS = 5  # fewest points that a sigmoid of four parameters is fitted to
_STEEPEST = 50.0
_DECADES = 20.0  # decades of bus bandwidth that a sigmoid spans, at most
_CALLS = 4000  # evaluations of the sigmoid in its fit, at most


def bus_factor(op: str, ranks: int) -> float:
    """Return the factor from bytes over time to the bus bandwidth of an operation.

    Raises:
        ValueError: the operation has no curve.
    """
    if op not in OPERATIONS:
        raise ValueError(f"no curve of the operation {op!r}; known: {', '.join(OPERATIONS)}")
    share = (ranks - 1) / ranks
    return {"all_reduce": 2 * share, "broadcast": 1.0}.get(op, share)


@dataclass(frozen=True, slots=True)
class Curve:
    """Time of one of MPI's own operations over its size.

    Attributes:
        overhead: seconds of a short operation.
        L: decades of bus bandwidth that the sigmoid rises by.
        k: steepness of the sigmoid, over the logarithm to the base 2 of the bytes.
        x0: logarithm to the base 2 of the bytes at which it is steepest.
        b: decimal logarithm of the bytes/s that it rises from.
        ln_p: logarithm to the base 2 of the bytes up to which a call takes ``overhead``.
        sat_p: logarithm to the base 2 of the bytes from which on the bus bandwidth is ``max_bw``.
        max_bw: largest bus bandwidth in bytes/s.
    """

    overhead: float
    L: float
    k: float
    x0: float
    b: float
    ln_p: float
    sat_p: float
    max_bw: float

    def seconds(self, nbytes: float, factor: float) -> float:
        """Return the seconds of an operation.

        Args:
            nbytes: bytes of the array that is summed or sent; of all ranks' blocks together where each rank has one.
            factor: factor by :func:`bus_factor`.
        """
        x = math.log2(max(1.0, nbytes))
        if x <= self.ln_p:
            return self.overhead
        if x > self.sat_p:
            return nbytes * factor / self.max_bw + self.overhead
        bus = float(_sigmoid(np.array(x), self.L, self.x0, self.k, self.b))
        return nbytes * factor / 10**bus


@dataclass(frozen=True)
class MpiCurves:
    """Curves of MPI's own operations on the numbers of ranks and hosts that they were measured on.

    Attributes:
        hosts, ranks: numbers of hosts and ranks.
        of: curves by operation.
    """

    hosts: int
    ranks: int
    of: Mapping[str, Curve]


def fit_curve(sizes: Sequence[int], seconds: Sequence[float], factor: float) -> Curve:
    """Fit a curve to an operation's times. Needs SciPy.

    Args:
        sizes: bytes, ascending, each once.
        seconds: seconds for each size, above 0.
        factor: factor by :func:`bus_factor`.

    Raises:
        ValueError: there are fewer than five sizes, or no sigmoid was found.
    """
    from scipy.optimize import curve_fit  # type: ignore[import-untyped]  # noqa: PLC0415  (of the extra "plan")

    if len(sizes) < _POINTS:
        raise ValueError(f"a curve takes at least {_POINTS} sizes, not {len(sizes)}")
    taken = np.array(seconds)
    x = np.log2(np.array(sizes, float))
    bus = np.array(sizes) * factor / taken
    last = len(sizes) - 1
    searched = next((i for i, size in enumerate(sizes) if i and size >= _SEARCHED), last)
    slopes = np.abs(np.diff(taken)) / taken[:-1]
    short = next((i for i in range(searched, last) if slopes[i] > _SLOPE), last)
    below = np.flatnonzero(bus < _SATURATED * bus.max())
    full = max(short, min(last, (int(below[-1]) if len(below) else 0) + _BEYOND))
    first = max(0, min(short, full + 1 - _POINTS))
    part = slice(first, max(full + 1, first + _POINTS))
    y = np.log10(bus[part])
    height = float(max(y.max() - y.min(), 1e-3))
    try:
        found, _ = curve_fit(
            _sigmoid,
            x[part],
            y,
            p0=(height, float(np.median(x[part])), 1.0, float(y.min())),
            bounds=((0, -64, 0, -_DECADES), (_DECADES, 128, _STEEPEST, _DECADES)),
            method="dogbox",
            max_nfev=_CALLS,
        )
    except RuntimeError as error:
        raise ValueError(f"no sigmoid was found: {error}") from error
    rise, middle, steepness, base = (float(f"{value:.6g}") for value in found)
    return Curve(
        overhead=float(f"{taken[max(0, short - 1)]:.4g}"),
        L=rise,
        k=steepness,
        x0=middle,
        b=base,
        ln_p=float(x[short]),
        sat_p=float(x[full]),
        max_bw=float(f"{bus.max():.4g}"),
    )


def _sigmoid(
    x: npt.NDArray[np.float64], rise: float, middle: float, steepness: float, base: float
) -> npt.NDArray[np.float64]:
    z = np.clip(steepness * (x - middle), -500.0, 500.0)
    result: npt.NDArray[np.float64] = rise / (1 + np.exp(-z)) + base
    return result

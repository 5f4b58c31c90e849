"""Model sidco in Python: the arithmetic of kernels/include/hybridcomp/sparse.hpp, and which elements are sent."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tests.codecs.sparse.test_topk import model as topk_model

FLOAT32 = np.float32


class Point(NamedTuple):
    """A limit, and how many survivors it has, the sum of their magnitudes, and of their squares."""

    key: int
    limit: float
    count: float
    total: float = 0.0
    squares: float = 0.0


def logarithm(x: float) -> float:
    m, exponent = math.frexp(x)
    m, exponent = m * 2, exponent - 1
    if m > 1.4142135623730951:
        m, exponent = m / 2, exponent + 1
    s = (m - 1) / (m + 1)
    series = 1.0 / 17
    for odd in range(15, 0, -2):
        series = series * (s * s) + 1.0 / odd
    return exponent * 0.6931471805599453 + (s + s) * series


def growth(x: float) -> float:
    """Return (e^x - 1) / x."""
    n = int(x * 1.4426950408889634 + (-0.5 if x < 0 else 0.5))
    r = x - n * 0.6931471805599453
    series = 1.0
    for i in range(14, 1, -1):
        series = series * (r / i) + 1.0
    power = 0.0 if n < -60 else 2.0**n
    return series if n == 0 else (power * (r * series) + (power - 1)) / x


def distance(point: Point, limit: float, logs: float, pareto: bool) -> float:
    """Return how far beyond ``limit`` those lie that are exp(-logs) of its survivors."""
    mean = point.total / point.count
    excess = mean - limit
    if not excess > 0:
        return 0.0
    if not pareto:
        return excess * logs
    variance = point.squares / point.count - mean * mean
    shape = excess * excess / variance if excess * excess < 64 * variance else 64.0
    return 0.5 * excess * (shape + 1) * logs * growth(-0.5 * (shape - 1) * logs)


def sample(x: np.ndarray, k: int, stages: int) -> np.ndarray:
    n = x.size
    selected, least, share = (512, 16384, 8) if stages else (32, 2048, 32)
    if n <= 2 * least:
        return x
    groups = max(least, min((n // k + 1) * selected, n // share)) // 32
    slot, picked = n // groups, []
    for g in range(groups):
        h = (g * 0x9E3779B9 + 0x7F4A7C15) & 0xFFFFFFFF
        h = ((h ^ (h >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
        h = ((h ^ (h >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
        h ^= h >> 16
        begin = slot * g + (h * (slot // 32) >> 32) * 32
        picked.append(x[begin : begin + 32])
    return np.concatenate(picked)


class Fit:
    def __init__(self, x: np.ndarray, k: int, stages: int, pareto: bool = False) -> None:
        self.pareto = pareto
        magnitudes = np.abs(sample(x, k, stages)).astype(FLOAT32)
        finite = np.isfinite(magnitudes)
        self.keys = np.where(finite, magnitudes, FLOAT32(0)).view(np.uint32)
        self.finite = float(finite.sum())
        self.target = k * (finite.size / x.size) - float((~finite).sum())

    def measure(self, key: int) -> Point:
        reach = self.keys >= key
        wide = self.keys.view(FLOAT32).astype(np.float64)
        terms = np.where(reach & (wide >= 2.0**-100), wide, 0.0)
        limit = float(np.uint32(key).view(FLOAT32))
        return Point(
            key, limit, float(reach.sum()), self.sum_of_lanes(terms), self.sum_of_lanes(terms * terms)
        )

    @staticmethod
    def sum_of_lanes(terms: np.ndarray) -> float:
        lanes = np.cumsum(np.pad(terms, (0, -terms.size % 16)).reshape(-1, 16), axis=0)[-1]
        while lanes.size > 1:
            lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
        return float(lanes[0])

    @staticmethod
    def key_of(limit: float) -> int:
        nearest = FLOAT32(limit)
        if float(nearest) < limit:
            nearest = np.nextafter(nearest, FLOAT32(np.inf))
        return int(nearest.view(np.uint32))

    def adapted(self) -> tuple[float, float]:
        """Return a limit that about twice the target reaches, and their mean excess over it."""
        want = 2 * max(self.target, 0.0) + 8
        low, high = self.measure(0), None
        low = low._replace(count=self.finite)
        for stage in range(16):
            if low[2] <= want * 1.1:
                break
            goal = want if high else max(want, low[2] * 0.25)
            limit = low[1] + distance(low, low[1], logarithm(low[2] / goal), self.pareto)
            if high and not limit < high[1]:
                limit = between(low, high, goal)
            key = self.key_of(limit)
            if high and stage >= 8:
                key = low[0] + (high[0] - low[0]) // 2
            key = max(key, low[0] + 1)
            if high:
                key = min(key, high[0] - 1)
            if key <= low[0]:
                break
            point = self.measure(key)
            if point[2] >= want * 0.9:
                low = point
            else:
                high = point
        return low[1], low[3] / low[2] - low[1] if low[2] else 0.0

    def fixed(self, stages: int) -> float:
        if self.target < 0.5:
            return math.inf
        share = min(1.0, self.target / self.finite)
        first = 0.25 if stages > 1 and share < 0.25 else share
        start = self.measure(0)._replace(count=self.finite)
        limit = distance(start, 0.0, logarithm(self.finite / (self.finite * first)), self.pareto)
        for _ in range(stages - 1 if first > share else 0):
            point = self.measure(self.key_of(limit))
            if point.count == 0:
                break
            limit += distance(point, limit, logarithm(first / share) / (stages - 1), self.pareto)
        return limit


def between(low: Point, high: Point, goal: float) -> float:
    part = logarithm(low[2] / goal) / logarithm(low[2] / max(high[2], 0.5))
    return low[1] + (high[1] - low[1]) * part


def refined(keys: np.ndarray, limit: float, excess: float, k: int) -> int | None:
    """Return the key of a limit that k of ``keys`` reach, within a tenth, starting from one that more do."""

    def point(key: int) -> Point:
        return Point(key, float(np.uint32(key).view(FLOAT32)), float((keys >= key).sum()))

    low, high = point(max(1, Fit.key_of(limit))), None
    for stage in range(16):
        if low[2] <= k * 1.1:
            break
        at = between(low, high, k) if high else low[1] + excess * logarithm(low[2] / k)
        key = Fit.key_of(at)
        if high and stage >= 8:
            key = low[0] + (high[0] - low[0]) // 2
        key = max(key, low[0] + 1)
        if high:
            key = min(key, high[0] - 1)
        if key <= low[0]:
            break
        found = point(key)
        if found[2] >= k * 0.9:
            if not high:
                across = logarithm(low[2] / found[2])
                excess = (found[1] - low[1]) / across if across > 0 else 2 * excess
            low = found
        else:
            high = found
    if low[2] <= most(keys.size, k):
        return low[0]
    return high[0] if high and high[2] >= k - k // 5 else None


def most(n: int, k: int) -> int:
    return min(k + k // 4, n)


def model(x: np.ndarray, k: int, stages: int = 0, pareto: bool = False) -> np.ndarray:
    fit = Fit(x, k, stages, pareto)
    keys = np.abs(x).view(np.uint32)
    limit, excess = (fit.fixed(stages), 0.0) if stages else fit.adapted()
    key: int | None = max(1, Fit.key_of(limit))
    taken = int((keys >= key).sum())
    if stages:
        key = key if taken <= most(x.size, k) else None
    elif k - k // 5 <= taken <= 16 * most(x.size, k):
        key = refined(keys, limit, excess, k)
    else:
        key = None
    if key is None:
        return topk_model(np.where(x == 0, FLOAT32(0), x), k)  # no zero is sent, nor its sign
    return np.where(keys >= key, x, np.zeros_like(x))

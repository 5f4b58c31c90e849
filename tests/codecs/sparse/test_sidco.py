"""sidco: a model of its fit in Python, the numbers of elements it finds, and what no limit can split."""

from __future__ import annotations

import math

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp.arrays import flatten
from tests.codecs import common
from tests.codecs.sparse.test_topk import model as topk_model

FLOAT32 = np.float32


# -- the model: the arithmetic of kernels/include/hybridcomp/sparse.hpp --------------------------------------


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
    def __init__(self, x: np.ndarray, k: int, stages: int) -> None:
        magnitudes = np.abs(sample(x, k, stages)).astype(FLOAT32)
        finite = np.isfinite(magnitudes)
        self.keys = np.where(finite, magnitudes, FLOAT32(0)).view(np.uint32)
        self.finite = float(finite.sum())
        self.target = k * (finite.size / x.size) - float((~finite).sum())

    def measure(self, key: int) -> tuple[int, float, float, float]:
        """Key, limit, survivors, their sum."""
        reach = self.keys >= key
        wide = self.keys.view(FLOAT32).astype(np.float64)
        terms = np.where(reach & (wide >= 2.0**-100), wide, 0.0)
        lanes = np.cumsum(np.pad(terms, (0, -terms.size % 16)).reshape(-1, 16), axis=0)[-1]
        while lanes.size > 1:
            lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
        limit = float(np.uint32(key).view(FLOAT32))
        return key, limit, float(reach.sum()), float(lanes[0])

    @staticmethod
    def key_of(limit: float) -> int:
        nearest = FLOAT32(limit)
        if float(nearest) < limit:
            nearest = np.nextafter(nearest, FLOAT32(np.inf))
        return int(nearest.view(np.uint32))

    def adapted(self) -> tuple[float, float]:
        """A limit that about twice the target reaches, and their mean excess over it."""
        want = 2 * max(self.target, 0.0) + 8
        low, high = self.measure(0), None
        low = (0, 0.0, self.finite, low[3])
        for stage in range(16):
            if low[2] <= want * 1.1:
                break
            goal = want if high else max(want, low[2] * 0.25)
            limit = low[1] + max(low[3] / low[2] - low[1], 0.0) * logarithm(low[2] / goal)
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
        mean = self.measure(0)[3] / self.finite
        limit = mean * logarithm(self.finite / (self.finite * first))
        for _ in range(stages - 1 if first > share else 0):
            _, _, count, total = self.measure(self.key_of(limit))
            if count == 0:
                break
            limit += max(total / count - limit, 0.0) * (logarithm(first / share) / (stages - 1))
        return limit


def between(
    low: tuple[int, float, float, float], high: tuple[int, float, float, float], goal: float
) -> float:
    part = logarithm(low[2] / goal) / logarithm(low[2] / max(high[2], 0.5))
    return low[1] + (high[1] - low[1]) * part


def refined(keys: np.ndarray, limit: float, excess: float, k: int) -> int | None:
    """The key of a limit that k of ``keys`` reach, within a tenth, starting from one that more do."""

    def point(key: int) -> tuple[int, float, float, float]:
        return key, float(np.uint32(key).view(FLOAT32)), float((keys >= key).sum()), 0.0

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


def model(x: np.ndarray, k: int, stages: int = 0) -> np.ndarray:
    fit = Fit(x, k, stages)
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


def distribution(name: str, n: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = {
        "gaussian": lambda: rng.standard_normal(n),
        "laplace": lambda: rng.laplace(size=n),
        "student": lambda: rng.standard_t(3, n),
        "uniform": lambda: rng.uniform(-1, 1, n),
        # activations: a tensor of rows of 4,096, a thousandth of the channels 20 to 100 times as large
        "outliers": lambda: (
            rng.standard_normal(n)
            * np.resize(np.where(rng.random(4096) < 1e-3, rng.uniform(20, 100, 4096), 1), n)
        ),
        # a model's gradients: layers one after another, each of its own scale
        "layers": lambda: np.concatenate(
            [
                rng.laplace(0, 10.0 ** rng.uniform(-5, 0), part.size)
                for part in np.array_split(np.empty(n), 13)
            ]
        ),
        "tenth": lambda: rng.standard_normal(n) * (rng.random(n) < 0.1),
    }[name]()
    return x.astype(FLOAT32)


DISTRIBUTIONS = ["gaussian", "laplace", "student", "uniform", "outliers", "layers", "tenth"]


@pytest.mark.parametrize("name", common.isas())
@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_is_the_model(kind, name):
    small = ((100, 0.05), (4096, 0.01), (4097, 0.001), (32768, 0.01), (32769, 0.01))
    for n, ratio in (*small, (300001, 0.001), (70000, 0.3)):
        x = distribution(kind, n, seed=n)
        for stages in (0, 1, 2, 3):
            codec = hc.get_codec("sidco", ratio=ratio, stages=stages)
            with common.isa(name):
                y = hc.decode(codec.encode(x))
            assert y.tobytes() == model(x, codec.k(n), stages).tobytes()


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_types_of_the_same_values(dtype):
    """The limits are numbers of the tensor's own type, so that another type's may lie a little elsewhere."""
    x = distribution("gaussian", 50001).astype(np.float16)
    codec = hc.get_codec("sidco:ratio=0.01")
    expected = np.count_nonzero(hc.decode(codec.encode(x.astype(FLOAT32))))
    y = hc.decode(codec.encode(x.astype(dtype)))
    count = np.count_nonzero(y)
    assert count == pytest.approx(expected, rel=0.01)
    smallest = np.sort(np.abs(x))[-count]
    np.testing.assert_array_equal(y, np.where(np.abs(x) >= smallest, x, 0).astype(dtype))


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
@pytest.mark.parametrize("n", [65536, 1 << 20])
def test_finds_the_share(kind, n):
    x = distribution(kind, n)
    for ratio in (0.1, 0.01, 0.001):
        codec = hc.get_codec("sidco", ratio=ratio)
        if kind == "tenth" and ratio == 0.1:
            continue  # no more than about so many are not zero
        count = codec.select(flatten(x)).count
        assert 0.8 * codec.k(n) <= count <= 1.25 * codec.k(n)
        smallest = np.sort(np.abs(x))[-count]
        y = hc.decode(codec.encode(x))
        np.testing.assert_array_equal(y, np.where(np.abs(x) >= smallest, x, 0))


@pytest.mark.parametrize("kind", ["gaussian", "laplace", "student", "outliers"])
def test_the_fit_itself_is_right(kind):
    """Not by way of the exact selection that stands behind it, which would find k to the element."""
    n = 1 << 20
    for seed in range(3):
        for ratio in (0.1, 0.01):
            codec = hc.get_codec("sidco", ratio=ratio)
            count = codec.select(flatten(distribution(kind, n, seed))).count
            assert count != codec.k(n)
            assert 0.85 * codec.k(n) <= count <= 1.2 * codec.k(n)


def test_fixed_stages_are_the_papers():
    """The paper's own finding: one stage keeps far too few of a Gaussian, and the right share of a Laplacian."""
    n = 1 << 19
    for stages, low, high in ((1, 0.005, 0.05), (2, 0.5, 0.75), (3, 0.9, 1.25)):
        codec = hc.get_codec("sidco", ratio=0.01, stages=stages)
        assert low < codec.select(flatten(distribution("gaussian", n))).count / codec.k(n) < high
        assert 0.9 < codec.select(flatten(distribution("laplace", n))).count / codec.k(n) < 1.1


@pytest.mark.parametrize("n", [1, 2, 100, 40000, 140000])
@pytest.mark.parametrize("value", [1.0, -3e38, 1e-45, np.inf, np.nan])
def test_equal_elements_send_the_first(n, value):
    x = np.full(n, value, FLOAT32)
    for ratio in (0.001, 0.3, 1.0):
        codec = hc.get_codec("sidco", ratio=ratio)
        msg = codec.encode(x)
        assert msg.size <= codec.bound(n)
        sent = hc.decode(msg).view(np.uint32) != 0
        count = int(sent.sum())
        assert codec.k(n) <= count <= codec.most(n)
        assert sent[:count].all()


def test_zeros_are_not_sent():
    for n in (10, 50000):
        for extra in (0, 1, 5):
            x = np.zeros(n, FLOAT32)
            x[1 : 1 + extra] = 2
            x[-1] = -0.0
            codec = hc.get_codec("sidco:ratio=0.5")
            assert codec.select(flatten(x)).count == extra
            np.testing.assert_array_equal(hc.decode(codec.encode(x)), x)


def test_two_values():
    """Nothing lies between them: the larger ones if they are about k, else exactly k."""
    for share, expected in ((0.1, 1.0), (0.08, 0.8), (0.05, 1.0), (0.2, 1.0), (0.12, 1.2)):
        x = np.where(np.arange(10000) < share * 10000, 5, 1).astype(FLOAT32)
        codec = hc.get_codec("sidco:ratio=0.1")
        assert codec.select(flatten(x)).count == pytest.approx(expected * codec.k(x.size), rel=0.01)


@pytest.mark.parametrize("stages", [0, 1, 4])
def test_non_finite_elements_are_sent_and_not_fitted(stages):
    x = distribution("gaussian", 60000)
    plain = hc.get_codec("sidco", ratio=0.01, stages=stages).select(flatten(x)).count
    x[7:60000:3000] = np.array([np.nan, np.inf, -np.inf, np.nan] * 5, FLOAT32)
    codec = hc.get_codec("sidco", ratio=0.01, stages=stages)
    y = hc.decode(codec.encode(x))
    assert not np.isfinite(y[7:60000:3000]).any()
    assert np.count_nonzero(y) == pytest.approx(plain, rel=0.25, abs=25)


def test_bound_holds_for_any_values():
    rng = np.random.default_rng(1)
    for n in (1, 5, 1000, 66000):
        for ratio in (1e-9, 0.01, 0.5, 1.0):
            for stages in (0, 1, 8):
                codec = hc.get_codec("sidco", ratio=ratio, stages=stages)
                for _ in range(3):
                    x = rng.integers(0, 2**32, n, np.uint32).view(FLOAT32)
                    msg = codec.encode(x)
                    assert msg.size <= codec.bound(n)
                    assert codec.select(flatten(x)).count <= codec.most(n)


def test_config():
    assert hc.get_codec("sidco").spec == "sidco:ratio=0.001:values=none"
    assert hc.get_codec("sidco:0.01,stages=2").spec == "sidco:ratio=0.01:values=none:stages=2"
    for stages in (-1, 9, 1.0, True):
        with pytest.raises(ValueError, match="stages must be an integer from 0 to 8"):
            hc.get_codec("sidco", stages=stages)
    with pytest.raises(ValueError, match="ratio must be"):
        hc.get_codec("sidco", ratio=0)

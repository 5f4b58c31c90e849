"""sidco: the model of its fit (sidco_model.py), the numbers of elements it finds, and what no limit can split."""

from __future__ import annotations

import math

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp.arrays import flatten
from hybridcomp.codecs.sparse.sidco import SIDCoCodec
from tests.codecs import common
from tests.codecs.sparse.sidco_model import FLOAT32, model


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
    for n, ratio in ((4097, 0.001), (70000, 0.01)):
        x = distribution(kind, n, seed=n)
        for stages in (0, 1, 3):
            codec = hc.get_codec("sidco", ratio=ratio, stages=stages, fit="pareto")
            with common.isa(name):
                y = hc.decode(codec.encode(x))
            assert y.tobytes() == model(x, codec.k(n), stages, pareto=True).tobytes()


@pytest.mark.parametrize("fit", ["exponential", "pareto"])
@pytest.mark.parametrize("kind", ["gaussian", "laplace", "student"])
def test_limits_are_the_papers_formulas(kind, fit):
    """The formulas are written as in the paper, without the kernels' sample, order of sums, keys and logarithm."""
    x = distribution(kind, 30000).astype(np.float64)
    for ratio, stages in ((0.01, 1), (0.01, 2), (0.001, 4), (0.3, 3)):
        magnitudes, limit = np.abs(x), 0.0
        first = 0.25 if stages > 1 and ratio < 0.25 else ratio
        shares = [first] + [(ratio / first) ** (1 / max(stages - 1, 1))] * (stages - 1)
        for share in shares:
            beyond = magnitudes[magnitudes >= limit] - limit
            mean, variance = beyond.mean(), beyond.var()
            if fit == "pareto":
                alpha = mean * (mean**2 / variance + 1) / 2
                k = (mean**2 / variance - 1) / 2
                limit += alpha * (1 - share**k) / k
            else:
                limit += -mean * math.log(share)
        codec = hc.get_codec("sidco", ratio=ratio, stages=stages, fit=fit)
        assert isinstance(codec, SIDCoCodec)
        assert codec.limit(flatten(x)) == pytest.approx(limit, rel=1e-9)


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
            continue  # only about so many elements are not zero
        count = codec.select(flatten(x)).count
        assert 0.8 * codec.k(n) <= count <= 1.25 * codec.k(n)
        smallest = np.sort(np.abs(x))[-count]
        y = hc.decode(codec.encode(x))
        np.testing.assert_array_equal(y, np.where(np.abs(x) >= smallest, x, 0))


@pytest.mark.parametrize("kind", ["gaussian", "laplace", "student", "outliers"])
def test_the_fit_itself_is_right(kind):
    """The fit is right by itself, without the exact selection behind it, which would find k to the element."""
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
@pytest.mark.parametrize("fit", ["exponential", "pareto"])
def test_equal_elements_send_the_first(n, value, fit):
    x = np.full(n, value, FLOAT32)
    for ratio in (0.001, 0.3, 1.0):
        codec = hc.get_codec("sidco", ratio=ratio, fit=fit)
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
    """With nothing between two values, the larger ones are sent if they are about k, else exactly k."""
    for share, expected in ((0.1, 1.0), (0.08, 0.8), (0.05, 1.0), (0.2, 1.0), (0.12, 1.2)):
        x = np.where(np.arange(10000) < share * 10000, 5, 1).astype(FLOAT32)
        codec = hc.get_codec("sidco:ratio=0.1")
        assert codec.select(flatten(x)).count == pytest.approx(expected * codec.k(x.size), rel=0.01)


def test_a_pareto_fit_knows_tails():
    """Check that two stages find heavy tails and light ones, where a single stage is far off."""
    for kind in ("gaussian", "student", "laplace"):
        for ratio in (0.01, 0.001):
            codec = hc.get_codec("sidco", ratio=ratio, stages=2, fit="pareto")
            x = distribution(kind, 1 << 19)
            assert isinstance(codec, SIDCoCodec)
            reached = np.count_nonzero(np.abs(x) >= codec.limit(flatten(x)))
            assert 0.8 < reached / codec.k(x.size) < 1.2


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
            for stages, fit in ((0, "exponential"), (1, "exponential"), (16, "exponential"), (2, "pareto")):
                codec = hc.get_codec("sidco", ratio=ratio, stages=stages, fit=fit)
                for _ in range(3):
                    x = rng.integers(0, 2**32, n, np.uint32).view(FLOAT32)
                    msg = codec.encode(x)
                    assert msg.size <= codec.bound(n)
                    assert codec.select(flatten(x)).count <= codec.most(n)


def test_config():
    assert hc.get_codec("sidco").spec == "sidco:ratio=0.001:values=none"
    assert hc.get_codec("sidco:0.01,stages=2").spec == "sidco:ratio=0.01:values=none:stages=2"
    given = hc.get_codec("sidco:0.01,stages=16,fit=pareto")
    assert given.spec == "sidco:ratio=0.01:values=none:stages=16:fit=pareto"
    for stages in (-1, 17, 1.0, True):
        with pytest.raises(ValueError, match="stages must be an integer from 0 to 16"):
            hc.get_codec("sidco", stages=stages)
    with pytest.raises(ValueError, match="fit must be one of exponential, pareto, not 'gamma'"):
        hc.get_codec("sidco", fit="gamma")
    with pytest.raises(ValueError, match="ratio must be"):
        hc.get_codec("sidco", ratio=0)

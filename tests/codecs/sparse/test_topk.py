"""topk against a sort."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import hybridcomp as hc
from hybridcomp import native
from hybridcomp.arrays import DType
from tests.codecs import common


def model(x: np.ndarray, k: int) -> np.ndarray:
    """Keep the k largest magnitudes, lower indices first among equals, NaN before all."""
    magnitude = np.where(np.isnan(x), np.inf, np.abs(x))
    rank = np.lexsort((np.arange(x.size), -magnitude, ~np.isnan(x)))
    kept = np.zeros_like(x)
    kept[rank[:k]] = x[rank[:k]]
    return kept


@pytest.mark.parametrize("name", common.isas())
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("ratio", [0.0001, 0.01, 0.2, 0.7, 1.0])
def test_is_a_sort(ratio, dtype, name):
    codec = hc.get_codec("topk", ratio=ratio)
    for n in (1, 2, 31, 32, 33, 1000, 65536, 70001):
        x = common.gaussian(n, dtype, seed=n)
        with common.isa(name):
            y = hc.decode(codec.encode(x))
        assert y.tobytes() == model(x, codec.k(n)).tobytes()


@pytest.mark.parametrize("name", common.isas())
@pytest.mark.parametrize("n", [64, 1000, 140000])
def test_ties_go_to_the_lower_index(name, n):
    rng = np.random.default_rng(n)
    for x in (np.full(n, -2.5), rng.integers(-3, 4, n), np.zeros(n)):
        for ratio in (0.004, 0.1, 0.5, 0.9):
            codec = hc.get_codec("topk", ratio=ratio)
            values = x.astype(np.float32)
            with common.isa(name):
                y = hc.decode(codec.encode(values))
            np.testing.assert_array_equal(y, model(values, codec.k(n)))


@settings(deadline=None, max_examples=100)
@given(
    x=hnp.arrays(
        np.float32,
        st.integers(1, 300),
        elements=st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.5, 1e-45, -1e-40, 3e38, np.inf, -np.inf, np.nan]),
    ),
    ratio=st.floats(0.001, 1),
)
def test_awkward_values(x, ratio):
    codec = hc.get_codec("topk", ratio=ratio)
    for name in common.isas():
        with common.isa(name):
            y = hc.decode(codec.encode(x))
        np.testing.assert_array_equal(y, model(x, codec.k(x.size)))


@pytest.mark.parametrize("name", common.isas())
@pytest.mark.parametrize("special", [100.0, 0.01])
def test_data_that_misleads_the_sample(name, special):
    """The threshold is first guessed from evenly spaced elements: here those are all large, or all small."""
    x = common.gaussian(1 << 16)
    x[::16] *= np.float32(special)
    codec = hc.get_codec("topk:ratio=0.01")
    with common.isa(name):
        y = hc.decode(codec.encode(x))
    np.testing.assert_array_equal(y, model(x, codec.k(x.size)))


def test_bfloat16():
    x = common.gaussian(5000, "bfloat16")
    y = hc.decode(hc.get_codec("topk:ratio=0.1").encode(x))
    kept = y != 0
    assert kept.sum() == 500
    assert torch.equal(y[kept], x[kept])
    assert x[kept].abs().min() >= x[~kept].abs().max()


@pytest.mark.parametrize("ratio", [0.01, 0.07, 0.1, 0.29, 1 / 3, 0.57, 1.0, 1e-9])
def test_k_is_the_ratio_rounded_up(ratio):
    codec = hc.get_codec("topk", ratio=ratio)
    for n in (1, 2, 3, 99, 100, 101, 1000, 10**6, 10**9):
        k = codec.k(n)
        assert 1 <= k <= n
        assert k == max(1, math.ceil(round(ratio * n, 6)))
    assert codec.k(0) == 0


def test_indices_take_the_smaller_form():
    """Indices take two bytes each up to a sixteenth of a block, and a bitmap beyond."""
    n = 65536
    for k in (1, 4096, 4097, 65536):
        size = hc.get_codec("topk", ratio=k / n).encode(common.gaussian(n)).size
        assert size == 32 + 16 + 4 + min(2 * k, n // 8) + 32 + 4 * k


def test_bound_holds_for_any_distribution():
    rng = np.random.default_rng(0)
    n = 3 * 65536 + 77
    for ratio in (0.001, 0.03, 0.1, 0.5, 1.0):
        codec = hc.get_codec("topk", ratio=ratio)
        for scale in (np.ones(n), np.linspace(0, 1, n) ** 8, np.arange(n) < 65536, np.arange(n) % 2):
            x = (rng.standard_normal(n) * scale).astype(np.float32)
            assert codec.encode(x).size <= codec.bound(n)


@pytest.mark.parametrize("values", ["none", "fp16", "bf16", "int8", "int8:block=64", "int4:block=8"])
def test_values_go_through_their_codec(values):
    x = common.gaussian(20000)
    codec = hc.get_codec("topk", ratio=0.05, values=values)
    kept = model(x, codec.k(x.size))
    chosen = np.flatnonzero(kept)
    inner = hc.get_codec(values)
    expected = np.zeros_like(x)
    expected[chosen] = hc.decode(inner.encode(x[chosen]))
    np.testing.assert_array_equal(hc.decode(codec.encode(x)), expected)


def test_specs_of_values():
    codec = hc.get_codec("topk:ratio=0.05,values=(int8:block=64)")
    assert codec.spec == "topk:ratio=0.05:values=(int8:block=64)"
    assert codec.values == hc.get_codec("int8:block=64")
    assert codec == hc.get_codec("topk", ratio=0.05, values=hc.get_codec("int8:block=64"))
    assert hc.get_codec("topk").spec == "topk:ratio=0.01:values=none"


@pytest.mark.parametrize("ratio", [0, -0.1, 1.1, math.nan, math.inf, True, "half"])
def test_ratios_out_of_range(ratio):
    with pytest.raises(ValueError, match="ratio must be"):
        hc.get_codec("topk", ratio=ratio)


# -- forged index sections ---------------------------------------------------------------------------------


def scatter(counts: list[int], section: bytes, *, n: int, k: int) -> int:
    indices = np.frombuffer(np.array(counts, np.uint32).tobytes() + section, np.uint8)
    fenced = np.zeros(n + 2, np.float32)
    values = np.arange(1, k + 1, dtype=np.float32)
    code = native.kernels().sparse_scatter(indices, n, k, values, fenced[1:-1], DType.FLOAT32, True)
    assert fenced[0] == fenced[-1] == 0
    return code


def u16(*indices: int) -> bytes:
    return np.array(indices, np.uint16).tobytes()


def test_forged_indices():
    text = native.kernels().status_text
    n = 1000  # 125 bytes of bitmap: lists up to 62 indices
    assert scatter([3], u16(0, 5, 999), n=n, k=3) == 0
    assert "ascending" in text(scatter([3], u16(0, 5, 5), n=n, k=3))
    assert "ascending" in text(scatter([3], u16(5, 0, 7), n=n, k=3))
    assert "past the end" in text(scatter([3], u16(0, 5, 1000), n=n, k=3))
    assert "past the end" in text(scatter([3], u16(0, 5, 65535), n=n, k=3))
    assert "add up" in text(scatter([2], u16(0, 5), n=n, k=3))
    assert "add up" in text(scatter([1001], bytes(125), n=n, k=1001))
    assert "add up" in text(scatter([2**32 - 1], bytes(125), n=n, k=3))
    assert "length" in text(scatter([3], u16(0, 5), n=n, k=3))
    assert "length" in text(scatter([3], u16(0, 5, 6, 7), n=n, k=3))
    assert "length" in text(scatter([], b"", n=n, k=3))
    full = np.full(125, 255, np.uint8)
    assert scatter([1000], full.tobytes(), n=n, k=1000) == 0
    assert "another number" in text(scatter([999], full.tobytes(), n=n, k=999))
    full[0] = 0
    assert "another number" in text(scatter([1000], full.tobytes(), n=n, k=1000))
    past = np.full(124, 255, np.uint8)  # 989 elements: the last three bits stand for none
    assert "past the end" in text(scatter([989], past.tobytes(), n=989, k=989))


def test_forged_values():
    x = common.gaussian(1000)
    msg = hc.get_codec("topk:ratio=0.01").encode(x)
    start = 32 + 16 + 4 + 20
    inner = {"count": (8, 9), "dtype": (5, 3), "codec": (4, 16), "magic": (0, 0)}
    for at, value in inner.values():
        bad = msg.copy()
        bad[start + at] = value
        with pytest.raises(hc.WireError):
            hc.decode(common.reseal(bad))
        bad[start:] = common.reseal(bad[start:].copy())
        with pytest.raises(hc.WireError):
            hc.decode(common.reseal(bad))

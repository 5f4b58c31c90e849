"""threshold against a comparison in NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import hybridcomp as hc
from hybridcomp import native
from tests.codecs import common


def reaching(x: np.ndarray, limit: float) -> np.ndarray:
    """Keep what is at least the limit, and NaN. The comparison is exact in double."""
    wide = x.astype(np.float64)
    return np.where((np.abs(wide) >= limit) | np.isnan(wide), x, np.zeros_like(x))


def root_mean_square(x: np.ndarray) -> float:
    """Compute it in the codec's order: 16 lanes over each block of 65,536, the lanes halved, the blocks in turn."""
    wide = np.abs(x.astype(np.float64))
    finite = np.isfinite(wide)
    wide[~finite] = 0
    if x.dtype == np.float64:
        wide = np.where(wide < 2.0**-400, 0, np.minimum(wide, 2.0**400))
    else:
        wide[wide < 2.0**-100] = 0
    total = 0.0
    for at in range(0, x.size, 65536):
        block = wide[at : at + 65536] ** 2
        lanes = np.cumsum(np.pad(block, (0, -block.size % 16)).reshape(-1, 16), axis=0)[-1]
        while lanes.size > 1:
            lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
        total += float(lanes[0])
    return math.sqrt(total / int(finite.sum())) if finite.any() else 0.0


@pytest.mark.parametrize("name", common.isas())
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_abs_is_a_comparison(dtype, name):
    for n in (1, 31, 32, 33, 1000, 65536, 140001):
        x = common.gaussian(n, dtype, seed=n)
        for limit in (1e-9, 0.3, 2.5, 4.0, 1e9):
            with common.isa(name):
                y = hc.decode(hc.get_codec("threshold", abs=limit).encode(x))
            assert y.tobytes() == reaching(x, limit).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_limits_between_numbers(dtype):
    """A limit that the type does not have is rounded up to the next number, never to the nearest."""
    kind = np.dtype(dtype).type
    tiny = np.finfo(kind).smallest_subnormal
    maximum = np.finfo(kind).max
    for value in (kind(0.1), kind(1.0), kind(2) ** -14, tiny, 3 * tiny, maximum):
        below = np.nextafter(value, kind(0))
        above = kind(np.inf) if value == maximum else np.nextafter(value, kind(np.inf))
        x = np.array([below, value, above, -value, 0, np.inf, -np.inf, np.nan], kind)
        for limit in (float(value), math.nextafter(value, 0), math.nextafter(value, math.inf)):
            if not 0 < limit < math.inf:
                continue
            y = hc.decode(hc.get_codec("threshold", abs=limit).encode(x))
            assert y.tobytes() == reaching(x, limit).tobytes()


def test_bfloat16():
    x = common.gaussian(5000, "bfloat16")
    y = hc.decode(hc.get_codec("threshold", abs=1.1).encode(x))
    np.testing.assert_array_equal(common.wide(y), reaching(common.wide(x), 1.1))
    assert isinstance(y, torch.Tensor)


@pytest.mark.parametrize("name", common.isas())
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_rel_is_of_the_root_mean_square(dtype, name):
    rng = np.random.default_rng(3)
    for n in (1, 15, 16, 17, 2049, 65537, 200003):
        for scale in (1e-45, 1e-3, 1.0, 9e3):
            x = (rng.standard_normal(n) * scale).astype(dtype)
            if n > 100:
                x[[5, 70, 99]] = np.inf, -np.inf, np.nan
            for times in (0.5, 2.0):
                with common.isa(name):
                    y = hc.decode(hc.get_codec("threshold", rel=times).encode(x))
                assert y.tobytes() == reaching(x, times * root_mean_square(x)).tobytes()


def test_rel_to_the_last_bit():
    """Equal elements are their own root mean square, so rel=1 sends all and the next number above sends none."""
    for n, value in ((1, 0.7), (16, 1.5), (4096, 2.0**-90), (65536, 3.0)):
        x = np.full(n, value, np.float32)
        assert np.count_nonzero(hc.decode(hc.get_codec("threshold", rel=1.0).encode(x))) == n
        above = float(np.nextafter(1.0, 2.0))
        assert np.count_nonzero(hc.decode(hc.get_codec("threshold", rel=above).encode(x))) == 0


def test_rel_of_extreme_doubles():
    big = np.array([1e300, 1.0, -1e-300, 0.0, 1e150])
    sent = hc.decode(hc.get_codec("threshold", rel=1.0).encode(big))
    np.testing.assert_array_equal(sent, [1e300, 0, 0, 0, 1e150])
    for x in (np.zeros(10), np.full(10, 1e-300), np.full(10, np.nan)):  # a limit of zero: everything
        np.testing.assert_array_equal(hc.decode(hc.get_codec("threshold").encode(x)), x)


@pytest.mark.parametrize("limit", [1e-9, 0.5, 1.5, 9.0])
def test_bound_is_that_of_all_elements(limit):
    codec = hc.get_codec("threshold", abs=limit)
    for n in (0, 1, 65536, 200001):
        assert codec.encode(common.gaussian(n)).size <= codec.bound(n)
    n = 65536
    assert codec.bound(n) == 32 + 16 + 4 + n // 8 + 32 + 4 * n


def test_flush_to_zero_changes_nothing():
    rng = np.random.default_rng(8)
    exponents = rng.integers(-149, 20, 30000)
    x = (rng.standard_normal(exponents.size) * np.exp2(exponents)).astype(np.float32)
    specs = [
        "threshold:abs=1e-40",
        "threshold:abs=1e-42",
        "threshold:rel=1e-30",
        "sidco:ratio=0.01",
        "sidco:ratio=0.9",
    ]
    arrays = (x, (x * np.float32(2.0**-20)), rng.integers(0, 0x800, 40000, np.uint16).view(np.float16))

    def everything() -> list[bytes]:
        return [hc.get_codec(spec).encode(a).tobytes() for spec in specs for a in arrays]

    plain = everything()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no flush-to-zero mode")
    try:
        flushed = everything()
    finally:
        torch.set_flush_denormal(False)
    assert plain == flushed


def test_config():
    assert hc.get_codec("threshold").spec == "threshold:rel=3.0:values=none"
    assert hc.get_codec("threshold:0.25") == hc.get_codec("threshold", abs=0.25)
    codec = hc.get_codec("threshold", abs=1)
    assert (codec.abs, codec.rel) == (1.0, None)
    assert codec.params == {"abs": 1.0, "values": "none"}
    with pytest.raises(ValueError, match="give only one"):
        hc.get_codec("threshold:abs=1,rel=2")


@pytest.mark.parametrize("name", ["abs", "rel"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, True, "much"])
def test_limits_out_of_range(name, value):
    with pytest.raises(ValueError, match=f"{name} must be"):
        hc.get_codec("threshold", **{name: value})


def test_kernels_check_their_arguments():
    k, x = native.kernels(), np.zeros(8, np.float32)
    for call in (
        lambda: k.sparse_threshold(x, 1, -1.0, False),
        lambda: k.sparse_threshold(x, 1, math.nan, False),
        lambda: k.sparse_threshold(x, 1, math.nan, True),
        lambda: k.sparse_threshold(x, 5, 1.0, False),
        lambda: k.sparse_sidco(x, 1, 9, 0, 0),
        lambda: k.sparse_sidco(x, 1, 1, 17, 0),
        lambda: k.sparse_sidco(x, 1, 1, 2, 2),
        lambda: k.sparse_sidco_limit(x, 1, 1, 0, 0),
        lambda: k.sparse_sidco_limit(x, 1, 0, 1, 0),
        lambda: k.sparse_topk(x, 1, 9),
    ):
        with pytest.raises(ValueError, match=r"must|larger|not a"):
            call()

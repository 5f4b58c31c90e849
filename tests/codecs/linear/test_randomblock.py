"""randomblock: where its blocks lie, what they hold, and their sums."""

from __future__ import annotations

import struct

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp.codecs.linear.base import reduce_all
from tests.codecs import common


def kept(codec, n: int) -> np.ndarray:
    """Return the indices of the elements that are sent."""
    return (codec.start(n) + np.arange(codec.k(n))) % n


@pytest.mark.parametrize("n", [1, 2, 100, 4097])
@pytest.mark.parametrize("ratio", [0.001, 0.07, 0.5, 1])
def test_the_block_is_exact_and_the_rest_zero(n, ratio):
    wrapped = 0
    for seed in range(20):
        codec = hc.get_codec("randomblock", ratio=ratio, seed=seed)
        x = common.gaussian(n, seed=seed)
        want = np.zeros_like(x)
        want[kept(codec, n)] = x[kept(codec, n)]
        msg = codec.encode(x)
        assert common.bits(hc.decode(msg)) == want.tobytes()
        assert msg.size == 32 + 24 + 32 + 4 * codec.k(n)
        wrapped += codec.start(n) + codec.k(n) > n
        acc = np.ones(n, np.float32)
        hc.decode_add(msg, acc)
        np.testing.assert_array_equal(acc, want + np.float32(1))
    assert wrapped or ratio < 0.5 or n < 100


def test_k_is_exact():
    assert hc.get_codec("randomblock:ratio=0.07").k(100) == 7
    assert hc.get_codec("randomblock").k(1) == 1
    assert hc.get_codec("randomblock").k(0) == 0


def test_blocks_begin_anywhere_and_move():
    codec = hc.get_codec("randomblock:ratio=0.01,seed=4")
    n = 1000
    starts = np.array([codec.at_step(s).start(n) for s in range(4000)])
    counts = np.bincount(starts // 100, minlength=10)
    assert starts.min() >= 0
    assert counts.size == 10
    assert ((counts - 400) ** 2 / 400).sum() < 27.9  # chi-squared of 9 degrees of freedom: 1 in 1000
    assert codec.at_step(0) == codec
    assert codec.at_step(5) == codec.at_step(5)
    assert codec.at_step(5).params["ratio"] == 0.01
    other = hc.get_codec("randomblock:ratio=0.01,seed=5")
    assert codec.start(n) != other.start(n) or codec.start(n + 1) != other.start(n + 1)
    coverage = np.zeros(n)
    for s in range(2000):
        coverage[kept(codec.at_step(s), n)] += 1
    assert coverage.min() > 0


@pytest.mark.parametrize("values", ["fp16", "bf16", "int8:block=8", "int4"])
def test_values_through_another_codec(values):
    codec = hc.get_codec("randomblock", ratio=0.3, values=values, seed=2)
    x = common.gaussian(1000)
    inner = hc.decode(hc.get_codec(values).encode(x[kept(codec, 1000)]))
    want = np.zeros_like(x)
    want[kept(codec, 1000)] = inner
    np.testing.assert_array_equal(hc.decode(codec.encode(x)), want)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_sent_is_told_of(bad):
    codec = hc.get_codec("randomblock:ratio=0.1")
    n = 500
    inside = kept(codec, n)
    for at in range(0, n, 7):
        x = common.gaussian(n)
        x[at] = bad
        y = hc.decode(codec.encode(x))
        if at in inside:
            assert np.isfinite(np.delete(y, at)).all()
            assert not np.isfinite(y[at])
        else:
            assert np.isnan(y).all()
        total = reduce_all(codec, [common.gaussian(n, seed=1), x])[0].total
        assert not np.isfinite(total[at])
        assert np.isfinite(total).sum() == (n - 1 if at in inside else 0)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_reduction(dtype):
    codec = hc.get_codec("randomblock:ratio=0.25,seed=1")
    n = 999
    parts = [common.gaussian(n, dtype, seed=r) for r in range(3)]
    for step in range(6):
        block = kept(codec.at_step(step), n)
        wide = [p.astype(np.float64 if dtype == "float64" else np.float32) for p in parts]
        want = np.zeros_like(wide[0])
        want[block] = (wide[0] + wide[1] + wide[2])[block]
        for result, part in zip(reduce_all(codec, parts, step=step), wide, strict=True):
            np.testing.assert_array_equal(result.total, want)
            assert result.total.dtype == want.dtype
            own = np.zeros_like(part)
            own[block] = part[block]
            np.testing.assert_array_equal(result.own, own)
        mean = reduce_all(codec, parts, step=step, mean=True)[1].total
        np.testing.assert_array_equal(mean, want / want.dtype.type(3))
    assert reduce_all(codec, [np.empty(0, dtype)] * 2)[0].total.size == 0


def test_error_feedback_sends_everything_in_time():
    """With a constant gradient, the average of what was sent nears it, though each step sends a tenth."""
    n, steps = 300, 400
    x = common.gaussian(n)
    codec = hc.get_codec("randomblock:ratio=0.1")
    residual, sent = np.zeros(n, np.float32), np.zeros(n)
    for step in range(steps):
        corrected = x + residual
        (result,) = reduce_all(codec, [corrected], step=step)
        residual = corrected - result.own
        sent += result.total
    assert common.relative_error(x, sent / steps) < 0.1
    plain = sum(reduce_all(codec, [x], step=s)[0].total.astype(np.float64) for s in range(steps)) / steps
    assert abs(float(plain @ x / (x @ x)) - 0.1) < 0.02, "without it the expectation is ratio * x"


def test_forged_fields():
    codec = hc.get_codec("randomblock:ratio=0.5")
    msg = codec.encode(common.gaussian(20))
    for at, value in [
        (0, struct.pack("<Q", 20)),
        (0, struct.pack("<Q", 2**64 - 1)),
        (8, struct.pack("<d", 0.25)),
        (8, struct.pack("<d", 0.0)),
        (8, struct.pack("<d", 1e-300)),
        (8, struct.pack("<d", np.nan)),
        (8, struct.pack("<d", np.inf)),
        (16, struct.pack("<I", 2)),
        (20, struct.pack("<I", 1)),
    ]:
        bad = msg.copy()
        bad[32 + at : 32 + at + len(value)] = np.frombuffer(value, np.uint8)
        with pytest.raises(hc.WireError, match="malformed randomblock payload"):
            hc.decode(common.reseal(bad))
    inner = hc.get_codec("topk").encode(common.gaussian(10))
    bad = np.concatenate([msg[:56], inner])
    bad[16:24] = np.frombuffer(struct.pack("<Q", bad.size - 32), np.uint8)
    with pytest.raises(hc.WireError, match="by codec 'topk'"):
        hc.decode(common.reseal(bad))


def test_parameters():
    for ratio in (0, 1.01, -1, 1e-6, np.nan, "a", True):
        with pytest.raises(ValueError, match="ratio must be a number from 1/65536 to 1"):
            hc.get_codec("randomblock", ratio=ratio)
    with pytest.raises(ValueError, match="values must be one of bf16, fp16"):
        hc.get_codec("randomblock:values=topk")
    with pytest.raises(ValueError, match="seed must be"):
        hc.get_codec("randomblock:seed=-1")

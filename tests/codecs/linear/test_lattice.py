"""lattice: against a model in NumPy, its sums, and what is forged."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

import hybridcomp as hc
from hybridcomp.codecs.linear.base import derived_seed, reduce_all
from tests.codecs import common
from tests.codecs.feedback.models import uniform_bits

HEAD = 32 + 24


def model_scale(peak, bits: int, ranks: int, dtype) -> tuple:
    kind = np.float64 if bits == 32 or dtype == np.float64 else np.float32
    limit = kind((2 ** (bits - 1) - 1) // ranks)
    least = {np.float64: 2.0**-900, np.float32: 2.0 ** (-90 if bits == 32 else -100)}[dtype]
    if not np.isfinite(peak):
        return kind(np.nan), kind(0)
    if peak < least:
        return kind(0), kind(0)
    with np.errstate(over="ignore"):
        stored = kind(peak) / limit
        if stored * limit == np.inf:
            stored = np.nextafter(stored, kind(0))
    return stored, limit / kind(peak)


def model_integers(x, inverse, bits: int, ranks: int, seed: int | None) -> np.ndarray:
    y = x.astype(type(inverse)) * inverse
    if seed is None:
        return np.rint(y).astype(f"i{bits // 8}")
    y = np.where(np.abs(x) < np.finfo(x.dtype).tiny, y.dtype.type(0), y)
    dither = (
        (uniform_bits(seed, np.arange(x.size)) >> np.uint32(16)).astype(y.dtype) - y.dtype.type(32767.5)
    ) / 65536
    limit = (2 ** (bits - 1) - 1) // ranks
    nearest = np.rint(y)
    return np.clip(nearest + np.rint(y - nearest + dither), -limit, limit).astype(f"i{bits // 8}")


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(("bits", "ranks"), [(8, 1), (8, 5), (16, 1), (16, 3), (32, 1), (32, 64)])
def test_messages_are_the_models(bits, ranks, rounding, dtype):
    codec = hc.get_codec("lattice", bits=bits, ranks=ranks, rounding=rounding, seed=2**40 + 7)
    for n in (1, 63, 5000):
        for power in (0, 60, -60):
            if power and "16" in dtype:
                continue
            given = common.gaussian(n, dtype, seed=n) * 2.0**power
            given = given if dtype == "bfloat16" else given.astype(dtype)
            x = common.wide(given).astype(np.float64 if dtype == "float64" else np.float32)
            scale, inverse = model_scale(np.abs(x).max(), bits, ranks, x.dtype.type)
            q = model_integers(x, inverse, bits, ranks, None if rounding == "nearest" else codec.seed)
            msg = np.asarray(codec.encode(given))
            assert struct.unpack_from("<IIIId", msg.tobytes(), 32) == (bits, ranks, 1, 0, float(scale))
            np.testing.assert_array_equal(msg[HEAD:].view(q.dtype), q)
            y = np.empty(n, x.dtype)
            hc.decode(msg, out=y)
            np.testing.assert_array_equal(y, (q.astype(type(scale)) * scale).astype(x.dtype))


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_extremes(bits, rounding):
    codec = hc.get_codec("lattice", bits=bits, rounding=rounding)
    for dtype in (np.float32, np.float64):
        info = np.finfo(dtype)
        x = np.array([info.max, -info.max, info.max / 3, info.tiny, info.smallest_subnormal, -0.0], dtype)
        y = hc.decode(codec.encode(x))
        assert np.isfinite(y).all()
        np.testing.assert_allclose(y[:3], x[:3], atol=float(info.max / (2 ** (bits - 1) - 1)))
        assert not hc.decode(codec.encode(x[3:])).any(), "tiny tensors are zero"
        assert not hc.decode(codec.encode(np.zeros(70, dtype))).any()


def test_stochastic_rounding_is_unbiased_and_differs_by_seed_step_and_element():
    x = np.full(200_000, 0.3, np.float32)
    x[0] = 127
    codec = hc.get_codec("lattice:rounding=stochastic")
    y = hc.decode(codec.encode(x))[1:]
    assert set(np.unique(y)) == {0, 1}
    assert abs(y.mean() - 0.3) < 5 * np.sqrt(0.21 / y.size)
    assert abs(np.corrcoef(y[1:], y[:-1])[0, 1]) < 0.02
    other = hc.decode(codec.at_step(1).encode(x))[1:]
    assert abs(np.corrcoef(y, other)[0, 1]) < 0.02
    assert codec.at_step(0) == codec
    assert codec.at_step(1) == codec.at_step(1) != codec.at_step(2)
    assert hc.get_codec("lattice").at_step(3) == hc.get_codec("lattice")


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("ranks", [1, 2, 7])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_the_sum_is_that_of_the_integers(bits, ranks, dtype):
    parts = [common.gaussian(3001, dtype, seed=r) for r in range(ranks)]
    results = reduce_all(f"lattice:bits={bits}", parts)
    wide = [p.astype(np.float64 if dtype == "float64" else np.float32) for p in parts]
    scale, inverse = model_scale(max(np.abs(p).max() for p in wide), bits, ranks, wide[0].dtype.type)
    qs = [model_integers(p, inverse, bits, ranks, None).astype(np.int64) for p in wide]
    for result, q in zip(results, qs, strict=True):
        assert result.total.dtype == wide[0].dtype
        np.testing.assert_array_equal(
            result.total, (sum(qs).astype(type(scale)) * scale).astype(wide[0].dtype)
        )
        np.testing.assert_array_equal(result.own, (q.astype(type(scale)) * scale).astype(wide[0].dtype))
    half_steps = ranks * float(scale) / 2
    rounding = 1e-6 * np.abs(sum(wide)).max()
    assert np.abs(results[0].total - sum(p.astype(np.float64) for p in wide)).max() <= half_steps + rounding
    mean = reduce_all(f"lattice:bits={bits}", parts, mean=True)[0].total
    np.testing.assert_allclose(mean, results[0].total / ranks, rtol=1e-6)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_no_number_of_ranks_overflows(rounding):
    for ranks in (2, 3, 42, 127):
        parts = [np.array([1.0, -1.0, 0.999, 0.5], np.float32)] * ranks
        for step in range(20 if rounding == "stochastic" else 1):
            total = reduce_all(f"lattice:rounding={rounding}", parts, step=step)[0].total
            np.testing.assert_allclose(total[:2], [ranks, -ranks], rtol=1e-6)
    with pytest.raises(ValueError, match="bits=8 cannot hold the sum of 128 ranks"):
        reduce_all("lattice", [np.ones(3, np.float32)] * 128)
    with pytest.raises(TypeError, match="'int8:block=128' is not linear"):
        reduce_all("int8", [np.ones(3, np.float32)])


def test_ranks_and_steps_draw_different_numbers():
    """Equal data: with one stream for all, the errors of 64 ranks would add up; of different ones they average."""
    x = np.full(20_000, 0.25, np.float32)
    x[0] = 511
    total = reduce_all("lattice:bits=16:rounding=stochastic", [x] * 64)[0].total[1:]
    assert abs(total.mean() - 16) < 0.05
    assert 3 < total.std() < 4  # sqrt(64 * 3 / 16) = 3.46; one stream would give 27.7
    assert derived_seed(1, 2, 3) != derived_seed(1, 3, 2)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_overflow_reaches_all_ranks(bad):
    parts = [common.gaussian(100, seed=r) for r in range(3)]
    parts[1][17] = bad
    for result in reduce_all("lattice", parts):
        assert np.isnan(result.total).all()


def test_messages_add_up():
    codec = hc.get_codec("lattice:bits=16:ranks=4")
    parts = [common.gaussian(777, seed=r) for r in range(4)]
    scale = codec.scale_for(max(float(np.abs(p).max()) for p in parts))
    messages = [codec.encode_with_scale(p, scale) for p in parts]
    total = messages[0]
    for msg in messages[1:]:
        total = codec.add(total, msg)
    want = sum(hc.decode(m).astype(np.float64) for m in messages)
    np.testing.assert_allclose(hc.decode(total), want, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(
        hc.decode(total), reduce_all("lattice:bits=16", parts)[0].total, atol=4.1 * scale
    )
    with pytest.raises(ValueError, match="the sum of 5 contributions, and room for 4"):
        codec.add(total, messages[0])
    with pytest.raises(ValueError, match="scales"):
        codec.add(messages[0], codec.encode_with_scale(parts[0], float(np.float32(2 * scale))))
    with pytest.raises(ValueError, match="too small"):
        codec.encode_with_scale(parts[0], float(np.float32(scale / 50)))
    with pytest.raises(ValueError, match="scale 0 is too small"):
        codec.encode_with_scale(parts[0], 0.0)
    for wrong in (-1.0, np.inf, np.nan, 1e-40, 0.1):
        with pytest.raises(ValueError, match="scale must be"):
            codec.encode_with_scale(parts[0], wrong)
    with pytest.raises(ValueError, match="777 float32 and one of 5 float32"):
        codec.add(messages[0], codec.encode_with_scale(parts[0][:5], scale))
    with pytest.raises(hc.WireError, match="is not"):
        codec.add(messages[0], hc.get_codec("lattice").encode(parts[0]))
    with pytest.raises(hc.CodecMismatchError, match="not floating-point"):
        codec.encode_with_scale(np.arange(3), scale)
    spoilt = codec.encode_with_scale(np.array([np.inf] * 777, np.float32), scale)
    assert np.isnan(hc.decode(codec.add(messages[0], spoilt))).all()
    assert not hc.decode(codec.encode_with_scale(np.zeros(4, np.float32), 0.0)).any()
    tensors = [torch.from_numpy(np.array(m)) for m in messages]
    assert common.bits(codec.add(*tensors[:2])) == common.bits(codec.add(*messages[:2]))


def test_forged_fields():
    codec = hc.get_codec("lattice:bits=16:ranks=2")
    msg = codec.encode(common.gaussian(40))
    for at, value in [
        (0, b"\x09\0\0\0"),
        (0, b"\0\0\0\x80"),
        (4, b"\0\0\0\0"),
        (4, b"\xff\xff\xff\xff"),
        (8, b"\0\0\0\0"),
        (8, b"\3\0\0\0"),
        (12, b"\1\0\0\0"),
        (16, struct.pack("<d", -1.0)),
        (16, struct.pack("<d", np.inf)),
        (16, struct.pack("<d", 0.1)),
    ]:
        bad = msg.copy()
        bad[32 + at : 32 + at + len(value)] = np.frombuffer(value, np.uint8)
        with pytest.raises(hc.WireError, match="malformed lattice payload"):
            hc.decode(common.reseal(bad))


@pytest.mark.parametrize(
    ("params", "what"),
    [
        ({"bits": 7}, "bits must be 8, 16 or 32"),
        ({"bits": True}, "bits must be"),
        ({"rounding": "up"}, "rounding must be one of nearest, stochastic"),
        ({"seed": -1}, "seed must be an integer from 0"),
        ({"ranks": 0}, "ranks must be an integer from 1 to 127"),
        ({"bits": 16, "ranks": 32768}, "ranks must be an integer from 1 to 32767"),
    ],
)
def test_parameters(params, what):
    with pytest.raises(ValueError, match=what):
        hc.get_codec("lattice", **params)

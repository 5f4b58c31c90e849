"""Offsets, stochastic rounding and the Hadamard transform against NumPy models, and what they are for."""

from __future__ import annotations

import numpy as np
import pytest

import hybridcomp as hc
from tests.codecs import common
from tests.codecs.test_quantize import model, packed

U32 = np.uint32


def mix32(h: np.ndarray) -> np.ndarray:
    h = h ^ (h >> U32(16))
    h = h * U32(0x7FEB352D)
    h = h ^ (h >> U32(15))
    h = h * U32(0x846CA68B)
    return h ^ (h >> U32(16))


def random_bits(seed: int, n: int) -> np.ndarray:
    """Return the 32 random bits of elements 0 .. n - 1, as random.hpp says."""
    with np.errstate(over="ignore"):
        a = mix32(U32(seed & 0xFFFFFFFF) + U32(0x9E3779B9))
        b = mix32(a ^ U32(seed >> 32))
        first = mix32(b)
        second = mix32(first + U32(0x9E3779B9))
        h = np.arange(n, dtype=U32) ^ first
        h = h ^ (h >> U32(16))
        h = h * U32(0x7FEB352D)
        h = h ^ second
        h = h ^ (h >> U32(15))
        h = h * U32(0x846CA68B)
        return h ^ (h >> U32(16))


def dither(seed: int, n: int, kind: type) -> np.ndarray:
    return (kind(random_bits(seed, n) >> U32(16)) - kind(32767.5)) * kind(2.0**-16)


@pytest.mark.parametrize("name", common.isas())
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_offsets_are_the_models(bits, rounding, dtype, name):
    rng = np.random.default_rng(bits)
    block, seed = 24, 7 + (5 << 32)
    for n in (1, 23, 24, 25, 1000, 4097):
        x = (rng.standard_normal(n) * np.exp2(rng.uniform(-4, 4, n)) + 3).astype(dtype)
        kind = np.float64 if dtype == "float64" else np.float32
        noise = dither(seed + 1, n, kind) if rounding == "stochastic" else np.zeros(n, kind)
        scales, integers, values = [], [], []
        for at in range(0, n, block):
            part = x[at : at + block].astype(kind)
            low, span = part.min() / kind(2), part.max() / kind(2) - part.min() / kind(2)
            inverse = kind(2**bits - 1) / span if span else kind(0)
            stored = span / kind(2**bits - 1)
            q = np.rint((part / kind(2) - low) * inverse + noise[at : at + block])
            q = np.clip(q, 0, 2**bits - 1).astype(kind)
            scales += [stored, low]
            integers.append(q.astype(np.int32))
            values.append((low + q * stored) * kind(2))
        with common.isa(name):
            msg = hc.get_codec(
                f"int{bits}", block=block, symmetric=False, rounding=rounding, seed=seed
            ).encode(x)
            out = np.empty(n, kind)
            hc.decode(msg, out=out)
        expected = np.array([block, 1], U32).tobytes() + np.array(scales, kind).tobytes()
        assert msg[32:].tobytes() == expected + packed(np.concatenate(integers), bits, block)
        np.testing.assert_array_equal(out, np.concatenate(values))


@pytest.mark.parametrize("name", common.isas())
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("block", [24, 128, 4096])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_stochastic_rounding_is_the_models(bits, block, dtype, name):
    seed = 7 + (5 << 32)
    for n in (1, 23, 127, 128, 129, 1000, 4097):
        x = common.gaussian(n).astype(dtype)
        noise = dither(seed + 1, n, np.float64 if dtype == "float64" else np.float32)
        scales, q, _ = model(x, bits, block, noise)
        with common.isa(name):
            msg = hc.get_codec(f"int{bits}", block=block, rounding="stochastic", seed=seed).encode(x)
        expected = np.array([block, 0], np.uint32).tobytes() + scales.tobytes()
        assert msg[32:].tobytes() == expected + packed(q, bits, block)


def hadamard(x: np.ndarray) -> np.ndarray:
    """Transform in stages of distance 1, 2, 4, ... in x's own type."""
    x = x.copy()
    h = 1
    while h < x.size:
        pairs = x.reshape(-1, 2, h)
        a, b = pairs[:, 0].copy(), pairs[:, 1].copy()
        pairs[:, 0], pairs[:, 1] = a + b, a - b
        h *= 2
    return x


@pytest.mark.parametrize("name", common.isas())
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("block", [8, 16, 64, 2048])
def test_transform_is_the_models(block, dtype, name):
    n, seed = 3 * block + 5, 11
    x = common.gaussian(n, dtype)
    kind = np.float64 if dtype == "float64" else np.float32
    signs = np.where(random_bits(seed, n) >> U32(31), kind(-1), kind(1))
    expected = []
    for at in range(0, n, block):
        part = x[at : at + block].astype(kind)
        whole = part.size == block
        turned = hadamard(part * signs[at : at + block]) if whole else part
        peak = np.abs(turned).max()
        decoded = np.rint(turned * (kind(127) / peak)) * (peak / kind(127))
        expected.append(hadamard(decoded) * kind(1 / block) * signs[at : at + block] if whole else decoded)
    with common.isa(name):
        codec = hc.get_codec("int8", block=block, hadamard=True, seed=seed)
        out = np.empty(n, kind)
        hc.decode(codec.encode(x), out=out)
    np.testing.assert_array_equal(out, np.concatenate(expected))


@pytest.mark.parametrize(
    "spec", ["int4:block=16", "int2:block=64", "int8:symmetric=false", "int2:hadamard=true"]
)
def test_stochastic_rounding_is_unbiased(spec):
    """The mean over seeds is the value: within five deviations, where nearest rounding is far off."""
    x = np.random.default_rng(0).uniform(0.1, 0.2, 512).astype(np.float32)
    x[::16] = 1.0
    trials = 400
    decoded = np.array(
        [
            hc.decode(hc.get_codec(spec, rounding="stochastic", seed=seed).encode(x)).astype(np.float64)
            for seed in range(trials)
        ]
    )
    deviation = decoded.std(axis=0).max() / np.sqrt(trials)
    assert np.abs(decoded.mean(axis=0) - x).max() < 5 * deviation + 1e-6
    assert decoded.std(axis=0).max() > 0


def test_seeds_and_steps_draw_different_numbers():
    x = common.gaussian(4096)
    codec = hc.get_codec("int4:rounding=stochastic")
    messages = {codec.at_step(step).encode(x).tobytes() for step in range(20)}
    assert len(messages) == 20
    assert codec.at_step(0) == codec
    assert codec.at_step(3) is codec.at_step(3)  # a step's messages share it
    kept = codec.at_step(3).encode(x).tobytes()
    assert codec.at_step(4).encode(x).tobytes() != kept
    assert codec.at_step(3).encode(x).tobytes() == kept
    plain = hc.get_codec("int4")
    assert plain.at_step(5) is plain


def test_random_numbers_belong_to_elements_not_to_blocks():
    """Equal blocks round differently, and alike wherever a chunk or a thread begins."""
    x = np.tile(common.gaussian(128), 1000)
    y = hc.decode(hc.get_codec("int4:rounding=stochastic").encode(x)).reshape(1000, 128)
    assert len(np.unique(y, axis=0)) == 1000


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_offsets_help_one_sided_data(bits):
    x = np.abs(common.gaussian(1 << 14)) + 5
    errors = {
        flag: common.relative_error(x, hc.decode(hc.get_codec(f"int{bits}", symmetric=flag).encode(x)))
        for flag in (True, False)
    }
    assert errors[False] < 0.4 * errors[True]


def test_offsets_give_int2_four_levels():
    x = common.gaussian(1 << 14)
    plain = common.relative_error(x, hc.decode(hc.get_codec("int2:block=32").encode(x)))
    offsets = common.relative_error(x, hc.decode(hc.get_codec("int2:block=32:symmetric=false").encode(x)))
    assert offsets < 0.6 * plain


def test_the_transform_spreads_outliers():
    x = common.gaussian(1 << 14)
    x[::128] = 100
    plain = hc.decode(hc.get_codec("int4").encode(x))
    turned = hc.decode(hc.get_codec("int4:hadamard=true").encode(x))
    small = np.arange(x.size) % 128 != 0
    assert np.linalg.norm(plain[small]) < 0.01 * np.linalg.norm(x[small])  # all but the outliers are lost
    assert common.relative_error(x, turned) < common.relative_error(x, plain)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_offsets_at_the_ends_of_the_range(bits):
    codec = hc.get_codec(f"int{bits}:block=8:symmetric=false")
    largest = np.finfo(np.float32).max
    for low, high in ((-largest, largest), (0, largest), (-largest, 0), (largest / 2, largest), (1e-45, 1.0)):
        x = (float(low) + (float(high) - float(low)) * np.arange(64) / 63).astype(np.float32)
        x[0], x[-1] = low, high
        y = hc.decode(codec.encode(x))
        assert np.isfinite(y).all()
        assert np.abs(y.astype(np.float64) - x).max() <= 0.5001 * (float(high) - float(low)) / (2**bits - 1)
    for value in (largest, -largest, 1.0, 2.0**-100, 0.0):
        np.testing.assert_array_equal(
            hc.decode(codec.encode(np.full(9, value, np.float32))), np.float32(value)
        )
    assert not hc.decode(codec.encode(np.full(9, 1e-38, np.float32))).any()


def test_small_and_zero_blocks_with_the_transform():
    codec = hc.get_codec("int8:block=64:hadamard=true")
    for value in (0.0, 1e-45, 1e-38, 2.0**-101, 1e-26):
        assert not hc.decode(codec.encode(np.full(64, value, np.float32))).any()
    y = hc.decode(codec.encode(np.full(64, 1e-20, np.float32)))
    np.testing.assert_allclose(y, 1e-20, rtol=0.05)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"rounding": "up"}, "rounding must be one of nearest, stochastic, not 'up'"),
        ({"seed": -1}, "seed must be an integer from 0"),
        ({"seed": 2**63}, "seed must be an integer from 0"),
        ({"symmetric": 1}, "symmetric must be true or false, not 1"),
        ({"hadamard": "yes"}, "hadamard must be true or false, not 'yes'"),
        ({"hadamard": True, "block": 24}, "power of two from 8 to 2048 with hadamard=true, not 24"),
        ({"hadamard": True, "block": 4096}, "power of two from 8 to 2048"),
    ],
)
def test_parameters_out_of_range(params, message):
    with pytest.raises(ValueError, match=message):
        hc.get_codec("int4", **params)


def test_specs_leave_defaults_out():
    assert hc.get_codec("int4:block=64:rounding=nearest:symmetric=true").spec == "int4:block=64"
    text = "int4:block=64:rounding=stochastic:seed=3:symmetric=false:hadamard=true"
    assert hc.get_codec(text).spec == text


@pytest.mark.parametrize("flags", [4, 8, 1 << 31, 0xFFFFFFFF])
def test_hostile_flags(flags):
    msg = hc.get_codec("int8:block=8").encode(common.gaussian(64))
    msg[36:40] = np.frombuffer(flags.to_bytes(4, "little"), np.uint8)
    with pytest.raises(hc.WireError, match="reserved bits"):
        hc.decode(common.reseal(msg))


def test_hostile_transform_of_a_long_block():
    msg = hc.get_codec("int8:block=65536").encode(common.gaussian(64))
    msg[36] = 2
    with pytest.raises(hc.WireError):
        hc.decode(common.reseal(msg))

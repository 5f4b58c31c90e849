"""int8 and int4 against a NumPy model, and their errors."""

from __future__ import annotations

import numpy as np
import pytest

import hybridcomp as hc
from tests.codecs import common


def model(
    x: np.ndarray, bits: int, block: int, noise: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return scales, integers and decoded values, by the arithmetic that quantize.py describes.

    Integers are the nearest ones, or with ``noise`` those nearest after it is added, within the codec's limits.
    """
    kind = np.float64 if x.dtype == np.float64 else np.float32
    limit = kind(2 ** (bits - 1) - 1)
    smallest = kind(2.0**-900 if kind is np.float64 else 2.0**-100)
    values = x.astype(kind)
    scales, integers = [], []
    for start in range(0, x.size, block):
        part = values[start : start + block]
        peak = np.max(np.abs(part)) if np.isfinite(part).all() else kind(np.nan)
        if not np.isfinite(peak) or peak < smallest:
            scales.append(kind(np.nan) if not np.isfinite(peak) else kind(0))
            integers.append(np.zeros(part.size, np.int8))
        else:
            scales.append(peak / limit)
            exact = part * (limit / peak)
            if noise is not None:
                exact = np.clip(exact + noise[start : start + block], -limit, limit)
            integers.append(np.rint(exact).astype(np.int8))
    q = np.concatenate(integers) if integers else np.empty(0, np.int8)
    s = np.array(scales, kind)
    return s, q, q.astype(kind) * np.repeat(s, block)[: x.size]


def packed(q: np.ndarray, bits: int, block: int) -> bytes:
    """Return the integers as the wire holds them."""
    out = bytearray()
    per_byte = 8 // bits
    for start in range(0, q.size, block):
        part = q[start : start + block].astype(np.int32)
        size = -(-part.size // per_byte)
        fields = np.zeros((per_byte, size), np.int32)
        fields.reshape(-1)[: part.size] = part & (2**bits - 1)
        out += np.sum(fields << (np.arange(per_byte) * bits)[:, None], axis=0).astype(np.uint8).tobytes()
    return bytes(out)


@pytest.mark.parametrize("name", common.isas())
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("block", [8, 24, 64, 128, 1000, 2048, 2056, 65536])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_message_is_the_models(bits, block, dtype, name):
    rng = np.random.default_rng(block)
    for n in (1, 5, 127, 128, 129, 1001, 4097, 66001):
        x = (rng.standard_normal(n) * np.exp2(rng.uniform(-12, 12, n))).astype(dtype)
        scales, q, values = model(x, bits, block)
        with common.isa(name):
            msg = hc.get_codec(f"int{bits}:block={block}").encode(x)
            out = np.empty(n, scales.dtype)
            hc.decode(msg, out=out)
        expected = block.to_bytes(4, "little") + bytes(4) + scales.tobytes() + packed(q, bits, block)
        assert msg[32:].tobytes() == expected
        np.testing.assert_array_equal(out, values)


@pytest.mark.parametrize(("spec", "limit"), [("int8", 0.0075), ("int4", 0.13)])
@pytest.mark.parametrize("dtype", common.FLOATS)
def test_error_on_gaussian_data(spec, limit, dtype):
    x = common.gaussian(1 << 16, dtype)
    error = common.relative_error(x, hc.decode(hc.get_codec(spec).encode(x)))
    assert limit / 2 < error < limit


@pytest.mark.parametrize(("spec", "steps"), [("int8:block=64", 127), ("int4:block=64", 7)])
def test_error_of_each_element(spec, steps):
    """The error is at most half a step of the block's scale, and a little for rounding the scale."""
    x = common.gaussian(6400)
    y = hc.decode(hc.get_codec(spec).encode(x))
    peaks = np.abs(x.reshape(-1, 64)).max(axis=1).repeat(64)
    assert np.all(np.abs(x - y) <= peaks / steps * 0.50001)


@pytest.mark.parametrize("spec", ["int8:block=16", "int4:block=16"])
def test_only_the_block_of_a_nan_is_lost(spec):
    for bad in (np.nan, np.inf, -np.inf, np.frombuffer(b"\x01\x00\x80\x7f", np.float32)[0]):
        x = common.gaussian(64)
        x[20] = bad
        y = hc.decode(hc.get_codec(spec).encode(x))
        assert np.isnan(y[16:32]).all()
        assert np.isfinite(np.delete(y, np.s_[16:32])).all()


@pytest.mark.parametrize("spec", ["int8", "int4"])
def test_extreme_magnitudes(spec):
    codec = hc.get_codec(spec)
    largest = np.finfo(np.float32).max
    for peak in (largest, largest / 2, 1.0, 2.0**-99, 2.0**-100):
        x = np.linspace(-1, 1, 100, dtype=np.float32) * np.float32(peak)
        y = hc.decode(codec.encode(x))
        assert np.isfinite(y).all()
        assert y[-1] == pytest.approx(peak, rel=1e-6)
    for peak in (np.nextafter(np.float32(2.0**-100), np.float32(0)), 1e-38, 1e-45, 0.0):
        y = hc.decode(codec.encode(np.full(100, peak, np.float32)))
        assert not y.any()
    for peak in (np.finfo(np.float64).max, 1e-200, 2.0**-900):
        y = hc.decode(codec.encode(np.full(100, peak)))
        np.testing.assert_allclose(y, peak, rtol=1e-15)
    assert not hc.decode(codec.encode(np.full(100, 2.0**-901))).any()


def test_ties_round_to_even():
    x = np.array([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5], np.float32)
    y = hc.decode(hc.get_codec("int8:block=8").encode(x))
    np.testing.assert_array_equal(y, [127, 0, 2, 2, 0, -2, -2, 126])


def test_exactly_representable_data_is_exact():
    rng = np.random.default_rng(1)
    x = rng.integers(-7, 8, 1000).astype(np.float32)
    x[::8] = 7
    np.testing.assert_array_equal(hc.decode(hc.get_codec("int4:block=8").encode(x)), x)
    x = rng.integers(-127, 128, 1000).astype(np.float64)
    x[::8] = -127
    np.testing.assert_array_equal(hc.decode(hc.get_codec("int8:block=8").encode(x)), x)


def test_sizes():
    int8, int4, int2 = (hc.get_codec(f"int{bits}:block=128") for bits in (8, 4, 2))
    assert int8.bound(0) == int4.bound(0) == int2.bound(0) == 40
    assert int2.bound(129) == 40 + 8 + 32 + 1
    assert hc.get_codec("int4:block=128:symmetric=false").bound(129) == 40 + 16 + 64 + 1
    assert hc.get_codec("int4:block=128:hadamard=true").bound(129) == 48 + 8 + 64 + 1
    assert int8.bound(129) == 40 + 8 + 129
    assert int4.bound(129) == 40 + 8 + 64 + 1
    assert int8.bound(256, "float64") == 40 + 16 + 256
    assert int8.bound(256, "bfloat16") == 40 + 8 + 256
    assert int8.ratio(1 << 20) == pytest.approx(4 / (1 + 4 / 128), rel=1e-4)


@pytest.mark.parametrize("block", [0, 4, 7, 12, -8, 65544, 128.0, True, "128"])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_blocks_out_of_range(name, block):
    with pytest.raises(ValueError, match="block must be a multiple of 8 from 8 to 65536"):
        hc.get_codec(name, block=block)


@pytest.mark.parametrize("block", [0, 4, 12, 65544, 2**31, 2**32 - 1])
def test_hostile_blocks(block):
    msg = hc.get_codec("int8:block=8").encode(common.gaussian(64))
    msg[32:36] = np.frombuffer(block.to_bytes(4, "little"), np.uint8)
    with pytest.raises(hc.WireError, match="block size"):
        hc.decode(common.reseal(msg))


def test_hostile_scales_and_integers_decode_to_numbers():
    """Any scale and any integer is a value: -128 too, which no encoder writes."""
    msg = hc.get_codec("int8:block=8").encode(common.gaussian(8))
    msg[44:52] = 0x80
    scale = msg[40:44].view(np.float32)[0]
    np.testing.assert_array_equal(hc.decode(common.reseal(msg)), np.full(8, np.float32(-128) * scale))

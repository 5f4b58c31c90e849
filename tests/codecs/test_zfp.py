"""zfp against the zfp library: the same streams and the same values, bit for bit, in both directions."""

from __future__ import annotations

import numpy as np
import pytest
import zfpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import hybridcomp as hc
from tests.codecs import common

FLOATS = {np.float32: (11, 128), np.float64: (14, 256)}  # bits of a block: fewest, most
TAILS = [1, 2, 3, 4, 5, 63, 64, 65, 255, 256, 1027]


def zfp_stream(x: np.ndarray, rate: float) -> bytes:
    """Return the library's stream of an array of one dimension."""
    return zfpy.compress_numpy(x, rate=rate, write_header=False)


def zfp_values(stream: bytes, n: int, dtype: type, rate: float) -> np.ndarray:
    """Return the library's values of a stream."""
    kind = zfpy.type_double if dtype is np.float64 else zfpy.type_float
    return np.asarray(zfpy._decompress(stream, kind, (n,), rate=rate))


def check_both_ways(x: np.ndarray, rate: float) -> None:
    """Check that the library writes and reads the same as the codec."""
    codec = hc.get_codec("zfp", rate=rate)
    dtype = x.dtype.type
    msg = codec.encode(x)
    stream = codec.stream(msg).tobytes()
    theirs = zfp_stream(x, codec.rate)
    assert stream == theirs
    values = zfp_values(stream, x.size, dtype, codec.rate)
    assert hc.decode(msg).tobytes() == values.tobytes()
    made = codec.from_stream(theirs, x.size, dtype)
    assert made.tobytes() == msg.tobytes()


def samples(n: int, dtype: type, rng: np.random.Generator) -> list[np.ndarray]:
    """Return data of several kinds and scales, none below what zfp's scale can carry."""
    noise = rng.standard_normal(n)
    low, high = (-90, 120) if dtype is np.float32 else (-900, 1000)
    kinds = [
        noise,
        noise * np.exp2(rng.uniform(-60, 60, n)),
        noise * 2.0 ** rng.integers(low, high),
        np.where(rng.random(n) < 0.8, 0, noise),
        np.cumsum(noise) / 100,
        np.round(noise),
        np.sin(np.arange(n) / 50),
    ]
    return [k.astype(dtype) for k in kinds]


@pytest.mark.parametrize("name", common.isas())
@pytest.mark.parametrize("dtype", FLOATS)
def test_streams_are_zfps_at_every_rate(dtype, name):
    rng = np.random.default_rng(1)
    least, most = FLOATS[dtype]
    with common.isa(name):
        for bits in range(least, most + 1):
            n = TAILS[bits % len(TAILS)]
            for x in samples(n, dtype, rng):
                check_both_ways(x, bits / 4)


@pytest.mark.parametrize("rate", [3.5, 7.25, 8, 16, 31.75])
@pytest.mark.parametrize("dtype", FLOATS)
def test_streams_are_zfps_for_every_tail(dtype, rate):
    rng = np.random.default_rng(2)
    for n in [*range(1, 70), 2047, 2048, 2049, 9001]:
        check_both_ways(rng.standard_normal(n).astype(dtype), rate)


@settings(deadline=None, max_examples=200)
@given(
    x=hnp.arrays(np.float32, st.integers(1, 200), elements=st.floats(-(2.0**126), 2.0**126, width=32)),
    bits=st.integers(11, 128),
)
def test_any_floats(x, bits):
    x[np.abs(x) < 2.0**-80] = 0
    check_both_ways(x, bits / 4)


@settings(deadline=None, max_examples=100)
@given(
    x=hnp.arrays(np.float64, st.integers(1, 100), elements=st.floats(-1e308, 1e308)),
    bits=st.integers(14, 256),
)
def test_any_doubles(x, bits):
    x[np.abs(x) < 2.0**-900] = 0
    check_both_ways(x, bits / 4)


@settings(deadline=None, max_examples=200)
@given(data=st.data(), dtype=st.sampled_from(list(FLOATS)), n=st.integers(1, 150))
def test_any_bits_decode_as_in_zfp(data, dtype, n):
    least, most = FLOATS[dtype]
    codec = hc.get_codec("zfp", rate=data.draw(st.integers(least, most)) / 4)
    size = codec.bound(n, dtype) - 40
    stream = data.draw(st.binary(min_size=size, max_size=size))
    theirs = zfp_values(stream, n, dtype, codec.rate)
    for name in common.isas():
        with common.isa(name):
            assert hc.decode(codec.from_stream(stream, n, dtype)).tobytes() == theirs.tobytes()


@pytest.mark.parametrize("name", common.isas())
@pytest.mark.parametrize("dtype", FLOATS)
def test_random_bits_decode_as_in_zfp(dtype, name):
    """All exponents, those that zfp's scale makes denormal or zero among them, and runs cut off by the end."""
    rng = np.random.default_rng(3)
    least, most = FLOATS[dtype]
    with common.isa(name):
        for bits in range(least, most + 1):
            codec = hc.get_codec("zfp", rate=bits / 4)
            stream = rng.bytes(codec.bound(1000, dtype) - 40)
            theirs = zfp_values(stream, 1000, dtype, codec.rate)
            assert hc.decode(codec.from_stream(stream, 1000, dtype)).tobytes() == theirs.tobytes()


@pytest.mark.parametrize("name", common.isas())
@pytest.mark.parametrize("dtype", FLOATS)
def test_small_exponents(dtype, name):
    """Write zfp's streams where its scale is finite, and below, where it overflows, hold the values still."""
    least = -97 if dtype is np.float32 else -961  # frexp's least exponent for which 2^(30 - e) is finite
    end = -119 if dtype is np.float32 else -1012  # the last whose scale zfp's decoder does not flush to zero
    smallest = -149 if dtype is np.float32 else -1074
    rate = 24 if dtype is np.float32 else 53
    mantissas = np.array([0.75, -0.5, 0.625, 0.5625] * 16)
    codec = hc.get_codec("zfp", rate=rate)
    with common.isa(name):
        for e in range(least + 3, smallest, -1):
            x = np.ldexp(mantissas, e).astype(dtype)
            msg = codec.encode(x)
            theirs = zfp_values(codec.stream(msg).tobytes(), x.size, dtype, rate)
            y = hc.decode(msg)
            assert y.tobytes() == theirs.tobytes()
            if e >= least:
                assert codec.stream(msg).tobytes() == zfp_stream(x, rate)
            if e >= end:
                np.testing.assert_allclose(y, x, rtol=2.0**-12, atol=2.0 ** (smallest + 4))
            else:
                assert not y.any()


@pytest.mark.parametrize("name", common.isas())
def test_denormals_beside_large_numbers(name):
    """A denormal in a block whose exponent is not the smallest is below the integers' last bit, or exact."""
    with common.isa(name):
        for e in (-97, -96, -95, -94, -90, 0):
            x = np.ldexp(np.array([1, 1.5, -1.25, 0.75]), e - 1).astype(np.float32)
            x[2] = np.float32(1.1e-38)
            check_both_ways(np.tile(x, 20), 32)


@pytest.mark.parametrize("name", common.isas())
@pytest.mark.parametrize(("dtype", "rate"), [(np.float32, 2.75), (np.float64, 3.5)])
def test_a_block_that_is_not_finite_decodes_to_infinity(dtype, rate, name):
    """The block does so at the lowest rate already, in zfp too; the blocks beside it stay what zfp makes them."""
    for value in (np.nan, np.inf, -np.inf):
        for r in (rate, rate + 0.25, rate + 0.5, 8, 32):
            for n in (1, 2, 3, 100, 103):
                codec = hc.get_codec("zfp", rate=r)
                x = common.gaussian(n, np.dtype(dtype).name)
                finite = zfp_values(zfp_stream(x, r), n, dtype, r)
                at = n // 2
                x[at] = value
                with common.isa(name):
                    msg = codec.encode(x)
                    y = hc.decode(msg)
                assert zfp_values(codec.stream(msg).tobytes(), n, dtype, r).tobytes() == y.tobytes()
                block = slice(at // 4 * 4, at // 4 * 4 + 4)
                assert np.isinf(y[block]).all()
                np.testing.assert_array_equal(np.delete(y, block), np.delete(finite, block))


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_numbers_are_zfps(dtype):
    largest = np.finfo(dtype).max
    for rate in (4, 8, 13, 32):
        for x in ([largest] * 4, [largest, -largest, largest, 1], [largest / 2, largest], [-largest] * 3):
            check_both_ways(np.array(x, dtype), rate)


def test_a_stream_by_hand():
    """Four ones at 8 bits: "not zero", exponent 1 + 127, then a mean of 2^29 in base -2 (bits 30 and 29)."""
    codec = hc.get_codec("zfp:rate=8")
    planes = [0]  # plane 31: none
    planes += [1, 1, 0]  # plane 30: some; the first; no more
    planes += [1, 0]  # plane 29: the first's bit; no more
    bits = [1, *(int(b) for b in f"{128:08b}"[::-1]), *planes]
    word = sum(bit << i for i, bit in enumerate(bits))
    x = np.ones(4, np.float32)
    stream = codec.stream(codec.encode(x)).tobytes()
    assert stream == word.to_bytes(8, "little") == zfp_stream(x, 8)


def test_halves_are_coded_as_floats():
    codec = hc.get_codec("zfp:rate=12")
    for dtype in ("float16", "bfloat16"):
        x = common.gaussian(5001, dtype)
        msg = codec.encode(x)
        assert codec.stream(msg).tobytes() == zfp_stream(common.wide(x).astype(np.float32), 12)


@pytest.mark.parametrize(
    ("dtype", "rate", "limit"),
    [
        ("float32", 8, 0.06),
        ("float32", 16, 2.3e-4),
        ("float32", 32, 1.4e-9),
        ("float64", 8, 0.1),
        ("float64", 16, 4e-4),
        ("float64", 32, 6e-9),
        ("float16", 8, 0.06),
    ],
)
def test_error_on_gaussian_data(dtype, rate, limit):
    x = common.gaussian(1 << 14, dtype)
    error = common.relative_error(x, hc.decode(hc.get_codec("zfp", rate=rate).encode(x)))
    assert limit / 2 < error < limit


def test_sizes():
    codec = hc.get_codec("zfp:rate=8")
    assert codec.bound(0) == 40
    assert codec.bound(1) == codec.bound(8) == 48
    assert codec.bound(1 << 20) == 40 + (1 << 20)
    assert hc.get_codec("zfp:rate=7.25").bound(100, "float64") == 40 + 96
    assert codec.ratio(1 << 20) == pytest.approx(4, rel=1e-4)
    assert codec.stream(codec.encode(np.empty(0, np.float32))).size == 0


def test_rates():
    for given_, meant in ((8.0, 8), (7.3, 7.25), (7.1, 7), (7.125, 7.25), (32, 32)):
        codec = hc.get_codec("zfp", rate=given_)
        assert codec.rate == meant
        assert type(codec.rate) is type(meant)
    assert hc.get_codec("zfp:7.3") == hc.get_codec("zfp:rate=7.25")
    assert hc.get_codec("zfp").spec == "zfp:rate=8"


@pytest.mark.parametrize(
    "rate", [2.7, 0, -8, 64.1, 1000, float("nan"), float("inf"), "8", "high", True, None]
)
def test_rates_out_of_range(rate):
    with pytest.raises(ValueError, match=r"rate must be a number of bits from 2.75 to 64, not"):
        hc.get_codec("zfp", rate=rate)


@pytest.mark.parametrize(
    ("rate", "dtype"), [(32.25, "float32"), (33, "float16"), (64, "bfloat16"), (3.25, "float64")]
)
def test_rates_that_a_dtype_does_not_have(rate, dtype):
    codec = hc.get_codec("zfp", rate=rate)
    with pytest.raises(hc.CodecMismatchError, match=f"rate {rate} is not one of {dtype}'s, from [23]"):
        codec.encode(common.gaussian(10, dtype))
    with pytest.raises(ValueError, match="cannot carry such a stream"):
        codec.from_stream(b"", 0, dtype)


@pytest.mark.parametrize("bits", [0, 8, 10, 129, 256, 2**31, 2**32 - 1])
def test_hostile_bits_of_a_block(bits):
    msg = hc.get_codec("zfp:rate=8").encode(common.gaussian(64))
    msg[32:36] = np.frombuffer(bits.to_bytes(4, "little"), np.uint8)
    with pytest.raises(hc.WireError, match="bits per block"):
        hc.decode(common.reseal(msg))


def test_hostile_lengths():
    codec = hc.get_codec("zfp:rate=8")
    for change in (28, 33, 64):
        msg = codec.encode(common.gaussian(64))
        msg[32] = change
        with pytest.raises(hc.WireError, match="length"):
            hc.decode(common.reseal(msg))
    msg = codec.encode(common.gaussian(64))
    msg[36] = 1
    with pytest.raises(hc.WireError, match="reserved"):
        hc.decode(common.reseal(msg))


def test_streams_and_messages():
    codec = hc.get_codec("zfp:rate=8")
    x = common.gaussian(100)
    msg = codec.encode(x)
    assert np.shares_memory(codec.stream(msg), msg)
    with pytest.raises(hc.WireError, match="is not"):
        codec.stream(hc.get_codec("zfp:rate=9").encode(x))
    for length in (96, 112):
        with pytest.raises(ValueError, match=f"stream has {length} bytes, not the 104 of n=100"):
            codec.from_stream(bytes(length), 100)
    with pytest.raises(ValueError, match="n=-1"):
        codec.from_stream(b"", -1)

"""bounded against a NumPy model; above all, that no element is ever off by more than the bound."""

from __future__ import annotations

import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import hybridcomp as hc
from tests.codecs import common
from tests.codecs.bounded_model import BLOCK, CONSTANT, DELTA, RAW, forged, model, model_step

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")

EXACT = np.longdouble  # 64 bits of mantissa: differences of close doubles are exact, others nearly


def effective_bound(msg: np.ndarray) -> float:
    """Return the absolute bound that a message carries."""
    return float(msg[32:40].view(np.float64)[0])


def codes_of(msg: np.ndarray) -> np.ndarray:
    """Return the code of each block."""
    count = int(msg[8:16].view(np.uint64)[0])
    return msg[48 : 48 + -(-count // BLOCK)]


def widened(x: np.ndarray) -> np.ndarray:
    """Return values of fp32, fp64, fp16, or of bf16 (a torch tensor), exactly."""
    return common.wide(x).astype(EXACT)


def check_bound(x, spec: str) -> np.ndarray:
    """Encode and decode on every instruction set; check each element. Returns the message."""
    codec = hc.get_codec(spec)
    messages = set()
    with np.errstate(all="ignore"):
        exact = widened(x)
        finite = np.isfinite(exact)
        for name in common.isas():
            with common.isa(name):
                msg = np.asarray(codec.encode(x))
                y = hc.decode(torch.from_numpy(msg) if isinstance(x, torch.Tensor) else msg)
                double = np.empty(exact.size, np.float64)
                hc.decode(msg, out=double)
            messages.add(msg.tobytes())
            bound = EXACT(effective_bound(msg))
            for got in (widened(y), double.astype(EXACT)):
                assert np.all(np.abs(exact - got)[finite] <= bound)
            kept = np.frombuffer(common.bits(y), np.uint8).reshape(exact.size, -1)
            given_bits = np.frombuffer(common.bits(x), np.uint8).reshape(exact.size, -1)
            np.testing.assert_array_equal(kept[~finite], given_bits[~finite])
    assert len(messages) == 1
    return msg


def shapes_of_data(n: int, dtype: str) -> list[np.ndarray]:
    """Return noise, smooth data far from zero, constants, zeros, wild magnitudes, and some that are not finite."""
    rng = np.random.default_rng(n)
    noise = rng.standard_normal(n)
    wild = noise * np.exp2(rng.uniform(-14, 10, n))
    broken = noise.copy()
    broken[:: max(1, n // 3)] = np.nan
    broken[n // 2] = -np.inf
    mixed = np.where(np.arange(n) // 100 % 2, noise, 3.0)
    smooth = 50 + np.sin(np.arange(n) / 100)
    return [a.astype(dtype) for a in (noise, smooth, np.full(n, 7.3), np.zeros(n), -wild, broken, mixed)]


@pytest.mark.parametrize("name", common.isas())
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("spec", ["bounded", "bounded:abs=0.003", "bounded:rel=1e-7", "bounded:abs=1e-39"])
def test_message_is_the_models(spec, dtype, name):
    for n in (1, 3, 20, 63, 64, 65, 1000):
        for x in shapes_of_data(n, dtype):
            payload, values = model(x, spec)
            with common.isa(name):
                msg = hc.get_codec(spec).encode(x)
                y = hc.decode(msg)
            assert msg[32:].tobytes() == payload
            np.testing.assert_array_equal(y, values)


# -- the bound -------------------------------------------------------------------------------------------

TYPES = {"float32": np.uint32, "float64": np.uint64, "float16": np.uint16}


@st.composite
def adversarial(draw):
    """Draw an array of any bit patterns, of numbers near multiples of the bound, or of numbers of any magnitude;
    and the bound."""
    dtype = draw(st.sampled_from(sorted(TYPES)))
    kind, unsigned = np.dtype(dtype), TYPES[dtype]
    bound = draw(
        st.one_of(
            st.floats(1e-300, 1e300),
            st.floats(-300, 300).map(lambda e: 10.0**e),
            st.integers(-140, 130).map(lambda e: 2.0**e),
            st.sampled_from([5e-324, 1e-310, 1.79e308, 1e-45, 1.17549435e-38, 0.5, 1e-3]),
        )
    )
    seed = draw(st.integers(0, 2**32 - 1))
    n = draw(st.integers(1, 200))
    rng = np.random.default_rng(seed)
    with np.errstate(all="ignore"):
        match draw(st.sampled_from(["bits", "near", "walk", "special", "mixed"])):
            case "bits":
                x = rng.integers(0, np.iinfo(unsigned).max, n, unsigned, endpoint=True).view(kind)
            case "near":  # at and beside the places where the integer changes
                half = rng.integers(-(10 ** rng.integers(1, 8)), 10 ** rng.integers(1, 8), n) * bound
                near = half.astype(kind)
                x = np.nextafter(near, rng.choice([-np.inf, 0, np.inf], n).astype(kind)).astype(kind)
                x = np.where(rng.random(n) < 0.3, near, x)
            case "walk":
                x = np.cumsum(rng.standard_normal(n) * bound * 10.0 ** rng.uniform(-2, 4)).astype(kind)
            case "special":
                info = np.finfo(kind)
                values = [
                    0,
                    -0.0,
                    info.max,
                    -info.max,
                    info.tiny,
                    -info.smallest_subnormal,
                    np.nan,
                    np.inf,
                    1,
                ]
                x = rng.choice(np.array(values, kind), n)
            case _:
                signs = rng.choice([-1.0, 1.0], n)
                x = (signs * bound * 10.0 ** rng.uniform(-3, 12, n)).astype(kind)
    return x, bound


@settings(deadline=None, max_examples=400)
@given(adversarial(), st.booleans(), st.sampled_from(["planes", "lz,vector=5", "huffman"]))
@example((np.array([3e38, -3e38, 3.4028235e38], np.float32), 1e-3), True, "planes")
@example((np.array([1.7e308, -1.7e308], np.float64), 0.9), True, "huffman")
@example((np.array([1e-45, -1e-45, 0.0], np.float32), 1e-45), False, "lz")
def test_no_element_is_off_by_more(case, relative, coder):
    x, bound = case
    msg = check_bound(x, f"bounded:{'rel' if relative else 'abs'}={bound!r},coder={coder}")
    if not relative:
        assert effective_bound(msg) == bound


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_number_of_16_bits(dtype):
    """All bit patterns in order, shuffled, and every fifth, at bounds of many sizes."""
    patterns = np.arange(65536, dtype=np.uint16)
    shuffled = np.random.default_rng(0).permutation(patterns)
    kind = torch.float16 if dtype == "float16" else torch.bfloat16
    for data in (patterns, shuffled):
        x = torch.from_numpy(data.view(np.int16).copy()).view(kind)
        for bound in (1e-9, 1e-5, 0.00037, 0.01, 0.7, 1.0, 33.0, 70000.0, 1e30):
            check_bound(x, f"bounded:abs={bound}")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_short_types_need_no_raw_blocks(dtype):
    """Rounding y to a type that is not much finer than the step must not push it over the bound."""
    x = common.gaussian(1 << 14, dtype)
    for bound in np.geomspace(0.004, 0.04, 23):
        assert not np.any(codes_of(np.asarray(hc.get_codec("bounded", abs=float(bound)).encode(x))) >= RAW)


def test_the_relative_bound_is_that_of_the_finite_values():
    x = np.array([np.nan, 2, -6, np.inf, -np.inf, 1e-42, 0], np.float32)
    assert effective_bound(hc.get_codec("bounded:rel=0.25").encode(x)) == 2.0
    for dtype in ("float64", "float16"):
        values = np.concatenate([common.gaussian(5000, dtype), np.array([7, -5, np.nan], dtype)])
        assert effective_bound(hc.get_codec("bounded:rel=0.5").encode(values)) == 6.0
    assert effective_bound(hc.get_codec("bounded").encode(np.full(9, np.nan, np.float32))) == 0
    assert effective_bound(hc.get_codec("bounded").encode(np.zeros(0, np.float32))) == 0
    late = np.full(600_000, np.nan, np.float32)  # some parts hold nothing finite
    late[400_000:] = np.linspace(5, 7, 200_000)
    assert effective_bound(hc.get_codec("bounded:rel=0.5").encode(late)) == 1.0
    largest = np.finfo(np.float64).max
    both = np.array([largest, -largest])
    assert effective_bound(hc.get_codec("bounded:rel=0.25").encode(both)) == largest / 2
    assert effective_bound(hc.get_codec("bounded:rel=1e300").encode(both)) == largest


def test_payloads_of_nan_are_kept():
    rng = np.random.default_rng(4)
    x = common.gaussian(1000)
    nans = (rng.integers(1, 1 << 23, 50) | 0x7F800000 | (rng.integers(0, 2, 50) << 31)).astype(np.uint32)
    x.view(np.uint32)[rng.choice(1000, 50, replace=False)] = nans
    y = hc.decode(hc.get_codec("bounded").encode(x))
    np.testing.assert_array_equal(y.view(np.uint32)[np.isnan(x)], x.view(np.uint32)[np.isnan(x)])


def test_decoding_the_decoded_changes_nothing():
    x = common.gaussian(10000)
    codec = hc.get_codec("bounded:abs=0.01")
    once = hc.decode(codec.encode(x))
    np.testing.assert_array_equal(hc.decode(codec.encode(once)), once)


# -- sizes -----------------------------------------------------------------------------------------------


def test_smooth_data_and_constants_are_small():
    n = 1 << 16
    smooth = (100 + np.sin(np.arange(n) / 300)).astype(np.float32)
    assert smooth.nbytes / hc.get_codec("bounded").encode(smooth).size > 12
    constant = np.full(n, 3.7, np.float32)
    for spec in ("bounded", "bounded:abs=1e-3", "bounded:abs=1e-60"):
        msg = hc.get_codec(spec).encode(constant)
        assert constant.nbytes / msg.size > 50
        assert np.abs(hc.decode(msg) - constant).max() <= effective_bound(msg)
    zeros = hc.get_codec("bounded:abs=1e-60").encode(-np.zeros(n, np.float64))
    assert zeros.size == 48 + n // 64


def test_noise_takes_the_bits_of_its_largest():
    x = common.gaussian(1 << 16)
    msg = hc.get_codec("bounded:abs=0.01").encode(x)
    assert set(codes_of(msg)) <= {8, 9}
    assert 3.5 < x.nbytes / msg.size < 4


@pytest.mark.parametrize("dtype", common.FLOATS)
def test_size_of_the_worst_case(dtype):
    codec = hc.get_codec("bounded:abs=1e-300")
    for n in (0, 1, 63, 64, 65, 8191, 8192, 8193, 100001):
        x = common.gaussian(n, dtype)
        msg = codec.encode(x)
        size = 8 if dtype == "float64" else 4 if dtype == "float32" else 2
        assert codec.bound(n, dtype) == 48 + -(-n // 64) + n * size
        assert codec.bound(n, dtype) - len(msg) <= 64 * size  # two equal elements at the end make a constant
        assert common.bits(hc.decode(msg)) == common.bits(x)


# -- parameters and hostile bytes ------------------------------------------------------------------------


def test_parameters():
    assert hc.get_codec("bounded").spec == hc.get_codec("bounded:1e-3").spec == "bounded:rel=0.001"
    codec = hc.get_codec("bounded:abs=2")
    assert (codec.abs, codec.rel, codec.spec) == (2.0, None, "bounded:abs=2.0")
    with pytest.raises(ValueError, match="give rel or abs, not both"):
        hc.get_codec("bounded:rel=0.1,abs=0.2")
    assert hc.get_codec("bounded:coder=planes") == hc.get_codec("bounded")
    rows = hc.get_codec("bounded:abs=2,coder=lz")
    assert (rows.coder, rows.vector, rows.spec) == ("lz", 16, "bounded:abs=2.0:coder=lz:vector=16")
    with pytest.raises(ValueError, match="coder must be one of planes, lz, huffman, not 'zstd'"):
        hc.get_codec("bounded:coder=zstd")
    with pytest.raises(ValueError, match="vector goes with coder=lz, not with coder=huffman"):
        hc.get_codec("bounded:coder=huffman,vector=4")
    for vector in (0, 1025, 1.5, True):
        with pytest.raises(ValueError, match=f"vector must be an integer from 1 to 1024, not {vector}"):
            hc.get_codec("bounded", coder="lz", vector=vector)
    for bad in (0, -1.0, float("inf"), float("nan"), True, "1", 10**400, None):
        for name in ("abs", "rel"):
            if bad is None:
                continue
            with pytest.raises(ValueError, match=f"{name} must be a finite number above 0, not {bad!r}"):
                hc.get_codec("bounded", **{name: bad})


@pytest.mark.parametrize(
    "encodings", [Fraction(n, d) for n, d in ((4, 1), (3, 1), (7, 4), (1, 3), (10**6, 1))]
)
@pytest.mark.parametrize(
    "spec", ["bounded:abs=1e-4", "bounded:rel=0.1", "bounded:abs=5e-324", "bounded:abs=1e308"]
)
def test_a_share_of_a_bound(spec, encodings):
    """Rounded down; the payload says it, and the header the codec that it is a share of."""
    whole = hc.get_codec(spec)
    share = whole.sharing(encodings)
    error, part = (one.abs or one.rel for one in (whole, share))
    exact = min(Fraction(error) / encodings, Fraction(np.finfo(float).max))
    assert Fraction(part) <= exact or (part, error) == (5e-324, 5e-324)
    assert part >= float(exact) * (1 - 2.0**-52)
    assert part > 0
    x = common.gaussian(1000)
    msg = share.encode(x)
    assert effective_bound(msg) == (share.abs or pytest.approx(part * np.ptp(x)))
    assert np.abs(whole.decode(msg) - x).max() <= effective_bound(msg)
    assert share != whole
    assert share.spec == whole.spec
    assert share == pickle.loads(pickle.dumps(share))
    assert share.sharing(Fraction(1)) == whole
    assert share.sharing(Fraction(encodings)) == share


def test_a_bound_of_messages_is_not_shared():
    codec = hc.get_codec("bounded:abs=1e-4,bound=message")
    assert codec.sharing(Fraction(4)) is codec
    assert (codec.bounds_result, codec.spec) == (False, "bounded:abs=0.0001:bound=message")
    assert hc.get_codec("bounded:abs=1e-4,bound=result") == hc.get_codec("bounded:abs=1e-4") != codec
    with pytest.raises(ValueError, match="bound must be one of result, message, not 'both'"):
        hc.get_codec("bounded:abs=1,bound=both")
    assert hc.get_codec("int8").sharing(Fraction(4)) == hc.get_codec("int8")


@pytest.mark.parametrize("bound", [-1.0, -0.0, np.inf, np.nan, -np.inf])
def test_hostile_bounds(bound):
    msg = hc.get_codec("bounded").encode(common.gaussian(100))
    with pytest.raises(hc.WireError, match="error bound"):
        hc.decode(forged(msg, 32, np.float64(bound).tobytes()))


def test_hostile_prefixes_codes_and_lengths():
    msg = hc.get_codec("bounded").encode(common.gaussian(230))
    for at, data in ((40, b"\x20"), (40, b"\0")):
        with pytest.raises(hc.WireError, match="block size is not 64"):
            hc.decode(forged(msg, at, data))
    for at, data in ((44, b"\3"), (47, b"\x80")):
        with pytest.raises(hc.WireError, match="there is no such coder"):
            hc.decode(forged(msg, at, data))
    for code in range(256):
        for block, elements in ((0, 64), (3, 38)):  # the last one is short
            bad = forged(msg, 48 + block, bytes([code]))
            if code == msg[48 + block]:
                continue
            saves = code == 0 or planes_bytes(code) < elements * 4
            match = "length" if code in (RAW, CONSTANT) or (code < RAW and saves) else "unknown code"
            with pytest.raises(hc.WireError, match=match):
                hc.decode(bad)
            with pytest.raises(hc.WireError, match=match):
                hc.decode_add(bad, np.zeros(230, np.float32))


def planes_bytes(code: int) -> int:
    """Return the bytes of a block of bit planes by its code."""
    return 8 * code if code < DELTA else 4 + 8 * (code - DELTA)


def unpacked(data: bytes, count: int) -> np.ndarray:
    """Return the integers of bit planes."""
    rows = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").reshape(count, BLOCK)
    q = (rows.astype(np.int64) << np.arange(count)[:, None]).sum(axis=0)
    return np.where(q >> max(0, count - 1) & (count > 0), q - (1 << count), q)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_integers_that_no_encoder_writes(dtype):
    """Any planes and any first integer decode to numbers, the same on every instruction set."""
    rng = np.random.default_rng(5)
    header = hc.get_codec("bounded").encode(np.zeros(64, dtype))[:32]
    kind = np.float64 if dtype == "float64" else np.float32
    for code in [*range(32), *range(DELTA, DELTA + 32)]:
        data = rng.integers(0, 256, planes_bytes(code), np.uint8).tobytes()
        q = unpacked(data, code) if code < DELTA else unpacked(data[4:], code - DELTA)
        if code >= DELTA:
            sums = np.cumsum(q) + int(np.frombuffer(data[:4], np.int32)[0])
            q = sums.astype(np.uint32).view(np.int32)
        for bound in (0.25, 1e30, 0.0):
            payload = np.float64(bound).tobytes() + (64).to_bytes(8, "little") + bytes([code]) + data
            msg = np.concatenate([header, np.frombuffer(payload, np.uint8)])
            msg[16:24] = np.frombuffer(len(payload).to_bytes(8, "little"), np.uint8)
            common.reseal(msg)
            if code and len(data) >= 64 * np.dtype(dtype).itemsize:
                with pytest.raises(hc.WireError, match="unknown code"):
                    hc.decode(msg)
                continue
            with np.errstate(over="ignore"):
                expected = (q.astype(kind) * kind(model_step(bound, np.dtype(dtype))[1])).astype(dtype)
            for name in common.isas():
                with common.isa(name):
                    np.testing.assert_array_equal(hc.decode(msg), expected)

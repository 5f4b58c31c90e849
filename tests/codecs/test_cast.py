"""fp16 and bf16 against NumPy's and torch's own rounding."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import hybridcomp as hc
from hybridcomp import native
from hybridcomp.arrays import DType
from hybridcomp.codecs import cast
from tests.codecs import common


def floats_that_round() -> np.ndarray:
    """Return every half, every bfloat16, what lies half-way between two of either, and its neighbours."""
    short = np.arange(1 << 16, dtype=np.uint16)
    halves = short.view(np.float16).astype(np.float32)
    bfloats = (short.astype(np.uint32) << 16).view(np.float32)
    exact = np.concatenate([halves, bfloats])
    with np.errstate(invalid="ignore", over="ignore"):
        middle = np.concatenate([(halves[1:] + halves[:-1]) / 2, (bfloats[1:] + bfloats[:-1]) / 2])
        return np.concatenate([exact, middle, np.nextafter(middle, 9e38), np.nextafter(middle, -9e38)])


def encoded(spec: str, x: np.ndarray) -> np.ndarray:
    return np.frombuffer(hc.get_codec(spec).encode(x)[32:].tobytes(), np.uint16)


@pytest.mark.parametrize("name", common.isas())
def test_float_to_half_is_numpys(name):
    x = floats_that_round().astype(np.float32)
    with common.isa(name), np.errstate(over="ignore", invalid="ignore"):
        got = encoded("fp16", x)
        expected = x.astype(np.float16).view(np.uint16)
    nan = np.isnan(x)
    np.testing.assert_array_equal(got[~nan], expected[~nan])
    np.testing.assert_array_equal(got[nan] & 0x7FFF, 0x7E00)
    np.testing.assert_array_equal(got[nan] >> 15, np.signbit(x[nan]))


@pytest.mark.parametrize("name", common.isas())
def test_float_to_bfloat_is_torchs(name):
    x = floats_that_round().astype(np.float32)
    with common.isa(name):
        got = encoded("bf16", x)
    expected = torch.from_numpy(x).to(torch.bfloat16).view(torch.uint16).numpy()
    nan = np.isnan(x)
    np.testing.assert_array_equal(got[~nan], expected[~nan])
    np.testing.assert_array_equal(got[nan] & 0x7FFF, 0x7FC0)


@pytest.mark.parametrize("name", common.isas())
def test_half_to_float_is_numpys(name):
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    with common.isa(name):
        out = np.empty(halves.size, np.float32)
        hc.decode(hc.get_codec("none").encode(halves), out=out)
    np.testing.assert_array_equal(out, halves.astype(np.float32))  # equal NaN count as equal
    np.testing.assert_array_equal(np.signbit(out), np.signbit(halves))


@pytest.mark.parametrize("name", common.isas())
def test_doubles_are_rounded_once(name):
    """1 + 2^-11 + 2^-40 is above half-way to the next half: rounding to float first would lose that."""
    just_above = 1 + 2.0**-11 + 2.0**-40
    tiny = 2.0**-24 + 2.0**-25 + 2.0**-60  # among the denormal halves
    x = np.concatenate(
        [[just_above, -just_above, tiny, 65520.0, 65519.999, 1e300, -np.inf, np.nan, 5e-324, 0.0]]
    )
    with common.isa(name), np.errstate(over="ignore"):
        got = encoded("fp16", x).view(np.float16)
        np.testing.assert_array_equal(got, x.astype(np.float16))

        above = 1 + 2.0**-8 + 2.0**-40
        denormal = 2.0**-133 + 2.0**-134 + 2.0**-180
        y = np.array([above, -above, denormal, 1e300, 3.4e38, 2.0**-134, 2.0**-134 + 2.0**-160])
        bits = encoded("bf16", y).astype(np.uint32) << 16
    expected = [1 + 2.0**-7, -1 - 2.0**-7, 2.0**-132, np.inf, np.inf, 0.0, 2.0**-133]
    np.testing.assert_array_equal(bits.view(np.float32), np.array(expected, np.float32))


@pytest.mark.parametrize("name", common.isas())
def test_random_doubles(name):
    rng = np.random.default_rng(2)
    x = rng.standard_normal(20000) * np.exp2(rng.uniform(-30, 17, 20000))
    with common.isa(name), np.errstate(over="ignore"):
        np.testing.assert_array_equal(encoded("fp16", x).view(np.float16), x.astype(np.float16))


@pytest.mark.parametrize("name", common.isas())
@pytest.mark.parametrize("source", [d for d in DType if d.is_float])
@pytest.mark.parametrize("target", [d for d in DType if d.is_float])
def test_every_conversion(name, source, target):
    """All pairs of types convert as torch does, at sizes around the vector length and the tile."""
    kernels = native.kernels()
    generator = torch.Generator().manual_seed(11)
    dtypes = {d: getattr(torch, d.label) for d in (source, target)}
    for n in (0, 1, 7, 15, 16, 17, 33, 2048, 2049, 5000):
        x = (torch.randn(n, dtype=torch.float64, generator=generator) * 100).to(dtypes[source])
        expected = x.to(dtypes[target])
        raw = np.frombuffer(common.bits(x), source.storage)
        out = np.empty(n, target.storage)
        with common.isa(name):
            kernels.convert(raw, source, out, target, False)
        if (source, target.itemsize) != (DType.FLOAT64, 2):  # torch rounds those twice, by way of float32
            assert out.tobytes() == common.bits(expected)
        if target in (DType.FLOAT32, DType.FLOAT64):
            total = np.full(n, 0.5, target.storage)
            with common.isa(name):
                kernels.convert(raw, source, total, target, True)
            np.testing.assert_array_equal(total, out + target.storage.type(0.5))


@pytest.fixture
def told() -> Iterator[list[int]]:
    """Have the next overflow of this process counted."""
    found: list[int] = []
    cast._listen()  # as the first encoder does, which is before this one
    native.kernels().listen_for_overflow(lambda: found.append(1))
    yield found
    native.kernels().listen_for_overflow(cast._warn)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize(
    ("n", "at"), [(1, 0), (1024, 1023), (50_000, 1024 * 3 + 31), (50_000, 8192 * 5 + 1024 + 10)]
)
def test_values_past_the_range_of_half_are_told_of_once(told, n, at, dtype):
    """Neither those that were infinite before, nor those that fit; of long arrays one of 32 is looked at."""
    x = torch.ones(n, dtype=getattr(torch, dtype))
    codec = hc.get_codec("fp16")
    for value, many in ((65280, 0), (np.inf, 0), (np.nan, 0), (-65536, 1), (1e30, 1)):
        x[at] = value
        codec.encode(x)
        hc.decode(codec.encode(x))  # Python calls the listener between two instructions
        assert len(told) == many, value
    bare = hc.get_codec("bf16").encode(x)
    assert torch.isfinite(hc.decode(bare)).all()


def test_what_is_said_of_values_past_the_range_of_half():
    cast._listen()
    native.kernels().listen_for_overflow(cast._warn)
    with pytest.warns(RuntimeWarning, match=r"its largest number is 65,504; bf16 has float32's range"):
        hc.decode(hc.get_codec("fp16").encode(np.full(3, 7e4)))


def test_overflow_of_half_is_infinity():
    y = hc.decode(hc.get_codec("fp16").encode(np.array([65519.0, 65520.0, -1e30], np.float32)))
    np.testing.assert_array_equal(y, np.array([65504.0, np.inf, -np.inf], np.float32))


def test_own_type_is_kept_bit_for_bit():
    payload_nan = np.array([0x7C01, 0xFE5A, 0x0001, 0x8000], np.uint16)
    msg = hc.get_codec("fp16").encode(payload_nan.view(np.float16))
    np.testing.assert_array_equal(hc.decode(msg).view(np.uint16), payload_nan)


@pytest.mark.parametrize("name", common.isas())
@pytest.mark.parametrize("spec", ["fp16", "bf16"])
def test_long_outputs(spec, name):
    """Outputs too long for any cache are written past the caches: same values, at any alignment, no byte more."""
    n = (4 << 20) + 5
    x = common.gaussian(n)
    codec = hc.get_codec(spec)
    pieces = [hc.decode(codec.encode(part)) for part in np.array_split(x, 8)]
    with common.isa(name):
        msg = codec.encode(x)
        fenced = np.zeros(n + 20, np.float32)
        hc.decode(msg, out=fenced[9 : 9 + n])
    np.testing.assert_array_equal(fenced[9 : 9 + n], np.concatenate(pieces))
    assert not fenced[:9].any()
    assert not fenced[9 + n :].any()

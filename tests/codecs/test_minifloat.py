"""fp8, mxfp8 and mxfp4 against torch's float8 types and a model made of the formats' tables of numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hybridcomp as hc
from tests.codecs import common

TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LIMITS = {"e4m3": 448, "e5m2": 57344, "e2m1": 6}
EXPONENTS = {"e4m3": 8, "e5m2": 15, "e2m1": 2}  # exponents of the largest numbers
CODES = {"e4m3": 0, "e5m2": 1, "e2m1": 2}
SMALLEST = np.float32(2.0**-90)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
SPECS = ["fp8:e4m3", "fp8:e5m2", "fp8:e5m2,block=24", "fp8:block=65536", "mxfp8:e4m3", "mxfp8:e5m2", "mxfp4"]


def numbers(kind: str) -> np.ndarray:
    """Return the number that each code stands for."""
    if kind == "e2m1":
        return np.concatenate([E2M1, -E2M1])
    return torch.arange(256, dtype=torch.uint8).view(TORCH[kind]).float().numpy()


def rounded(kind: str, y: np.ndarray) -> np.ndarray:
    """Return codes of the nearest numbers, ties to the even code, for finite float32; the largest number at most."""
    y = np.clip(y, -LIMITS[kind], LIMITS[kind]).astype(np.float32)
    if kind != "e2m1":
        return torch.from_numpy(y).to(TORCH[kind]).view(torch.uint8).numpy()
    middles = (E2M1[1:] + E2M1[:-1]) / 2
    a = np.abs(y)
    below, above = np.searchsorted(middles, a, "left"), np.searchsorted(middles, a, "right")
    code = np.where(below % 2 == 0, below, above)  # they differ where `a` is a middle
    return (code + 8 * np.signbit(y)).astype(np.uint8)


def parts(codec: hc.Codec) -> tuple[str, int, bool]:
    """Return format, block, whether the scales are E8M0."""
    return codec.params.get("format", "e2m1"), codec.params.get("block", 32), codec.name != "fp8"


def model(codec: hc.Codec, x: np.ndarray) -> tuple[bytes, np.ndarray]:
    """Return payload and decoded values, by the arithmetic that minifloat.py describes."""
    kind, block, mx = parts(codec)
    with np.errstate(over="ignore"):
        values = x.astype(np.float32)
    limit = np.float32(LIMITS[kind])
    scales, codes, decoded = bytearray(), [np.empty(0, np.uint8)], [np.empty(0, np.float32)]
    for start in range(0, x.size, block):
        part = values[start : start + block]
        peak = np.abs(part).max()  # NaN if there is one
        q, scale, byte = np.zeros(part.size, np.uint8), np.float32(0), 0
        if not np.isfinite(peak):
            scale, byte = np.float32(np.nan), 255
        elif peak >= SMALLEST and mx:
            exponent = int(np.frexp(peak)[1]) - 1 - EXPONENTS[kind]
            scale, byte = np.float32(2.0**exponent), exponent + 127
            q = rounded(kind, np.ldexp(part, -exponent))
        elif peak >= SMALLEST:
            scale = peak / limit
            with np.errstate(over="ignore"):
                if np.isinf(scale * limit):
                    scale = np.nextafter(scale, np.float32(0))
            q = rounded(kind, part * (limit / peak))
        scales += bytes([byte]) if mx else scale.tobytes()
        codes.append(q)
        decoded.append(numbers(kind)[q] * scale)
    q = np.concatenate(codes)
    if kind == "e2m1":
        q = np.concatenate([q, np.zeros(q.size % 2, np.uint8)])
        q = q[::2] | q[1::2] << 4
    prefix = block.to_bytes(4, "little") + CODES[kind].to_bytes(4, "little")
    return prefix + bytes(scales) + q.tobytes(), np.concatenate(decoded)


def check_model(codec: hc.Codec, x: np.ndarray) -> None:
    payload, values = model(codec, x)
    for name in common.isas():
        with common.isa(name):
            msg = codec.encode(x)
            assert msg[32:].tobytes() == payload
            out = np.empty(x.size, np.float32)
            hc.decode(msg, out=out)
            np.testing.assert_array_equal(out, values)
            assert np.array_equal(np.signbit(out)[values == 0], np.signbit(values)[values == 0])
            acc = np.linspace(-3, 3, x.size).astype(np.float64 if x.dtype == np.float64 else np.float32)
            expected = acc + values
            hc.decode_add(msg, acc)
            np.testing.assert_array_equal(acc, expected)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("spec", [*SPECS, "fp8:block=8", "fp8:e5m2,block=2048", "fp8:block=2056"])
def test_message_is_the_models(spec, dtype):
    codec = hc.get_codec(spec)
    rng = np.random.default_rng(9)
    for n in (0, 1, 5, 31, 32, 33, 64, 95, 127, 129, 1001, 4097, 66001):
        check_model(codec, (rng.standard_normal(n) * np.exp2(rng.uniform(-12, 12, n))).astype(dtype))


@pytest.mark.parametrize("spec", SPECS)
def test_any_bits(spec):
    """Denormals, infinities and NaN among finite numbers of every magnitude."""
    rng = np.random.default_rng(10)
    codec = hc.get_codec(spec)
    for shift in (0, 100, 127):
        x = rng.integers(0, 2**32, 20011, np.uint32).view(np.float32)
        exponents = rng.integers(max(shift - 30, 0), shift + 128, x.size).astype(np.uint32)
        near = (x.view(np.uint32) & np.uint32(0x807FFFFF) | exponents << 23).view(np.float32)
        x = np.where(np.arange(x.size) % 640 == 3, x, near)
        check_model(codec, x)


@pytest.mark.parametrize("spec", SPECS)
def test_every_number_and_every_tie(spec):
    """All numbers of a format, the middles between them and the floats beside those, in blocks whose scale is 1."""
    codec = hc.get_codec(spec)
    kind, block, _ = parts(codec)
    table = np.unique(numbers(kind)[np.isfinite(numbers(kind))])
    middles = (table[1:] + table[:-1]) / 2
    inf = np.float32(np.inf)
    near = np.concatenate([table, middles, np.nextafter(middles, inf), np.nextafter(middles, -inf)])
    x = np.zeros(-(-near.size // (block - 1)) * block, np.float32).reshape(-1, block)
    x[:, 0] = LIMITS[kind]  # the largest number in each block
    x[:, 1:].flat[: near.size] = near
    x = x.reshape(-1)
    check_model(codec, x)
    y = hc.decode(codec.encode(x))
    np.testing.assert_array_equal(y, numbers(kind)[rounded(kind, x)])
    exact = np.isin(x, table)
    np.testing.assert_array_equal(y[exact], x[exact])


@pytest.mark.parametrize("kind", ["e4m3", "e5m2", "e2m1"])
def test_mx_saturates(kind):
    """Up to the next power of two over the largest number the shared exponent stays: such elements are clipped."""
    codec = hc.get_codec("mxfp4" if kind == "e2m1" else f"mxfp8:{kind}")
    limit = LIMITS[kind]
    top = np.nextafter(np.float32(2.0 ** (EXPONENTS[kind] + 1)), np.float32(0))
    x = np.array([top, -top, limit, limit * 1.05, -limit * 1.1, 1, -0.0], np.float32)
    y = hc.decode(codec.encode(x))
    np.testing.assert_array_equal(y, [limit, -limit, limit, limit, -limit, 1, 0])
    assert np.signbit(y[-1])


@pytest.mark.parametrize(
    ("spec", "limit"),
    [
        ("fp8:e4m3", 0.029),
        ("fp8:e5m2", 0.057),
        ("mxfp8:e4m3", 0.031),
        ("mxfp8:e5m2", 0.057),
        ("mxfp4", 0.125),
    ],
)
@pytest.mark.parametrize("dtype", common.FLOATS)
def test_error_on_gaussian_data(spec, limit, dtype):
    x = common.gaussian(1 << 16, dtype)
    error = common.relative_error(x, hc.decode(hc.get_codec(spec).encode(x)))
    assert limit / 1.3 < error < limit


@pytest.mark.parametrize(("spec", "step"), [("fp8:e4m3", 2.0**-4), ("fp8:e5m2", 2.0**-3)])
def test_error_of_each_element(spec, step):
    """The error is half a unit of the last bit at most, or of the smallest number, and a little for the scale."""
    x = common.gaussian(6400)
    y = hc.decode(hc.get_codec(spec).encode(x))
    peaks = np.abs(x.reshape(-1, 128)).max(axis=1).repeat(128)
    least = {"fp8:e4m3": 2.0**-9 / 448, "fp8:e5m2": 2.0**-16 / 57344}[spec]
    assert np.all(np.abs(x - y) <= np.maximum(np.abs(x) * step, peaks * least / 2) * 1.00001)


@pytest.mark.parametrize("spec", SPECS)
def test_only_the_block_of_a_nan_is_lost(spec):
    codec = hc.get_codec(spec)
    block = parts(codec)[1]
    at = block + block // 2
    for bad in (np.nan, np.inf, -np.inf, np.frombuffer(b"\x01\x00\x80\x7f", np.float32)[0]):
        x = common.gaussian(4 * block)
        x[at] = bad
        y = hc.decode(codec.encode(x))
        assert np.isnan(y[block : 2 * block]).all()
        assert np.isfinite(np.delete(y, np.s_[block : 2 * block])).all()


@pytest.mark.parametrize("spec", SPECS)
def test_doubles_beyond_float32(spec):
    codec = hc.get_codec(spec)
    x = np.ones(70000)
    x[65600] = 1e39
    y = hc.decode(codec.encode(x))
    assert y.dtype == np.float64
    assert np.isnan(y[65600])
    assert y[0] == 1
    x[65600] = 1e-60
    assert hc.decode(codec.encode(x))[65600] == 0


@pytest.mark.parametrize("spec", SPECS)
def test_extreme_magnitudes(spec):
    codec = hc.get_codec(spec)
    largest = np.finfo(np.float32).max
    for peak in (largest, largest / 2, 1.0, 2.0**-89, 2.0**-90):
        x = np.linspace(-1, 1, 100, dtype=np.float32) * np.float32(peak)
        y = hc.decode(codec.encode(x))
        assert np.isfinite(y).all()
        assert y[-1] == pytest.approx(peak, rel=1e-6 if codec.name == "fp8" else 0.26)
        check_model(codec, x)
    for peak in (np.nextafter(SMALLEST, np.float32(0)), 1e-38, 1e-45, 0.0, -0.0):
        msg = codec.encode(np.full(32, peak, np.float32))
        assert not msg[40:].any()
        assert not hc.decode(msg).any()


@pytest.mark.parametrize("spec", SPECS)
def test_flush_to_zero_modes_change_nothing(spec):
    """Blocks of every magnitude about the smallest that are kept, with denormals among them."""
    codec = hc.get_codec(spec)
    block = min(parts(codec)[1], 256)
    rng = np.random.default_rng(11)
    peaks = np.repeat(rng.uniform(-130, -60, 3000), block)
    x = (rng.choice([-1, 1], peaks.size) * np.exp2(peaks - rng.uniform(0, 40, peaks.size))).astype(np.float32)
    if block != parts(codec)[1]:  # a large block has one peak for thousands of these
        x = np.minimum(np.abs(x), SMALLEST)
    assert np.any((x != 0) & (np.abs(x) < np.finfo(np.float32).tiny))

    def everything() -> list[bytes]:
        found = []
        for name in common.isas():
            with common.isa(name):
                for data in (x, x.astype(np.float64)):
                    msg = codec.encode(data)
                    found += [msg.tobytes(), hc.decode(msg).tobytes()]
        return found

    plain = everything()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no flush-to-zero mode")
    try:
        flushed = everything()
    finally:
        torch.set_flush_denormal(False)
    assert plain == flushed


@pytest.mark.parametrize("spec", [s for s in SPECS if "65536" not in s])
def test_any_code_decodes(spec):
    """Codes that no encoder writes too: NaN and infinity; every E8M0 scale."""
    codec = hc.get_codec(spec)
    kind, block, mx = parts(codec)
    n = 256 * block
    msg = codec.encode(np.ones(n, np.float32))
    codes = msg[-n // 2 :] if kind == "e2m1" else msg[-n:]
    codes[:] = np.arange(codes.size) % 256
    scales = msg[40 : 40 + 256] if mx else msg[40 : 40 + 1024].view(np.float32)
    scales[:] = np.arange(256) if mx else np.linspace(0.25, 3, 256)
    q = codes
    if kind == "e2m1":
        q = np.stack([codes & 15, codes >> 4], axis=1).reshape(-1)
    factors = np.exp2(np.arange(256) - 127.0) if mx else scales.astype(np.float64)
    factors[255] = np.nan if mx else factors[255]
    with np.errstate(over="ignore", invalid="ignore"):
        expected = (numbers(kind)[q] * factors.repeat(block)).astype(np.float32)
    for name in common.isas():
        with common.isa(name):
            np.testing.assert_array_equal(hc.decode(common.reseal(msg)), expected)


def test_sizes():
    fp8, mxfp8, mxfp4 = (hc.get_codec(name) for name in ("fp8", "mxfp8", "mxfp4"))
    assert fp8.bound(0) == mxfp8.bound(0) == mxfp4.bound(0) == 40
    assert fp8.bound(129) == fp8.bound(129, "float64") == 40 + 8 + 129
    assert mxfp8.bound(33) == 40 + 2 + 33
    assert mxfp4.bound(33) == 40 + 2 + 17
    assert fp8.ratio(1 << 20) == pytest.approx(32 / 8.25, rel=1e-4)
    assert mxfp8.ratio(1 << 20) == pytest.approx(32 / 8.25, rel=1e-4)
    assert mxfp4.ratio(1 << 20) == pytest.approx(32 / 4.25, rel=1e-4)


def test_parameters():
    assert hc.get_codec("fp8:e5m2") == hc.get_codec("fp8", format="e5m2", block=128)
    assert hc.get_codec("mxfp8:e5m2").spec == "mxfp8:format=e5m2"
    for name in ("fp8", "mxfp8"):
        for bad in ("e3m4", "E4M3", "", 8, None, ["e4m3"]):
            with pytest.raises(ValueError, match="format must be 'e4m3' or 'e5m2', not"):
                hc.get_codec(name, format=bad)
    for block in (0, 4, 12, 65544, 128.0, True, "128"):
        with pytest.raises(ValueError, match="block must be a multiple of 8 from 8 to 65536"):
            hc.get_codec("fp8", block=block)


@pytest.mark.parametrize(
    ("spec", "at", "value", "text"),
    [
        ("fp8", 32, 12, "block size"),
        ("fp8", 32, 65544, "block size"),
        ("fp8", 36, 2, "number format"),
        ("fp8", 36, 2**31, "number format"),
        ("mxfp8", 32, 64, "not of 32"),
        ("mxfp8", 32, 0, "not of 32"),
        ("mxfp8", 36, 2, "number format"),
        ("mxfp4", 36, 0, "number format"),
        ("mxfp4", 32, 8, "not of 32"),
    ],
)
def test_hostile_prefixes(spec, at, value, text):
    msg = hc.get_codec(spec).encode(common.gaussian(64))
    msg[at : at + 4] = np.frombuffer(value.to_bytes(4, "little"), np.uint8)
    with pytest.raises(hc.WireError, match=text):
        hc.decode(common.reseal(msg))


def test_the_other_format_decodes_as_itself():
    """The prefix, not the codec's name, says which format the elements are of."""
    msg = hc.get_codec("fp8:e4m3,block=64").encode(np.full(64, 448, np.float32))
    msg[36] = CODES["e5m2"]
    np.testing.assert_array_equal(hc.decode(common.reseal(msg)), np.full(64, np.nan))

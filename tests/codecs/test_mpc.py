"""``mpc``: exact for every dtype, the bits of the model below, and small on smooth data."""

from __future__ import annotations

import struct

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp.arrays import DType
from tests.codecs import common
from tests.codecs.common import Array

DTYPES = [d.label for d in DType if d is not DType.BFLOAT16]
CHUNK = 1024


def model_chunk(words: Array, lag: int) -> bytes:
    """Apply LNVs, BIT, LNV1s and ZE bit by bit as the module's text says; return the words if that is no less."""
    bits = words.itemsize * 8
    lane_bits = 64 if bits == 64 else 32
    padded = np.zeros(CHUNK, words.dtype)
    padded[: words.size] = words
    padded[lag : words.size] -= words[: max(words.size - lag, 0)]
    padded[words.size :] = 0
    lane_type = np.dtype(f"u{lane_bits // 8}")
    rows = []
    for bit in reversed(range(bits)):
        plane = (padded >> np.array(bit, words.dtype) & np.array(1, words.dtype)).astype(np.uint8)
        rows.append(np.packbits(plane, bitorder="little").view(lane_type))
    lanes = np.stack(rows)
    lanes[1:] = np.diff(lanes, axis=0)
    lanes = lanes.reshape(-1)
    code = np.packbits(lanes != 0, bitorder="little").tobytes() + lanes[lanes != 0].tobytes()
    return code if len(code) < words.nbytes else words.tobytes()


def model_payload(x: Array, lag: int) -> bytes:
    """Return the payload that a NumPy array makes."""
    width = {"b": 4, "c": x.itemsize // 2}.get(x.dtype.kind, x.itemsize if x.itemsize > 1 else 4)
    raw = x.tobytes()
    whole = len(raw) // width * width
    words = np.frombuffer(raw[:whole], f"u{width}")
    chunks = [model_chunk(words[at : at + CHUNK], lag) for at in range(0, words.size, CHUNK)]
    sizes = b"".join(struct.pack("<H", len(c)) for c in chunks)
    return struct.pack("<II", lag, 0) + sizes + b"".join(chunks) + raw[whole:]


def smooth(n: int, dtype: str) -> Array:
    """Return a slow wave."""
    return (100 * np.sin(np.arange(n) / 700)).astype(dtype)


def noise(n: int, dtype: str, seed: int = 0) -> Array:
    """Return any bytes (for bool, any booleans): NaN payloads, denormals, signed zeros."""
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.integers(0, 2, n).astype(bool)
    return rng.integers(0, 256, n * np.dtype(dtype).itemsize, np.uint8).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lag", [1, 6, 32])
def test_bits_of_the_model(dtype, lag):
    codec = hc.get_codec("mpc", lag=lag)
    for n in (0, 1, 3, 31, 200, 1023, 1024, 1025, 2100, 5003):
        for x in (smooth(n, dtype), noise(n, dtype), np.zeros(n, dtype)):
            msg = codec.encode(x)
            assert msg[32:].tobytes() == model_payload(x, lag)
            y = hc.decode(msg)
            assert y.dtype == x.dtype
            assert y.tobytes() == x.tobytes()


@pytest.mark.parametrize("lag", range(1, 33))
def test_every_lag_on_every_instruction_set(lag):
    codec = hc.get_codec("mpc", lag=lag)
    for dtype in ("float16", "float32", "float64"):
        for n in (3, 1024 + 37, 4000):
            common.check_isas_agree(codec, smooth(n, dtype))
            x = smooth(n, dtype)
            for name in common.isas():
                with common.isa(name):
                    assert hc.decode(codec.encode(x)).tobytes() == x.tobytes()


@pytest.mark.parametrize(
    ("x", "least"),
    [
        (np.sin(np.arange(100_000) * 1e-4).astype(np.float32), 2.4),
        (np.sin(np.arange(100_000) * 1e-2).astype(np.float32), 1.35),
        (np.sin(np.arange(100_000) * 1e-4), 1.45),
        (np.sin(np.arange(100_000) * 1e-4).astype(np.float16), 5.0),
        (np.arange(100_000, dtype=np.int32), 10.0),
        (np.exp(1j * np.arange(50_000) * 1e-4).astype(np.complex64), 2.2),
        (np.zeros(100_000, np.float32), 31.0),
    ],
)
def test_smooth_data_compresses(x, least):
    assert x.nbytes / hc.get_codec("mpc").encode(x).size > least


@pytest.mark.parametrize("dtype", DTYPES)
def test_noise_hardly_expands(dtype):
    if dtype == "bool":
        return
    x = noise(100_000, dtype)
    assert hc.get_codec("mpc").encode(x).size < 1.002 * x.nbytes
    assert hc.get_codec("mpc").bound(x.size, dtype) < 1.002 * x.nbytes


def test_lag():
    assert hc.get_codec("mpc:2") == hc.get_codec("mpc", lag=2)
    # Three interleaved waves: the word three places back is the one to subtract.
    x = np.stack([np.sin(np.arange(30_000) * 1e-3 + k) * 10**k for k in range(3)], axis=1).astype(np.float32)
    assert hc.get_codec("mpc:3").encode(x).size < 0.8 * hc.get_codec("mpc:2").encode(x).size
    for bad in (0, 33, 1.5, True, "6"):
        with pytest.raises(ValueError, match="lag must be an integer from 1 to 32"):
            hc.get_codec("mpc", lag=bad)


def forge(msg: Array, at: int, data: bytes) -> Array:
    """Return a message with some of its bytes replaced and the CRC that fits."""
    bad = msg.copy()
    bad[at : at + len(data)] = np.frombuffer(data, np.uint8)
    return common.reseal(bad)


def test_forged_payloads():
    msg = hc.get_codec("mpc").encode(smooth(3000, "float32"))
    sizes = np.frombuffer(msg[40:46].tobytes(), "<u2").copy()
    assert sizes.max() < 4096
    for lag in (0, 33, 2**32 - 1):
        with pytest.raises(hc.WireError, match="lag"):
            hc.decode(forge(msg, 32, struct.pack("<I", lag)))
    with pytest.raises(hc.WireError, match="lag"):
        hc.decode(forge(msg, 36, b"\x01"))
    for first, second in ((1, -1), (-1, 1), (4, -4), (1, 0)):  # sizes that add up, and ones that do not
        shifted = (sizes + np.array([first, second, 0])).astype("<u2")
        with pytest.raises(hc.WireError, match=r"bitmap|length"):
            hc.decode(forge(msg, 40, shifted.tobytes()))
    with pytest.raises(hc.WireError, match="length"):  # less than a bitmap
        hc.decode(forge(msg, 40, struct.pack("<HHH", 100, sizes[0] + sizes[1] - 100, sizes[2])))
    bitmap = msg[46 : 46 + 128].copy()
    bitmap[int(np.argmin(bitmap))] ^= 0x10
    out = np.zeros(3000, np.float32)
    with pytest.raises(hc.WireError, match="bitmap"):
        hc.decode(forge(msg, 46, bitmap.tobytes()), out=out)
    with pytest.raises(hc.WireError, match="bitmap"):
        hc.decode_add(forge(msg, 46, bitmap.tobytes()), out)


def test_integers_are_not_added():
    msg = hc.get_codec("mpc").encode(np.arange(5000))
    with pytest.raises(hc.CodecMismatchError, match="adds to"):
        hc.decode_add(msg, np.zeros(5000, np.int64))
    with pytest.raises(hc.CodecMismatchError, match="cannot be decoded into"):
        hc.decode(msg, out=np.zeros(5000, np.float32))

"""``exponent``: exact for every bit pattern, the bytes of the model below, and small on near-Gaussian data."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hybridcomp as hc
from hybridcomp import native
from hybridcomp.arrays import DType, Flat, flatten
from tests.codecs import common
from tests.codecs.common import Array

BLOCK = 256
HEADER = 32
EXPONENT_BITS = {DType.FLOAT32: 8, DType.FLOAT64: 11, DType.FLOAT16: 5, DType.BFLOAT16: 8}
ZEROS, RAW = 254, 255
# For each form: first code, most escapes, bits of a field, whether a field stands for the exponent 0.
FORMS = [(0, 63, 3, False), (64, 63, 3, True), (128, 125, 4, True)]
FEW = 16


# -- the format, as kernels/include/hybridcomp/exponent.hpp says it ------------------------------------------


def rows(fields: Array, bits: int) -> bytes:
    """Pack the fields of a block: element 32 k + j is field k of byte j of each row."""
    f = fields.astype(np.uint8).reshape(8, 32)
    if bits == 1:
        packed = [np.bitwise_or.reduce([f[k] << k for k in range(8)])]
    elif bits == 3:
        packed = [
            f[0] | f[1] << 3 | (f[6] & 3) << 6,
            f[2] | f[3] << 3 | (f[7] & 3) << 6,
            f[4] | f[5] << 3 | (f[6] >> 2) << 6 | (f[7] >> 2) << 7,
        ]
    else:
        packed = [f[2 * k] | f[2 * k + 1] << 4 for k in range(4)]
    return b"".join(row.astype(np.uint8).tobytes() for row in packed)


def model_block(words: Array, dtype: DType) -> tuple[int, bytes]:
    """Return the code and the data of a block of storage as unsigned integers."""
    width, e_bits = words.itemsize, EXPONENT_BITS[dtype]
    raw = words.tobytes()
    if not words.any():
        return ZEROS, b""
    if words.size < BLOCK:
        return RAW, raw
    rest_bits = 16 - e_bits
    top = (words >> np.array(8 * width - 16, words.dtype)).astype(np.uint32)
    turned = (top << 1 | top >> 15) & 0xFFFF
    exponents, rest = turned >> rest_bits, turned & ((1 << rest_bits) - 1)
    if rest_bits >= 8:
        head = rest.astype(np.uint8).tobytes() + (rows(rest >> 8, 3) if rest_bits > 8 else b"")
    else:
        head = rows(rest & 15, 4) + rows(rest >> 4, 1)
    if width == 4:
        head += words.astype(np.uint16).tobytes()
    elif width == 8:
        head += words.astype(np.uint32).tobytes() + (words >> np.uint64(32)).astype(np.uint16).tobytes()
    kind = np.dtype("<u2" if dtype is DType.FLOAT64 else "u1")
    largest = exponents.max()
    best: tuple[int, bytes] = (RAW, raw)
    for first, most, bits, zero in FORMS:
        escape = (1 << bits) - 1
        fields = np.minimum(largest - exponents, escape)
        if zero:
            fields[fields == escape - 1] = escape
            fields[exponents == 0] = escape - 1
        escapes = exponents[fields == escape]
        data = head + rows(fields, bits) + np.append(largest, escapes).astype(kind).tobytes()
        if escapes.size <= most and len(data) < len(best[1]):
            best = (first + escapes.size, data)
        if bits == 3 and not zero and escapes.size <= FEW:
            break
    return best


def model_payload(data: Array, dtype: DType) -> bytes:
    """Return the payload that a codec's message of this storage has."""
    words = data.view(f"u{data.itemsize}")
    blocks = [model_block(words[at : at + BLOCK], dtype) for at in range(0, words.size, BLOCK)]
    return bytes(code for code, _ in blocks) + b"".join(block for _, block in blocks)


# -- data: storage of every floating-point type ---------------------------------------------------------------


def stored(x: Array, dtype: DType) -> Array:
    """Return float64 values as storage of a type."""
    if dtype is DType.BFLOAT16:
        return np.array(flatten(torch.from_numpy(x).to(torch.bfloat16)).data)
    return x.astype(dtype.storage)


def sets(dtype: DType, n: int) -> dict[str, Array]:
    """Return arrays that make blocks of every form, and any bits."""
    rng = np.random.default_rng(n)
    normal = rng.standard_normal(n)
    wide = np.clip(normal * np.exp2(rng.integers(-12, 12, n)), -6e4, 6e4)
    outliers = np.where(rng.random(n) < 0.002, 3e4, normal * 1e-2)
    halves = np.where(np.arange(n) // 300 % 2, normal, 0.0)
    found = {
        "normal": normal,
        "wide": wide,
        "wider": normal * np.exp2(rng.integers(-14, 0, n) * (rng.random(n) < 0.5)),
        "outliers": outliers,
        "half zeros": np.where(rng.random(n) < 0.5, normal, 0.0),
        "few zeros": np.where(rng.random(n) < 0.1, -0.0, normal),
        "zero blocks": halves,
        "tiny": normal * 1e-7,
        "not numbers": np.where(rng.random(n) < 0.01, rng.choice([np.nan, np.inf, -np.inf], n), normal),
        "equal": np.full(n, 1.5),
        "negative zeros": np.full(n, -0.0),
    }
    arrays = {name: stored(x, dtype) for name, x in found.items()}
    arrays["any bits"] = rng.integers(0, 256, n * dtype.itemsize, np.uint8).view(dtype.storage)
    # One of these has blocks of each number of escapes, up to where the form ends.
    steps = np.where(np.arange(n) % BLOCK < np.arange(n) // BLOCK, 2.0**-9, 1.0)
    arrays["more and more escapes"] = stored(steps, dtype)
    arrays["with zeros, too"] = stored(
        np.where(np.arange(n) % 5, steps * (1 + np.arange(n) % 7 % 2), 0), dtype
    )
    return arrays


def encoded(data: Array, dtype: DType) -> Array:
    codec = hc.get_codec("exponent")
    out = np.empty(codec.bound(data.size, dtype), np.uint8)
    return out[: codec.encode_flat(Flat(data, dtype, data.shape, True, False), out)]


def decoded(msg: Array, dtype: DType, n: int) -> Array:
    out = np.zeros(n, dtype.storage)
    hc.codecs.ExponentCodec.decode_flat(msg, hc.wire.peek(msg), out, dtype)
    return out


@pytest.mark.parametrize("dtype", EXPONENT_BITS)
@pytest.mark.parametrize("n", [1, 255, 256, 257, 1000, 66_000])
def test_bytes_of_the_model(dtype, n):
    for name, data in sets(dtype, n).items():
        want = model_payload(data, dtype)
        for isa in common.isas():
            with common.isa(isa):
                msg = encoded(data, dtype)
                assert msg[HEADER:].tobytes() == want, (name, isa)
                assert decoded(msg, dtype, n).tobytes() == data.tobytes(), (name, isa)


def test_the_sets_make_every_form():
    """The sets make every form, or the test above would say less than it seems to."""
    for dtype in EXPONENT_BITS:
        codes = set()
        for data in sets(dtype, 66_000).values():
            codes |= set(encoded(data, dtype)[HEADER : HEADER + 66_000 // BLOCK].tolist())
        assert codes >= {0, 3, 64, 128, ZEROS, RAW}
        assert len([c for c in codes if c < 64]) > 16
        assert len([c for c in codes if 64 <= c < 128]) > 16
        assert len([c for c in codes if 128 <= c < ZEROS]) > 8


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_and_streams_make_the_same_message(threads):
    """Past 4 MiB outputs bypass the caches; the parts of threads are moved together."""
    codec = hc.get_codec("exponent")
    for dtype in EXPONENT_BITS:
        data = sets(dtype, 700_001)["wide"]
        msg = encoded(data, dtype)
        native.kernels().set_threads(threads)
        try:
            assert encoded(data, dtype).tobytes() == msg.tobytes()
            assert decoded(msg, dtype, data.size).tobytes() == data.tobytes()
        finally:
            native.kernels().set_threads(1)
        assert msg[HEADER:].tobytes() == model_payload(data, dtype)
    x = common.gaussian(2_100_003)
    odd = np.zeros(x.nbytes + 1, np.uint8)[1:].view(np.float32)
    odd[:] = x
    assert codec.encode(odd).tobytes() == codec.encode(x).tobytes()
    assert hc.decode(codec.encode(x), out=odd).tobytes() == x.tobytes()


@pytest.mark.parametrize(
    ("dtype", "most"), [("float32", 27.3), ("bfloat16", 11.3), ("float16", 14.3), ("float64", 56.6)]
)
def test_bits_of_gaussian_values(dtype, most):
    n = 1 << 20
    x = common.gaussian(n, dtype)
    codec = hc.get_codec("exponent")
    assert 8 * flatten(codec.encode(x)).size / n < most


@pytest.mark.parametrize("dtype", EXPONENT_BITS)
def test_a_message_is_hardly_longer_than_its_input(dtype):
    codec = hc.get_codec("exponent")
    for n in (0, 1, 100, 256, 100_000):
        assert codec.bound(n, dtype) <= 1.01 * n * dtype.itemsize + HEADER + 1
        if n:
            data = sets(dtype, n)["any bits"]
            assert encoded(data, dtype).size <= codec.bound(n, dtype)


def test_zeros_take_next_to_nothing():
    codec = hc.get_codec("exponent")
    assert codec.encode(np.zeros(100_000, np.float32)).size == HEADER + 391
    x = common.gaussian(100_000)
    x[np.random.default_rng(1).random(x.size) < 0.7] = 0
    assert codec.encode(x).size < 0.87 * x.nbytes


def forge(msg: Array, at: int, value: int) -> Array:
    """Return a message with a byte replaced and the CRC that fits."""
    bad = msg.copy()
    bad[at] = value
    return common.reseal(bad)


def test_forged_payloads():
    x = common.gaussian(3000)
    msg = hc.get_codec("exponent").encode(x)
    blocks = 12
    codes = msg[HEADER : HEADER + blocks].copy()
    assert codes[:11].max() < 64
    assert codes[11] == RAW
    out = np.zeros(3000, np.float32)
    for value in (int(codes[0]) ^ 1, ZEROS, RAW, 128):  # lengths that do not add up
        with pytest.raises(hc.WireError, match="length"):
            hc.decode(forge(msg, HEADER, value), out=out)
    with pytest.raises(hc.WireError, match="code"):  # the last one is no whole block
        hc.decode(forge(msg, HEADER + 11, 3))
    swapped = msg.copy()  # the same length, and other numbers of escapes
    unequal = next(i for i in range(1, 11) if codes[i] != codes[0])
    swapped[[HEADER, HEADER + unequal]] = codes[[unequal, 0]]
    for use in (hc.decode, lambda m: hc.decode_add(m, out)):
        with pytest.raises(hc.WireError, match="escapes"):
            use(common.reseal(swapped))
    halves = hc.get_codec("exponent").encode(x.astype(np.float16))
    with pytest.raises(hc.WireError, match="code"):  # 63 escapes would save nothing in this type
        hc.decode(forge(halves, HEADER, 127))


def test_other_dtypes_are_as_they_are():
    codec = hc.get_codec("exponent")
    for x in (np.arange(5000), np.ones(700, bool), np.exp(1j * np.arange(900)).astype(np.complex64)):
        msg = codec.encode(x)
        assert msg[HEADER:].tobytes() == x.tobytes()
        assert hc.decode(msg).tobytes() == x.tobytes()
    with pytest.raises(hc.CodecMismatchError, match="adds to"):
        hc.decode_add(codec.encode(np.arange(5000)), np.zeros(5000, np.int64))
    bad = codec.encode(np.arange(5000))[:-1].copy()
    bad[16:24] = np.frombuffer((39_999).to_bytes(8, "little"), np.uint8)
    with pytest.raises(hc.WireError, match="malformed exponent payload"):
        hc.decode(common.reseal(bad))

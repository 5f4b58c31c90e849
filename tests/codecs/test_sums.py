"""Several messages at once: sums, decodes and encodes in one pass give what the separate calls give."""

from __future__ import annotations

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp import native, wire
from hybridcomp.arrays import DType, Flat, flatten
from hybridcomp.codecs import steps
from tests.codecs import common

ONE_PASS = [
    "int8",
    "int4:block=64",
    "int2",
    "int8:block=24:symmetric=false",
    "int4:block=2048:hadamard=true",
    "int8:rounding=stochastic:seed=3",
    "bf16",
    "fp16",
    "none",
]
SEPARATE = ["int8:block=65536", "fp8", "topk:ratio=0.3", "threshold:rel=1", "sign", "lossless", "exponent"]
SIZES = [0, 1, 127, 128, 4097]
LONG = 70_001


def unaligned(x: np.ndarray, offset: int) -> np.ndarray:
    """Return a copy that begins `offset` bytes after a multiple of 64."""
    memory = np.zeros(x.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    copy = memory[start : start + x.nbytes].view(x.dtype)
    copy[:] = x
    return copy


def own(n: int, dtype: str, seed: int = 0) -> Flat:
    return flatten(common.gaussian(n, dtype, seed))


def messages(codec: hc.Codec, n: int, dtype: str, count: int) -> list[np.ndarray]:
    return [flatten(codec.encode(common.gaussian(n, dtype, 10 + i))).data for i in range(count)]


def empty(codec: hc.Codec, n: int, dtype: DType) -> np.ndarray:
    return np.zeros(codec.bound(n, dtype) + 8, np.uint8)


def check(codec: hc.Codec, x: Flat, parts: list[np.ndarray], ranks: int, dtype: DType) -> None:
    """Compare with the separate calls, with and without streaming, in place and not."""
    total = steps.summed(x, parts, ranks, dtype)
    want = empty(codec, x.size, dtype)
    size = codec.encode_flat(Flat(total, dtype, total.shape, True, False), want)
    values = np.empty_like(x.data)
    codec.decode_flat(want[:size], wire.peek(want), values, x.dtype)
    before = x.data.copy()
    for offset in (x.dtype.itemsize, 1):
        for stream in (False, True):
            result = unaligned(np.zeros_like(x.data), offset)
            out = empty(codec, x.size, dtype)
            source = Flat(unaligned(x.data, offset), x.dtype, x.shape, True, False)
            assert codec.sum_encode(source, parts, ranks, dtype, out, result=result, stream=stream) == size
            assert out.tobytes() == want.tobytes()
            assert result.tobytes() == values.tobytes()
            codec.sum_encode(source, parts, ranks, dtype, out, result=source.data, stream=stream)
            assert source.data.tobytes() == values.tobytes()
            plain = unaligned(np.zeros_like(x.data), offset)
            codec.sum_into(x, parts, ranks, plain, stream=stream)
            assert plain.tobytes() == steps.summed(x, parts, ranks, x.dtype).tobytes()
    assert x.data.tobytes() == before.tobytes()


@pytest.mark.parametrize("isa", common.isas())
@pytest.mark.parametrize("dtype", common.FLOATS)
@pytest.mark.parametrize("spec", ONE_PASS + SEPARATE)
def test_sums_equal_the_separate_calls(spec, dtype, isa):
    codec = hc.get_codec(spec)
    kind = hc.codecs.base.arrays.as_dtype(dtype)
    into = kind if codec.lossless else kind.accumulator
    with common.isa(isa):
        for n in SIZES if spec != "lossless" else [1, 129]:
            check(codec, own(n, dtype), messages(codec, n, dtype, 3), 4, into)


@pytest.mark.parametrize("spec", ["int8", "int4", "int2", "bf16"])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 8])
def test_any_number_of_messages(spec, count):
    codec = hc.get_codec(spec)
    check(codec, own(LONG, "float32"), messages(codec, LONG, "float32", count), count + 1, DType.FLOAT32)


@pytest.mark.parametrize("spec", ["int8", "int4", "int2", "fp16"])
def test_sums_that_are_not_finite_or_tiny(spec):
    codec = hc.get_codec(spec)
    x = common.gaussian(1000)
    x[3], x[200], x[401], x[700:] = np.nan, np.inf, -np.inf, 1e-42
    y = common.gaussian(1000)
    y[201], y[600] = np.inf, -np.nan
    parts = [codec.encode(y), codec.encode(common.gaussian(1000, seed=2))]
    check(codec, flatten(x), parts, 3, DType.FLOAT32)


@pytest.mark.parametrize("spec", ["int8", "bf16"])
def test_sums_do_not_depend_on_threads(spec):
    codec = hc.get_codec(spec)
    n = (1 << 18) + 77
    x, parts = own(n, "float32"), messages(codec, n, "float32", 2)
    results = set()
    try:
        for threads in (1, 2, 5):
            hc.set_num_threads(threads)
            out, result, plain = empty(codec, n, x.dtype), np.zeros_like(x.data), np.zeros_like(x.data)
            codec.sum_encode(x, parts, 3, x.dtype, out, result=result, stream=True)
            codec.sum_into(x, parts, 3, plain, stream=True)
            results.add((out.tobytes(), result.tobytes(), plain.tobytes()))
    finally:
        hc.set_num_threads(1)
    assert len(results) == 1


@pytest.mark.parametrize("spec", ["int8", "int4:block=32", "bf16", "topk:ratio=0.1"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_messages_of_several_codecs(spec, dtype):
    """A hierarchy sums parts of this host's ranks as they are, and encoded sums of other hosts' leaders."""
    codec, plain = hc.get_codec(spec), hc.get_codec("none")
    n = 5000
    parts = [*messages(plain, n, dtype, 2), *messages(codec, n, "float32", 2)]
    check(codec, own(n, dtype), parts, 3, DType.FLOAT32)
    check(codec, own(n, dtype), parts[:2], 1, DType.FLOAT32)


@pytest.mark.parametrize("spec", ["int8", "int4", "none", "bf16"])
def test_one_pass_is_taken(spec):
    """The sums that collectives use most must not fall back to separate calls unseen."""
    codec = hc.get_codec(spec)
    x, parts = own(1000, "float32"), messages(codec, 1000, "float32", 2)
    kernels, out = native.kernels(), empty(codec, 1000, DType.FLOAT32)
    arguments = (codec.encoder, x.data, x.dtype, parts, 1, x.dtype, out, None, x.dtype, False)
    assert kernels.sum_encode(*arguments) == codec.bound(1000)
    assert kernels.sum_into(x.data, x.dtype, parts, 1, np.empty_like(x.data), x.dtype, False)
    parts += messages(hc.get_codec("none"), 1000, "float32", 1)
    assert kernels.sum_encode(*arguments) == codec.bound(1000)
    assert kernels.sum_into(x.data, x.dtype, parts, 1, np.empty_like(x.data), x.dtype, False)


# -- hostile messages --------------------------------------------------------------------------------------


def damaged(msg: np.ndarray, at: int, value: int, size: int) -> np.ndarray:
    msg = msg.copy()
    msg[at : at + size] = np.frombuffer(value.to_bytes(size, "little"), np.uint8)
    return msg


@pytest.mark.parametrize("spec", ["int8", "int4", "bf16"])
@pytest.mark.parametrize("place", [0, 1])
def test_hostile_messages_are_refused_before_anything_is_written(spec, place):
    codec = hc.get_codec(spec)
    x, good = own(1000, "float32"), messages(codec, 1000, "float32", 2)
    lies = [damaged(good[0], 8, count, 8) for count in (0, 999, 1001, 1 << 47, 1 << 48, (1 << 64) - 1)]
    lies += [damaged(good[0], 16, payload, 8) for payload in (0, 7, 999, 1 << 20, (1 << 64) - 1)]
    lies += [good[0][:cut] for cut in (0, 31, 32, 39, 500)]
    lies += [damaged(good[0], 0, 0, 4), damaged(good[0], 5, 200, 1)]
    if spec.startswith("int"):
        lies += [damaged(good[0], 32, block, 4) for block in (0, 1, 12, 64, 256, 1 << 31, (1 << 32) - 8)]
        lies += [damaged(good[0], 36, flags, 4) for flags in (1, 2, 4, 1 << 31)]
    for lie in lies:
        parts = [good[1], good[1]]
        parts[place] = lie
        result, out, fenced = (
            np.zeros(1000, np.float32),
            empty(codec, 1000, x.dtype),
            np.zeros(1000, np.float32),
        )
        with pytest.raises(hc.WireError):
            codec.sum_encode(x, parts, 3, x.dtype, out, result=result)
        with pytest.raises(hc.WireError):
            codec.sum_into(x, parts, 3, fenced)
        with pytest.raises(hc.WireError):
            codec.decode_many(parts, [result.copy(), result.copy()], x.dtype, stream=True)
        assert not out.any()
        assert not result.any()
        assert not fenced.any()


def test_sums_of_wrong_arguments():
    codec, kernels = hc.get_codec("int8"), native.kernels()
    x, out = common.gaussian(100), np.zeros(codec.bound(100), np.uint8)
    cases = [
        ("out is too small", (x, 1, [], 1, 1, out[:-1], None, 1, False)),
        ("result must have", (x, 1, [], 1, 1, out, x[1:].copy(), 1, False)),
        ("ranks must be at least 1", (x, 1, [], 0, 1, out, None, 1, False)),
        ("dtype code", (x, 5, [], 1, 1, out, None, 1, False)),
    ]
    for message, arguments in cases:
        with pytest.raises(ValueError, match=message):
            kernels.sum_encode(codec.encoder, *arguments)
    with pytest.raises(ValueError, match="out must have as many"):
        kernels.sum_into(x, 1, [], 1, x[1:].copy(), 1, False)


# -- opened, decoded, encoded together ---------------------------------------------------------------------


def test_opening_many_messages():
    codec = hc.get_codec("int8")
    sizes = [0, 1, 127, 5000]
    good = [codec.encode(common.gaussian(n)) for n in sizes]
    expected = (codec.wire_id, codec.params_hash, DType.FLOAT32)
    assert wire.first_fault(good, *expected, sizes) is None
    assert wire.first_fault([], *expected, []) is None
    longer = [np.concatenate([m, np.ones(9, np.uint8)]) for m in good]
    assert wire.first_fault(longer, *expected, sizes) is None
    for i in range(len(good)):
        changed = list(good)
        changed[i] = damaged(good[i], good[i].size - 1, int(good[i][-1]) ^ 1, 1)
        assert wire.first_fault(changed, *expected, sizes) == i
        assert wire.first_fault(changed, *expected, sizes, crc=False) is None
        changed[i] = good[i][:-1]
        assert wire.first_fault(changed, *expected, sizes) == i
        assert wire.first_fault(changed, *expected, sizes, crc=False) == i
        assert wire.first_fault(good, *expected, [n + (j == i) for j, n in enumerate(sizes)]) == i
    assert wire.first_fault(good, codec.wire_id + 1, codec.params_hash, DType.FLOAT32, sizes) == 0
    assert wire.first_fault(good, codec.wire_id, codec.params_hash ^ 1, DType.FLOAT32, sizes) == 0
    assert wire.first_fault(good, codec.wire_id, codec.params_hash, DType.FLOAT16, sizes) == 0
    with pytest.raises(ValueError, match="one count for every message"):
        wire.first_fault(good, *expected, sizes[1:])


@pytest.mark.parametrize("spec", [*ONE_PASS, *SEPARATE])
@pytest.mark.parametrize("dtype", common.FLOATS)
def test_decoding_many(spec, dtype):
    codec = hc.get_codec(spec)
    sources = [own(n, dtype, n) for n in (0, 1, 129, 9000)]
    kind = sources[0].dtype
    buffers = [empty(codec, s.size, kind) for s in sources]
    encoded = [buffer[: codec.encode_flat(s, buffer)] for s, buffer in zip(sources, buffers, strict=True)]
    for into in (kind, DType.FLOAT32, DType.BFLOAT16):
        if into is not kind and codec.lossless and spec != "none":
            continue
        for offset in (0, 16, 1):
            for stream in (False, True):
                outs = [unaligned(np.zeros(s.size, into.storage), offset) for s in sources]
                codec.decode_many(encoded, outs, into, stream=stream)
                for msg, out in zip(encoded, outs, strict=True):
                    want = np.zeros_like(out)
                    codec.decode_flat(msg, wire.peek(msg), want, into)
                    assert out.tobytes() == want.tobytes()


def test_decoding_many_of_wrong_lengths():
    codec = hc.get_codec("int8")
    x = common.gaussian(100)
    msg = codec.encode(x)
    for outs in ([np.zeros(99, np.float32)], [np.zeros(101, np.float32)]):
        with pytest.raises(hc.WireError, match="a message of 100 elements"):
            codec.decode_many([msg], outs, DType.FLOAT32)


def test_integers_are_encoded_and_decoded_by_none():
    codec = hc.get_codec("none")
    sources = [np.arange(n, dtype=np.int32) for n in (0, 5, 300)]
    buffers = [codec.encode(s) for s in sources]
    outs = [np.zeros_like(s) for s in sources]
    codec.decode_many(buffers, outs, DType.INT32)
    for source, out in zip(sources, outs, strict=True):
        np.testing.assert_array_equal(out, source)


@pytest.mark.parametrize("spec", ["int8", "topk:ratio=0.3"])
def test_a_malformed_message_of_no_elements_is_refused(spec):
    codec = hc.get_codec(spec)
    payload = np.zeros(3, np.uint8)  # too short for any prefix
    message = np.zeros(wire.HEADER_BYTES + payload.size, np.uint8)
    wire.seal(message, codec.wire_id, codec.params_hash, dtype=DType.FLOAT32, count=0, payload=payload.size)
    x = Flat(np.empty(0, np.float32), DType.FLOAT32, (0,), True, False)
    with pytest.raises(hc.WireError, match="malformed"):
        codec.sum_encode(x, [message], 1, DType.FLOAT32, empty(codec, 0, DType.FLOAT32))
    with pytest.raises(hc.WireError, match="malformed"):
        codec.sum_into(x, [message], 1, x.data)


@pytest.mark.parametrize("spec", ["none", "exponent", "mpc", "lossless", "sketch", "int8", "topk:ratio=0.5"])
def test_messages_of_other_types_are_refused(spec):
    """A header may say anything, with the CRC that fits: what does not add up is the sender's fault."""
    codec = hc.get_codec(spec)
    own = np.zeros(100, np.float32)
    messages = [codec.encode(np.ones(100, np.float64))]
    if codec.refuses(flatten(np.ones(100, np.int64))) is None:
        messages.append(codec.encode(np.ones(100, np.int64)))
        with pytest.raises(hc.WireError, match="int64 where float32"):
            codec.decode_many([messages[-1]], [own], DType.FLOAT32)
    for message in messages:
        with pytest.raises(hc.WireError, match=r"does not add to float32|where float32 was expected"):
            codec.sum_into(flatten(own), [message], 1, own)
        out = np.zeros(codec.bound(100), np.uint8)
        with pytest.raises(hc.WireError):
            codec.sum_encode(flatten(own), [message], 1, DType.FLOAT32, out)
    assert not own.any()

"""The short way: one native call for plain arrays. It must give what the long way gives, and know its limits."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp import native
from tests.codecs.common import SPECS

kernels = native.kernels()
SHORT = [spec for spec in SPECS if hc.get_codec(spec).encoder is not None]


def values(n: int, dtype: str) -> np.ndarray:
    return np.random.default_rng(n).standard_normal(n).astype(dtype)


def test_most_codecs_have_a_short_way():
    names = {hc.get_codec(spec).name for spec in SHORT}
    assert names >= {"none", "fp16", "bf16", "int8", "int4", "int2", "sign", "fp8", "mxfp8", "mxfp4", "zfp"}
    assert names >= {"exponent", "bounded", "topk", "threshold", "sidco", "lattice"}
    assert hc.get_codec("topk:values=bf16").encoder is None
    assert hc.get_codec("topk:ratio=1e-40").encoder is None  # its denominator is no 64-bit number


@pytest.mark.parametrize("spec", SHORT)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_encodes_the_same(spec, dtype):
    codec = hc.get_codec(spec)
    for n in (0, 1, 2, 7, 129, 5001, 70001):
        x = values(n, dtype)
        if codec.refuses(hc.arrays.flatten(x)) is not None:
            assert codec.encoder.encode_plain(x, np.empty(10 * n + 999, np.uint8)) == 0
            continue
        out = np.full(codec.bound(n, dtype) + 3, 0xAB, np.uint8)
        size = codec.encoder.encode_plain(x, out)
        assert size > 0
        assert out[:size].tobytes() == codec.encode(x).tobytes()  # without out: the long way
        assert codec.encode(x, out=out).base is out
        assert (out[codec.bound(n, dtype) :] == 0xAB).all()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_decodes_the_same(spec, dtype):
    codec = hc.get_codec(spec)
    for n in (0, 1, 129, 5001):
        x = values(n, dtype)
        if codec.refuses(hc.arrays.flatten(x)) is not None:
            continue
        msg = codec.encode(x)
        sums = hc.arrays.as_dtype(dtype).accumulator.storage
        for kind in ("float32", "float64", "float16"):
            short, long = np.empty(n, kind), np.empty((n, 1), kind)
            hc.decode(msg, out=long)
            if kernels.decode_plain(msg, short, False):
                assert short.tobytes() == long.tobytes()
        short, long = np.ones(n, sums), np.ones((n, 1), sums)
        hc.decode_add(msg, long)
        if kernels.decode_plain(msg, short, True):
            assert short.tobytes() == long.tobytes()
        assert kernels.decode_plain(msg, np.empty(n, dtype), False) == (
            codec.name not in ("lossless", "powersgd", "sketch", "randomblock")
            and (codec.encoder is not None or codec.name == "mpc")
        )


def test_what_is_unusual_goes_the_long_way():
    codec = hc.get_codec("int8")
    x = values(64, "float32")
    out = np.empty(codec.bound(64), np.uint8)
    read_only = out.copy()
    read_only.flags.writeable = False
    odd = [
        (x.reshape(8, 8), out),
        (x[::2], out),
        (x.astype(">f4"), out),
        (x.astype(np.int32), out),
        (x.view(np.uint8), out),
        (list(x), out),
        (x.view(np.recarray), out),
        (x, out[:-1]),
        (x, np.empty(2 * out.size, np.uint8)[::2]),
        (x, out.view(np.int8)),
        (x, read_only),
        (x, bytearray(out.size)),
        (x, None),
    ]
    for source, target in odd:
        assert codec.encoder.encode_plain(source, target) == 0
    msg = codec.encode(x, out=out)
    assert codec.encode(x.reshape(8, 8), out=np.empty_like(out)).tobytes() == msg.tobytes()
    with pytest.raises(ValueError, match="at least"):
        codec.encode(x, out=out[:-1])
    for source, target in [
        (msg[:-1], x),
        (msg[:20], x),
        (msg.tobytes(), x),
        (msg, x[:-1]),
        (msg, x.reshape(8, 8)),
        (msg, np.empty(128, np.float32)[::2]),
        (msg, np.empty(64, np.uint16)),
        (msg, np.empty(64, ">f4")),
        (msg, list(x)),
    ]:
        assert not kernels.decode_plain(source, target, False)
    assert not kernels.decode_plain(msg, np.empty(64), True)  # sums of float32 are kept in float32
    assert not kernels.decode_plain(hc.get_codec("none").encode(np.arange(64)), x, False)


def test_every_damaged_byte_is_refused():
    for spec in ("int8", "topk:ratio=0.1"):
        x = values(64, "float32")
        msg, out = np.array(hc.get_codec(spec).encode(x)), np.zeros(64, np.float32)
        assert kernels.decode_plain(msg, out, False)
        for at in range(msg.size):
            for bit in range(8):
                damaged = msg.copy()
                damaged[at] ^= 1 << bit
                assert not kernels.decode_plain(damaged, out, False)


@pytest.mark.parametrize("spec", SPECS)
def test_codecs_are_copied(spec):
    codec = hc.get_codec(spec)
    codec.encode(values(64, "float32").reshape(8, 8), out=np.empty(codec.bound(64) + 4096, np.uint8))
    for again in (copy.copy(codec), copy.deepcopy(codec), pickle.loads(pickle.dumps(codec))):
        assert again == codec
        assert again.spec == codec.spec

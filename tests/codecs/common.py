"""Checks that every codec must pass, and the arrays they are made on."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import hybridcomp as hc
from hybridcomp import native, wire
from hybridcomp.arrays import DType, as_dtype, flatten, is_torch
from hybridcomp.codecs import Codec

try:
    import torch
except ImportError:  # `make aarch64` does without, and without the tests of bfloat16 tensors
    torch = None

Array = npt.NDArray[Any]

SPECS = [
    "none",
    "fp16",
    "bf16",
    "int8",
    "int8:block=8",
    "int8:block=65536",
    "int4",
    "int4:block=24",
    "int4:rounding=stochastic:seed=5",
    "int4:block=64:symmetric=false",
    "int4:block=2048:hadamard=true",
    "int2",
    "int2:block=4096:symmetric=false",
    "int2:block=8:symmetric=false:hadamard=true:rounding=stochastic",
    "int8:block=32:hadamard=true",
    "sign",
    "sign:block=24",
    "lossless",
    "lossless:level=1",
    "mpc",
    "mpc:lag=1",
    "exponent",
    "fp8",
    "fp8:e5m2,block=24",
    "fp8:e4m3,block=65536",
    "mxfp8",
    "mxfp8:e5m2",
    "mxfp4",
    "bounded",
    "bounded:abs=0.01",
    "bounded:rel=1e-6",
    "bounded:coder=lz",
    "bounded:abs=0.3,coder=lz,vector=3",
    "bounded:coder=huffman",
    "bounded:abs=0.3,coder=huffman",
    "topk:ratio=0.01",
    "topk:ratio=0.3,values=bf16",
    "topk:ratio=1.0",
    "topk:ratio=0.05,values=(int8:block=64)",
    "threshold:abs=0.7",
    "threshold:rel=2.0,values=int4",
    "sidco:ratio=0.02",
    "sidco:ratio=0.4,values=fp16,stages=3",
    "powersgd",
    "powersgd:rank=1,seed=7",
    "zfp:rate=8",
    "zfp:rate=7.25",
    "zfp:rate=24",
    "randomblock:ratio=0.05",
    "randomblock:ratio=0.7,seed=3,values=(int8:block=64)",
    "lattice",
    "lattice:bits=16:rounding=stochastic:seed=5",
    "lattice:bits=32:ranks=3",
    "sketch",
    "sketch:load=0.5:lanes=64:form=packed",
    "sketch:index=bloom:fpr=0.01:density=0.1",
]
SIZES = [0, 1, 2, 3, 7, 8, 9, 127, 128, 129, 1000, 4097, 65535, 65536, 65537]
FLOATS = ["float32", "float64", "float16", "bfloat16"]


def isas() -> list[str]:
    """Return the instruction sets that this machine has."""
    names: list[str] = native.kernels().available_isas()
    return names


isa = native.using_isa


def gaussian(n: int, dtype: str = "float32", seed: int = 0) -> Any:
    """Return normal data: a NumPy array, or a torch tensor for bfloat16, which NumPy lacks."""
    values = np.random.default_rng(seed).standard_normal(n)
    if dtype == "bfloat16":
        return torch.from_numpy(values).to(torch.bfloat16)
    return values.astype(dtype)


def wide(x: Any) -> npt.NDArray[np.float64]:
    """Return any float array or tensor as flat float64."""
    if is_torch(x):
        return x.detach().double().numpy().reshape(-1)
    return np.asarray(x, np.float64).reshape(-1)


def bits(x: Any) -> bytes:
    """Return the elements' bytes, to compare NaN and signed zero too."""
    return flatten(x).data.tobytes()


def accumulator(dtype: DType, n: int, seed: int = 1) -> Array:
    """Return a sum to add to: float32, or float64 for float64."""
    return np.random.default_rng(seed).standard_normal(n).astype(dtype.accumulator.storage)


def with_specials(x: Array, seed: int = 0, share: float = 0.1) -> Array:
    """Return a copy of floats with NaN of several bits, infinities and zeros of both signs among them.

    Args:
        x: values of any float dtype, or the bits of bfloat16 as uint16.
        seed: seed of which elements, and of which values: a rank, so that ranks meet different ones.
        share: share of the elements.
    """
    kind = np.dtype(f"u{x.itemsize}")
    brief = {2: (0x7F80, 0x7FC0) if x.dtype.kind == "u" else (0x7C00, 0x7E00), 4: (0x7F800000, 0x7FC00000)}
    infinity, nan = brief.get(x.itemsize, (0x7FF0 << 48, 0x7FF8 << 48))
    sign = 1 << (8 * x.itemsize - 1)
    drawn = [nan, nan | sign, nan + 1 + seed, (nan | sign) + 2 + seed, infinity + 3 + seed]
    drawn += [infinity, infinity | sign, 0, sign]
    rng = np.random.default_rng([seed, x.size])
    found = x.copy()
    at = rng.random(x.shape) < share
    found.view(kind)[at] = rng.choice(np.array(drawn, kind), int(at.sum()))
    return found


def reseal(msg: Array) -> Array:
    """Give a changed message the CRC that fits it: what a hostile sender would do."""
    crc = native.kernels().crc32c(msg[32:], native.kernels().crc32c(msg[:28]))
    msg[28:32] = np.frombuffer(crc.to_bytes(4, "little"), np.uint8)
    return msg


def relative_error(x: Any, y: Any) -> float:
    """Return the L2 norm of the difference over that of ``x``."""
    return float(np.linalg.norm(wide(x) - wide(y)) / np.linalg.norm(wide(x)))


# -- the suite ---------------------------------------------------------------------------------------------


def check_message(codec: Codec, x: Any) -> Array:
    """Encode and check what holds for every message; return it."""
    src = flatten(x)
    n, dtype = src.size, src.dtype
    msg = codec.encode(x)
    raw, header = wire.open_message(msg)
    assert type(msg) is (torch.Tensor if src.is_torch else np.ndarray)
    assert (header.codec, header.dtype, header.count) == (codec.wire_id, dtype, n)
    assert header.params == codec.params_hash == native.kernels().crc32c(codec.spec.encode())
    bound = codec.bound(n, dtype)
    assert raw.size == bound if codec.fixed_size else raw.size <= bound
    assert bits(codec.encode(x)) == raw.tobytes(), "the same input must make the same bytes"
    assert codec.ratio(n, dtype) == n * dtype.itemsize / bound

    buffer = np.full(bound + 16, 0xA5, np.uint8)
    written = codec.encode(x, out=buffer)
    assert bits(written) == raw.tobytes()
    assert np.all(buffer[bound:] == 0xA5), "encode wrote past its bound"
    with pytest.raises(ValueError, match="out must be"):
        codec.encode(x, out=np.empty(bound - 1, np.uint8))
    return np.array(raw)


def check_round_trip(codec: Codec, x: Any) -> Any:
    """Encode, decode in every way, and compare; return the decoded values."""
    msg = check_message(codec, x)
    src = flatten(x)
    n, dtype = src.size, src.dtype
    y = hc.decode(torch.from_numpy(msg.copy()) if src.is_torch else msg)
    assert type(y) is (torch.Tensor if src.is_torch else np.ndarray)
    assert as_dtype(y.dtype) is dtype
    assert y.shape == (n,)
    if codec.lossless:
        assert bits(y) == src.data.tobytes()

    # A buffer of the caller's, of every float type, with fences around it.
    for other in DType:
        if not other.is_float or (other is DType.BFLOAT16 and torch is None):
            continue
        fenced = np.full(n * other.itemsize + 2, 0xA5, np.uint8)
        out = fenced[1:-1].view(other.storage)  # unaligned on purpose
        if other is DType.BFLOAT16:
            tensor = torch.empty(n, dtype=torch.bfloat16)
            assert codec.decode(msg, out=tensor) is tensor
            got = wide(tensor)
        else:
            assert codec.decode(msg, out=out) is out
            got = wide(out)
        assert fenced[0] == fenced[-1] == 0xA5, "decode wrote outside its buffer"
        if dtype is DType.FLOAT32 and other is DType.FLOAT64:
            np.testing.assert_array_equal(got, wide(y))  # widening is exact

    # decode_add is decode, then one addition in the accumulator's type.
    acc = accumulator(dtype, n)
    exact = np.empty(n, acc.dtype)
    codec.decode(msg, out=exact)
    with np.errstate(invalid="ignore"):
        expected = acc + exact
    total = acc.copy()
    codec.decode_add(msg, total)
    np.testing.assert_array_equal(total, expected)
    fenced = np.full(acc.nbytes + 2, 0xA5, np.uint8)
    unaligned = fenced[1:-1].view(acc.dtype)
    unaligned[:] = acc
    hc.decode_add(msg, unaligned)
    np.testing.assert_array_equal(unaligned, expected)
    assert fenced[0] == fenced[-1] == 0xA5
    return y


def check_config(codec: Codec) -> None:
    """Check that the spec string, the config and the repr make an equal codec, and that parameters are read-only."""
    assert hc.get_codec(codec.spec) == codec
    assert hc.get_codec(codec.name, **codec.params) == codec
    assert hash(hc.get_codec(codec.spec)) == hash(codec)
    assert hc.get_codec(codec) is codec
    namespace = {type(codec).__name__: type(codec)}
    assert eval(repr(codec), namespace) == codec
    assert codec != object()
    for name in codec.params:
        if name not in codec.seldom:
            assert codec.spec.count(f":{name}=") == 1
        if name != "ratio":  # Codec.ratio is the compression ratio
            with pytest.raises(AttributeError):
                setattr(codec, name, 1)
    with pytest.raises(ValueError, match="no parameter 'colour'"):
        hc.get_codec(codec.name, colour=1)


def check_rejects(codec: Codec, x: Any) -> None:
    """Check that wrong buffers are errors that say so."""
    msg = codec.encode(x)
    n = flatten(x).size
    with pytest.raises(ValueError, match=f"{n + 1} elements"):
        hc.decode(msg, out=np.empty(n + 1, np.float32))
    with pytest.raises(ValueError, match=f"{n + 1} elements"):
        hc.decode_add(msg, np.zeros(n + 1, np.float32))
    with pytest.raises(hc.CodecMismatchError):
        hc.decode(msg, out=np.empty(n, np.int32))
    with pytest.raises(hc.CodecMismatchError):
        hc.decode_add(msg, np.zeros(n, np.float16))


def check_non_finite(codec: Codec, x: Array) -> None:
    """Check that a NaN or an infinity anywhere decodes to something that is not finite, there and in the sum."""
    for value in (np.nan, np.inf, -np.inf):
        for at in (0, x.size // 2, x.size - 1):
            bad = x.copy()
            bad.reshape(-1)[at] = value
            msg = codec.encode(bad)
            assert not np.isfinite(hc.decode(msg)[at])
            acc = np.zeros(x.size, as_dtype(x.dtype).accumulator.storage)
            hc.decode_add(msg, acc)
            assert not np.isfinite(acc[at])


def check_isas_agree(codec: Codec, x: Any) -> None:
    """Check that all instruction sets write the same message and decode it to the same bits."""
    odd = x if is_torch(x) else with_specials(x, share=0.01)
    for values in (x, odd):
        assert len({_by_isa(codec, values, name) for name in isas()}) == 1


def _by_isa(codec: Codec, x: Any, name: str) -> tuple[bytes, ...]:
    """Return a message by one instruction set, what it decodes to, and that added to a sum."""
    with isa(name):
        msg = codec.encode(x)
        acc = with_specials(accumulator(flatten(x).dtype, flatten(x).size))
        hc.decode_add(msg, acc)
        half = np.empty(acc.size, np.float16)
        hc.decode(msg, out=half)
        return bits(msg), bits(hc.decode(msg)), acc.tobytes(), half.tobytes()


def check_hostile(codec: Codec, x: Any) -> None:
    """Check that damage is a WireError; a forged message with a good CRC is one or decodes within its buffer."""
    msg = np.array(flatten(codec.encode(x)).data)
    for length in {*range(min(msg.size, 120)), msg.size - 1}:
        with pytest.raises(hc.WireError):
            hc.decode(msg[:length])
    rng = np.random.default_rng(3)
    flips = range(msg.size * 8) if msg.size < 300 else rng.integers(0, msg.size * 8, 2000)
    n = flatten(x).size
    fenced = np.zeros(n + 32, np.float32)
    for bit in flips:
        bad = msg.copy()
        bad[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(hc.WireError):
            hc.decode(bad)
        forged = reseal(bad)
        with contextlib.suppress(hc.WireError, hc.CodecMismatchError, ValueError):
            hc.decode(forged, out=fenced[16:-16])
        with contextlib.suppress(hc.WireError, hc.CodecMismatchError, ValueError):
            hc.decode_add(forged, fenced[16:-16])
        assert not np.concatenate([fenced[:16], fenced[-16:]]).any()
    for count in (0, n - 1, n + 1, 2 * n + 1, 2**32, 2**48, 2**63):
        if count < 0 or count == n:
            continue
        bad = msg.copy()
        bad[8:16] = np.frombuffer(count.to_bytes(8, "little"), np.uint8)
        if count > 2 * n + 1 or (codec.fixed_size and codec.bound(count) != codec.bound(n)):
            with pytest.raises(hc.WireError):
                hc.decode(reseal(bad))
        else:  # may be a message that this codec could have written
            with contextlib.suppress(hc.WireError):
                assert hc.decode(reseal(bad)).shape == (count,)
    for extra in (1, 4, 1000):  # a longer payload than the count makes
        bad = np.concatenate([msg, np.zeros(extra, np.uint8)])
        bad[16:24] = np.frombuffer((bad.size - 32).to_bytes(8, "little"), np.uint8)
        with pytest.raises(hc.WireError):
            hc.decode(reseal(bad))

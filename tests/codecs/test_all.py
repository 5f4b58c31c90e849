"""The suite of common.py over every codec."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import hybridcomp as hc
from hybridcomp.arrays import DType
from hybridcomp.codecs import names
from tests.codecs import common
from tests.codecs.common import FLOATS, SIZES, SPECS, torch

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def test_suite_covers_every_codec():
    assert {hc.get_codec(s).name for s in SPECS} == set(names())


@pytest.mark.parametrize("spec", SPECS)
def test_config(spec):
    common.check_config(hc.get_codec(spec))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("spec", SPECS)
def test_round_trip(spec, dtype):
    codec = hc.get_codec(spec)
    for n in SIZES:
        common.check_round_trip(codec, common.gaussian(n, dtype, seed=n))


@pytest.mark.parametrize("spec", SPECS)
def test_isas_agree(spec):
    codec = hc.get_codec(spec)
    for dtype in FLOATS:
        for n in (1, 129, 4999, 70001):
            common.check_isas_agree(codec, common.gaussian(n, dtype, seed=n))


@pytest.mark.parametrize("spec", SPECS)
def test_isas_agree_on_extreme_values(spec):
    """Denormals, the largest numbers, signed zeros, infinities and NaN payloads."""
    rng = np.random.default_rng(5)
    codec = hc.get_codec(spec)
    for dtype, integer in (("float32", np.uint32), ("float16", np.uint16), ("float64", np.uint64)):
        anything = rng.integers(0, np.iinfo(integer).max, 3001, integer, endpoint=True).view(dtype)
        finite = np.where(np.isfinite(anything), anything, np.array(0, dtype))
        for x in (anything, finite):
            results = set()
            for name in common.isas():
                with common.isa(name):
                    msg = codec.encode(x)
                    wide = np.empty(x.size, np.float64)
                    hc.decode(msg, out=wide)
                    wide[np.isnan(wide)] = np.nan  # which NaN does not matter once decoded
                    results.add((msg.tobytes(), wide.tobytes()))
            assert len(results) == 1


@pytest.mark.parametrize("spec", SPECS)
def test_non_finite_values_survive(spec):
    codec = hc.get_codec(spec)
    for dtype in ("float32", "float64", "float16"):
        common.check_non_finite(codec, common.gaussian(1000, dtype))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("n", [1, 30])
def test_hostile_bytes(spec, n):
    common.check_hostile(hc.get_codec(spec), common.gaussian(n))


@pytest.mark.parametrize(
    "spec",
    [
        "int8",
        "int4:block=24",
        "topk:ratio=0.3,values=bf16",
        "powersgd",
        "lossless",
        "mpc",
        "exponent",
        "bounded:abs=0.1,coder=lz,vector=7",
        "bounded:abs=0.1,coder=huffman",
        "lattice",
        "sketch",
        "randomblock",
    ],
)
def test_hostile_bytes_of_large_messages(spec):
    common.check_hostile(hc.get_codec(spec), common.gaussian(70000))


@pytest.mark.parametrize("spec", SPECS)
def test_rejects_wrong_buffers(spec):
    common.check_rejects(hc.get_codec(spec), common.gaussian(50))


@pytest.mark.parametrize("spec", SPECS)
def test_layouts_make_the_same_message(spec):
    """Unaligned, strided, read-only, Fortran-ordered and torch views of the same values."""
    codec = hc.get_codec(spec)
    for dtype in (np.float32, np.float64, np.float16):
        x = common.gaussian(30 * 40, dtype().dtype.name).reshape(30, 40)
        message = codec.encode(x).tobytes()
        raw = np.empty(x.nbytes + 1, np.uint8)
        unaligned = raw[1:].view(dtype).reshape(x.shape)
        unaligned[...] = x
        strided = np.repeat(x, 2, axis=1)[:, ::2]
        read_only = x.copy()
        read_only.flags.writeable = False
        for other in (unaligned, strided, read_only, np.asfortranarray(x)):
            before = other.copy()
            assert codec.encode(other).tobytes() == message
            np.testing.assert_array_equal(other, before)
        tensor = torch.from_numpy(x.copy())
        assert common.bits(codec.encode(tensor)) == message
        assert common.bits(codec.encode(tensor.t().contiguous().t())) == message
        assert common.bits(codec.encode(tensor.requires_grad_())) == message


@pytest.mark.parametrize("spec", SPECS)
def test_messages_of_any_alignment_and_type(spec):
    codec = hc.get_codec(spec)
    msg = codec.encode(common.gaussian(333))
    y = hc.decode(msg)
    shifted = np.concatenate([np.zeros(3, np.uint8), msg])[3:]
    read_only = np.frombuffer(msg.tobytes(), np.uint8)
    trailing = np.concatenate([msg, np.ones(9, np.uint8)])  # as in a receive buffer of the bound's size
    for form in (shifted, read_only, trailing, msg.tobytes(), bytearray(msg.tobytes()), memoryview(msg)):
        assert common.bits(hc.decode(form)) == common.bits(y)
        acc = np.zeros(333, np.float32)
        hc.decode_add(form, acc)
        np.testing.assert_array_equal(acc, y + np.float32(0))
    assert isinstance(hc.decode(torch.from_numpy(msg)), torch.Tensor)


@pytest.mark.parametrize("spec", SPECS)
def test_other_codecs_messages_are_refused(spec):
    codec = hc.get_codec(spec)
    for other in SPECS:
        if hc.get_codec(other) == codec:
            continue
        with pytest.raises(hc.WireError, match="is not"):
            codec.decode(hc.get_codec(other).encode(common.gaussian(20)))


@pytest.mark.parametrize("spec", [s for s in SPECS if not hc.get_codec(s).lossless])
def test_integers_are_refused(spec):
    codec = hc.get_codec(spec)
    for dtype in ("int32", "bool", "complex64", "uint8"):
        with pytest.raises(hc.CodecMismatchError, match="not floating-point"):
            codec.encode(np.zeros((4, 4), dtype))
        assert codec.can_carry(DType[dtype.upper()], (4, 4)) is not None


@pytest.mark.parametrize("spec", [s for s in SPECS if hc.get_codec(s).lossless])
def test_lossless_codecs_carry_every_dtype(spec):
    codec = hc.get_codec(spec)
    for dtype in DType:
        if dtype.is_float:
            continue
        assert codec.can_carry(dtype, (10,)) is None
        for n in (0, 1, 10, 5000):
            x = np.arange(n).astype(dtype.storage)
            y = hc.decode(common.check_message(codec, x))
            assert y.dtype == x.dtype
            np.testing.assert_array_equal(y, x)
    msg = codec.encode(np.arange(3))
    with pytest.raises(hc.CodecMismatchError, match="cannot be decoded into"):
        hc.decode(msg, out=np.empty(3, np.float32))
    with pytest.raises(hc.CodecMismatchError):
        hc.decode_add(msg, np.zeros(3, np.int64))
    with pytest.raises(hc.CodecMismatchError, match="cannot be carried"):
        codec.encode(np.array(["text"]))


@settings(deadline=None, max_examples=60)
@given(
    spec=st.sampled_from(SPECS),
    x=hnp.arrays(
        st.sampled_from([np.float32, np.float64, np.float16]),
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=20),
        elements=st.floats(-100, 100, width=16),
    ),
)
def test_any_shape(spec, x):
    codec = hc.get_codec(spec)
    y = common.check_round_trip(codec, x)
    assert np.isfinite(y).all()


def test_flush_to_zero_does_not_change_messages():
    """torch.set_flush_denormal sets the processor's modes for this thread; the kernels must not notice."""
    rng = np.random.default_rng(8)
    x = (rng.standard_normal(4096) * np.exp2(rng.integers(-149, 120, 4096))).astype(np.float32)
    halves = rng.integers(0, 0x7C00, 4096, np.uint16).view(np.float16)
    # PowerSGD's sums of products are not protected: they are float32 arithmetic on the data itself.
    specs = [spec for spec in SPECS if not spec.startswith("powersgd")]
    specs += ["bounded:rel=1e-30", "bounded:abs=1e-3", "bounded:abs=1e-37", "bounded:abs=1e-42"]
    specs += [f"lattice:bits={b}:rounding={r}" for b in (8, 16, 32) for r in ("nearest", "stochastic")]
    assert np.any((x != 0) & (np.abs(x) < np.finfo(np.float32).tiny))

    def everything() -> list[bytes]:
        found = []
        for name in common.isas():
            with common.isa(name):
                for spec in specs:
                    for data in (x, halves):
                        msg = hc.get_codec(spec).encode(data)
                        found += [msg.tobytes(), hc.decode(msg).tobytes()]
        return found

    plain = everything()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no flush-to-zero mode")
    try:
        assert np.float32(1e-30) * np.float32(1e-10) == 0
        flushed = everything()
    finally:
        torch.set_flush_denormal(False)
    assert plain == flushed

"""An owner's sum with error feedback: what is done in fewer passes has the bits of the plain way."""

from __future__ import annotations

import numpy as np
import pytest

from hybridcomp import wire
from hybridcomp.arrays import DType, Flat
from hybridcomp.codecs import ErrorFeedback, PowerSGDCodec, get_codec
from hybridcomp.codecs.memory import Memory
from tests.codecs import common

SPECS = [
    "int8",
    "int8:block=8",
    "int4:block=128",
    "int2:block=64",
    "int4:block=8192",
    "topk:ratio=0.1",
    "fp8:e4m3",
]


def assert_same(a: np.ndarray, b: np.ndarray) -> None:
    assert common.bits(a) == common.bits(b)


def flat(x: np.ndarray) -> Flat:
    return Flat(x, DType.FLOAT64 if x.dtype == np.float64 else DType.FLOAT32, x.shape, True, False)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("form", ["ef", "ef21", "loco", "dgc"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("ranks", [1, 3])
def test_sums_of_an_owner(spec, form, dtype, ranks):
    codec, rng, n = get_codec(spec), np.random.default_rng(3), 3000
    span = slice(256, 256 + 1024)
    ours, plain = (ErrorFeedback(form=form).memory(("k",), n, dtype) for _ in range(2))
    for _ in range(3):
        own, other = rng.standard_normal((2, 1024)).astype(dtype)
        parts = [codec.encode(other), codec.encode(-2 * other)]
        outs = []
        for memory, fused in ((ours, True), (plain, False)):
            memory.begin()
            out = np.zeros(codec.bound(1024, dtype), np.uint8)
            if fused:
                total = memory.summed(codec, flat(own), parts, span)
                size = memory.encode_sum(codec, total, out, span, ranks)
            else:
                total = memory.own(codec, flat(own), span)
                for part in parts:
                    codec.decode_add_flat(part, wire.peek(part), total)
                way = Memory.encode_sum if form == "ef" else type(memory).encode_sum
                size = way(memory, codec, total, out, span, ranks)
            outs.append(out[:size])
        assert_same(*outs)
    for name, array in ours.arrays().items():
        assert_same(array, plain.arrays()[name])


def test_a_sum_that_is_not_finite_changes_no_state():
    memory = ErrorFeedback(form="ef").memory(("k",), 512, np.float32)
    codec, out = get_codec("int4"), np.zeros(4096, np.uint8)
    x = np.random.default_rng(1).standard_normal(512).astype(np.float32)
    memory.encode_sum(codec, x.copy(), out, slice(0, 512), 3)
    before = memory.arrays()[""]
    assert before.any()
    x[7] = np.inf
    memory.encode_sum(codec, x, out, slice(0, 512), 3)
    assert np.array_equal(memory.arrays()[""], before)


@pytest.mark.parametrize("shape", [(40, 30), (1, 17), (3, 2, 5, 5), (7, 1025), (64, 4100)])
@pytest.mark.parametrize("rank", [1, 2, 3, 5, 8])
def test_powersgd_in_place(shape, rank):
    """The result and the residual of one pass are those of the plain way."""
    codec, rng = PowerSGDCodec(rank=rank), np.random.default_rng(5)
    x = rng.standard_normal(int(np.prod(shape))).astype(np.float32)

    def run(values, **how):
        steps = codec.reduction(
            Flat(values, DType.FLOAT32, shape, True, False), ranks=2, mean=True, warm={}, name="w", **how
        )
        while True:
            try:
                next(steps).array[...] *= 1.5
            except StopIteration as end:
                return end.value

    plain = run(x.copy())
    values, residual = x.copy(), np.full_like(x, 7)
    result = run(values, residual=residual)
    assert result.replaced
    assert_same(values, plain.total)
    assert_same(residual, x - plain.own)
    bad = x.copy()
    bad[0] = np.nan
    result = run(bad, residual=residual)
    assert result.replaced
    assert np.isnan(bad).all()
    assert_same(residual, x - plain.own)

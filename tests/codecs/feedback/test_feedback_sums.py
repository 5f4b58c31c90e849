"""An owner's sum with error feedback: fewer passes give the bits of the plain way."""

from __future__ import annotations

import numpy as np
import pytest

from hybridcomp import native, wire
from hybridcomp.arrays import DType, Flat, as_dtype
from hybridcomp.codecs import FORMS, ErrorFeedback, PowerSGDCodec, get_codec
from tests.codecs import common

SPECS = [
    "int8",
    "int8:block=8",
    "int4:block=128",
    "int2:block=64",
    "int4:block=8192",
    "topk:ratio=0.1",
    "topk:ratio=0.003",
    "topk:ratio=0.1:values=int8",
    "threshold:rel=1.5",
    "threshold:abs=0.001",
    "sidco:ratio=0.02",
    "fp8:e4m3",
]


def assert_same(a: np.ndarray, b: np.ndarray) -> None:
    assert common.bits(a) == common.bits(b)


def flat(x: np.ndarray) -> Flat:
    return Flat(x, DType.FLOAT64 if x.dtype == np.float64 else DType.FLOAT32, x.shape, True, False)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("form", FORMS)
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
                size = memory._encode_sum_by_halves(codec, total, out, span, ranks)
            outs.append(out[:size])
        assert_same(*outs)
    for name, array in ours.arrays().items():
        assert_same(array, plain.arrays()[name])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("largest", [1.0, 3e38, np.inf, np.nan])
def test_spans_of_a_sender(spec, dtype, largest):
    """Encoding where the state lies, and by separate steps: the same message, the same state."""
    codec, rng, n, kind = get_codec(spec), np.random.default_rng(4), 140_000, as_dtype(dtype)
    ours, plain = (ErrorFeedback(form="ef").memory(("k",), n, kind) for _ in range(2))
    for step in range(3):
        for span in (slice(0, 70_001), slice(70_001, 70_001), slice(70_001, n)):
            x = rng.standard_normal(span.stop - span.start).astype(np.float32)
            if step == 1:
                x[5:6] = largest
            with np.errstate(over="ignore"):
                data = host_flat(x, kind)
            room = codec.bound(x.size, ours.kind)
            a, b = np.zeros(room, np.uint8), np.zeros(room, np.uint8)
            size = ours.encode(codec, data, a, span)
            assert size == plain._encode_by_halves(codec, data, b, span)
            assert_same(a[:size], b[:size])
            assert_same(ours.arrays()[""], plain.arrays()[""])
    assert np.isfinite(ours.arrays()[""]).all()


def host_flat(x: np.ndarray, kind: DType) -> Flat:
    """Return the values in the storage of any type."""
    stored = np.empty(x.size, kind.storage)
    native.kernels().convert(x, DType.FLOAT32, stored, kind, False)
    return Flat(stored, kind, stored.shape, True, False)


@pytest.mark.parametrize("spec", ["int4", "topk:ratio=0.1", "threshold:rel=1"])
@pytest.mark.parametrize("span", [slice(0, 512), slice(0, 256)])
def test_a_sum_that_is_not_finite_changes_no_state(spec, span):
    memory = ErrorFeedback(form="ef").memory(("k",), 512, np.float32)
    codec, out = get_codec(spec), np.zeros(4096, np.uint8)
    x = np.random.default_rng(1).standard_normal(span.stop).astype(np.float32)
    memory.encode_sum(codec, x.copy(), out, span, 3)
    before = memory.arrays()[""]
    assert before.any()
    x[7] = np.inf
    memory.encode_sum(codec, x, out, span, 3)
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

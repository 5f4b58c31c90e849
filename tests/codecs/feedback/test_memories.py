"""The kernels' memories of error feedback: one call has the bits of its halves; calls that they refuse."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp import native, wire
from hybridcomp.arrays import DType, Flat, as_dtype
from hybridcomp.codecs import FORMS, Codec, get_codec
from hybridcomp.codecs.feedback.memory import JoinedMemory, Memory, Scratch
from hybridcomp.codecs.sparse.base import SparseCodec
from tests.codecs import common

# Encoded in one pass, in one pass of some spans only, and in steps; OTHERS have no encoder of the kernels.
SPECS = [
    "int8",
    "int4:block=24",
    "int8:block=16384",
    "int8:rounding=stochastic",
    "int2:block=48:rounding=stochastic:seed=7",
    "topk:ratio=0.1",
    "fp8",
    "bf16",
    "none",
    "sign",
]
OTHERS = ["lossless", "topk:ratio=0.1:values=int8"]
CUTS = [0, 256, 256, 1_000, 2_304, 3_000]


def made(form: str, n: int, dtype: str = "float32") -> Any:
    """Return a memory of a form, to be read as one of :mod:`hybridcomp.codecs.feedback.memory` of any form."""
    return hc.ErrorFeedback(form=form).memory(("k",), n, dtype)


def flat(n: int, kind: DType, seed: int, bad: float | None = None) -> Flat:
    x, stored = common.gaussian(n, "float64", seed), np.empty(n, kind.storage)
    if bad is not None and n:
        x[n // 2] = bad
    native.kernels().convert(x, DType.FLOAT64, stored, kind, False)
    return Flat(stored, kind, stored.shape, True, False)


def part(data: Flat, span: slice) -> Flat:
    return data._replace(data=data.data[span], shape=(span.stop - span.start,))


def message(codec: Codec, n: int, kind: DType, seed: int) -> np.ndarray:
    out = np.zeros(codec.bound(n, kind), np.uint8)
    return out[: codec.encode_flat(flat(n, kind, seed), out)]


def encode(memory: Memory, codec: Codec, data: Flat, span: slice, halves: bool) -> bytes:
    out = np.zeros(codec.bound(data.size, memory.kind), np.uint8)
    way = memory._encode_by_halves if halves else memory.encode
    return out[: way(codec, data, out, span)].tobytes()


def encode_sum(
    memory: Memory, codec: Codec, total: np.ndarray, span: slice, ranks: int, halves: bool
) -> bytes:
    out = np.zeros(codec.bound(total.size, memory.kind), np.uint8)
    way = memory._encode_sum_by_halves if halves else memory.encode_sum
    return out[: way(codec, total, out, span, ranks)].tobytes()


def assert_same_states(a: Memory, b: Memory) -> None:
    ours, theirs = a.arrays(), b.arrays()
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert common.bits(array) == common.bits(theirs[name]), name


def test_encoders_say_whose_they_are():
    kernels = native.kernels()
    found = 0
    for spec in common.SPECS:
        codec = get_codec(spec)
        if codec.encoder is None:
            continue
        found += 1
        params = codec.params
        plain = params.get("symmetric") and not params.get("hadamard")
        signs = (1, params["block"]) if codec.name == "sign" else (0, 0)
        blocks = (codec.bits, params["block"]) if plain else signs
        sparse = isinstance(codec, SparseCodec)
        assert codec.encoder.identity == (codec.wire_id, codec.params_hash, *blocks, sparse), spec
        # A memory relies on the kernels to decode what they encode.
        out = np.empty(300, np.float32)
        payload = codec.encode(common.gaussian(300))[wire.HEADER_BYTES :]
        args = (codec.wire_id, payload, 300, DType.FLOAT32, out, DType.FLOAT32, False)
        assert kernels.decode_payload(*args) == 0, spec
    assert found > 20


@pytest.mark.parametrize("dtype", common.FLOATS)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("form", FORMS)
def test_a_reduction_by_halves_has_the_same_bits(form, spec, dtype):
    """Spans for others, two of its own whose steps alternate, results that are not finite or never come."""
    codec, kind, n = get_codec(spec), as_dtype(dtype), CUTS[-1]
    spans = [slice(a, b) for a, b in itertools.pairwise(CUTS)]
    ours, plain = made(form, n, dtype), made(form, n, dtype)
    for step in range(8):
        x = flat(n, kind, step, {3: np.nan, 5: np.inf}.get(step))
        own = [spans[step % 2], spans[3]]
        seen: list[list[bytes]] = []
        for memory in (ours, plain):
            halves = memory is plain
            assert memory.begin() == step
            got = [encode(memory, codec, part(x, s), s, halves) for s in spans if s not in own]
            totals = [memory.own(codec, part(x, s), s) for s in own]
            for s, total in zip(own, totals, strict=True):
                other = message(codec, total.size, memory.kind, step + s.start)
                codec.decode_add_flat(other, wire.peek(other), total)
                got.append(encode_sum(memory, codec, total, s, 1 + step % 2 * 2, halves))
            for s in spans if memory.tracks and step != 6 else []:
                values = flat(s.stop - s.start, memory.kind, step, np.inf if step == 4 else None).data
                memory.result(values, s)
                got.append(values.tobytes())
            seen.append(got)
        assert seen[0] == seen[1], step
        if step % 3 == 2:
            assert_same_states(ours, plain)
    assert_same_states(ours, plain)
    assert all(
        np.isfinite(a.view(memory.kind.storage)).all() for a in ours.arrays().values() if form != "loco"
    )


@pytest.mark.parametrize("spec", OTHERS)
@pytest.mark.parametrize("form", FORMS)
def test_codecs_without_an_encoder_use_the_halves(form, spec):
    """With values through no codec, or through the memory of another that has an encoder, all adds up the same."""
    codec, n, span = get_codec(spec), 700, slice(128, 700)
    assert codec.encoder is None
    memory, same = made(form, n), made(form, n)
    plain = get_codec("none") if codec.lossless else codec
    for step in range(3):
        x = flat(span.stop - span.start, DType.FLOAT32, step)
        results = []
        for m, by in ((memory, codec), (same, plain)):
            m.begin()
            first = part(x, slice(0, 128))
            out = np.zeros(by.bound(128), np.uint8)
            sent = out[: m.encode(by, first, out, slice(0, 128))]
            total = m.own(by, x, span)
            total += 1
            out = np.zeros(by.bound(x.size), np.uint8)
            result = out[: m.encode_sum(by, total, out, span, 2)]
            results.append([hc.decode(sent).tobytes(), hc.decode(result).tobytes()])
        assert results[0] == results[1]
    assert_same_states(memory, same)


@pytest.mark.parametrize("form", FORMS)
def test_a_state_is_the_memorys_own_array(form):
    memory = made(form, 400_000)
    main = memory._main()
    assert memory._main() is main
    x = flat(400_000, DType.FLOAT32, 1)
    encode(memory, get_codec("int8"), part(x, slice(0, 100)), slice(0, 100), False)
    memory.begin()
    assert memory._main() is main  # a span's part is written where it lies
    assert main.any()
    before = main.copy()
    encode(memory, get_codec("int8"), x, slice(0, 400_000), False)
    memory.begin()
    after = memory._main()
    assert after.tobytes() != before.tobytes()
    copied = after.copy()
    del memory
    assert after.tobytes() == copied.tobytes()  # it outlives the memory


def test_memory_is_used_again():
    scratch = Scratch()
    first = scratch.take(1 << 20, DType.FLOAT32)
    assert first.dtype == np.float32
    assert first.size == 1 << 20
    assert first.ctypes.data % 64 == 0
    place = first.ctypes.data
    view = first[10:]
    del first
    assert scratch.take(1 << 20, DType.FLOAT32).ctypes.data != place  # while a view is left
    del view
    assert place in {a.ctypes.data for a in [scratch.take(1 << 20, DType.FLOAT32) for _ in range(3)]}
    assert scratch.take(0, DType.FLOAT64).dtype == np.float64
    scratch.clear()
    with pytest.raises(ValueError, match="so many elements"):
        scratch.take(1 << 62, DType.FLOAT64)


def test_the_step_before_last_waits_no_longer():
    """ef21: a result that never came counts as good when the next step begins, and an owner's sum as not there."""
    codec, memory = get_codec("none"), made("ef21", 300)
    x = flat(300, DType.FLOAT32, 1)
    encode(memory, codec, part(x, slice(0, 200)), slice(0, 200), False)
    assert not memory.sent.any()
    total = memory.own(codec, part(x, slice(200, 300)), slice(200, 300))
    total += 1
    encode_sum(memory, codec, total, slice(200, 300), 1, False)
    assert memory.known is not None
    assert not memory.known.any()
    memory.begin()
    assert memory.sent[:200].tobytes() == x.data[:200].tobytes()
    assert not memory.total.any()


def refusals() -> list[tuple[str, Any]]:
    """Return errors, and calls that raise them: given a memory of 100 floats, an encoder and a large enough out."""
    x, wide = np.zeros(10, np.float32), np.zeros(10, np.float64)
    odd = np.zeros(41, np.uint8)[1:].view(np.float32)
    f = DType.FLOAT32
    return [
        ("not a span of 100", lambda m, e, out: m.encode(e, x, f, 91, out)),
        ("not a span of 100", lambda m, e, out: m.encode(e, x, f, 2**63, out)),
        ("not a span of 100", lambda m, e, out: m.own(e, x, f, 91, x)),
        ("not a span of 100", lambda m, e, out: m.result(x, 91)),
        ("doubles, and only they", lambda m, e, out: m.encode(e, wide, DType.FLOAT64, 0, out)),
        ("not a whole number", lambda m, e, out: m.encode(e, out[:41], f, 0, out)),
        ("not a floating-point dtype", lambda m, e, out: m.encode(e, x, 9, 0, out)),
        ("out is too small", lambda m, e, out: m.encode(e, x, f, 0, out[:40])),
        ("out is too small", lambda m, e, out: m.encode_sum(e, x, 0, 1, out[:40])),
        ("10 aligned floats", lambda m, e, out: m.correct(x, f, 0, x[:9])),
        ("10 aligned floats", lambda m, e, out: m.correct(x, f, 0, odd)),
        ("10 aligned floats", lambda m, e, out: m.keep(x, x[:9], 0, 1.0)),
        ("10 aligned floats", lambda m, e, out: m.own(e, x, f, 0, x[:9])),
        ("10 aligned floats", lambda m, e, out: m.encode_sum(e, odd, 0, 1, out)),
        ("10 aligned floats", lambda m, e, out: m.result(odd, 0)),
        ("ranks must be at least 1", lambda m, e, out: m.encode_sum(e, x, 0, 0, out)),
        ("ranks must be at least 1", lambda m, e, out: m.correct_sum(x, 0, 0)),
        ("ranks must be at least 1", lambda m, e, out: m.keep_sum(x, x, 0, 0)),
    ]


@pytest.mark.parametrize("form", FORMS)
def test_wrong_arguments(form):
    memory, encoder = made(form, 100).native, get_codec("int8").encoder
    before = memory.state("").tobytes()
    memory.own(encoder, np.zeros(10, np.float32), DType.FLOAT32, 0, np.zeros(10, np.float32))
    for match, call in refusals():
        with pytest.raises(ValueError, match=match):
            call(memory, encoder, np.zeros(400, np.uint8))
    assert memory.state("").tobytes() == before
    with pytest.raises(ValueError, match=r"elements 0 .. 50 are not 100"):
        made(form, 100).encode(
            get_codec("int8"), flat(100, DType.FLOAT32, 1), np.zeros(400, np.uint8), slice(0, 50)
        )
    assert memory.state("no such") is None
    with pytest.raises(ValueError, match="does not take this dtype"):  # a rate for doubles alone
        memory.encode(
            get_codec("zfp:rate=40").encoder, np.zeros(4, np.float32), 1, 0, np.zeros(400, np.uint8)
        )


def test_what_must_come_before():
    x, out, encoder = np.zeros(10, np.float32), np.zeros(400, np.uint8), get_codec("int8").encoder
    with pytest.raises(ValueError, match="correct comes before keep"):
        made("dgc", 100).native.keep(x, x.copy(), 0, 1.0)
    with pytest.raises(ValueError, match="correct comes before keep"):
        made("ef-sgdm", 100).native.keep(x, x.copy(), 0, 1.0)
    with pytest.raises(ValueError, match="needs an encoder"):
        made("dgc", 100).native.own(None, x, 1, 0, x.copy())
    for call in (lambda m: m.encode_sum(encoder, x, 0, 1, out), lambda m: m.correct_sum(x, 0, 1)):
        memory = made("ef21", 100).native
        memory.own(None, x, 1, 5, x.copy())
        with pytest.raises(ValueError, match="own comes before"):
            call(memory)
    kernels, rooms = native.kernels(), Scratch().rooms
    for beta in (-0.1, 1.0, np.nan):
        with pytest.raises(ValueError, match="from 0 to below 1"):
            kernels.AverageMemory(10, False, rooms, beta, 1)
        with pytest.raises(ValueError, match="from 0 to below 1"):
            kernels.MomentumMemory(10, False, rooms, beta)
        with pytest.raises(ValueError, match="from 0 to below 1"):
            kernels.AcceleratedMemory(10, False, rooms, beta)
    with pytest.raises(ValueError, match="reset_steps"):
        kernels.AverageMemory(10, False, rooms, 0.5, 0)
    for many in (2**48 + 1, 2**62, 2**64 - 1):
        with pytest.raises(ValueError, match="so many elements"):
            kernels.PlainMemory(many, True, rooms)
    with pytest.raises(TypeError):
        kernels.EstimateMemory(10, True, None)


def test_memories_of_several_forms_or_types_are_not_joined() -> None:
    feedback = hc.ErrorFeedback(form=None)
    plain, other, wide = (
        feedback.memory(("a", i), 10, dtype, form)
        for i, (dtype, form) in enumerate([("float32", "ef"), ("float32", "dgc"), ("float64", "ef")])
    )
    for parts in ([plain, other], [plain, wide], []):
        with pytest.raises(ValueError, match=r"joined|no memory to join"):
            JoinedMemory(parts, Scratch())


@pytest.mark.parametrize("dtype", common.FLOATS)
@pytest.mark.parametrize("spec", ["sign:block=40", "int8", "int4", "topk:ratio=0.1", "none", *OTHERS[:1]])
def test_data_blended_with_a_momentum(spec, dtype):
    """Messages and residuals are those of the momentum, in one pass, in spans and by halves; sums get no more of it."""
    codec, kind, n, beta = get_codec(spec), as_dtype(dtype), CUTS[-1], 0.9
    wide = np.dtype(kind.accumulator.storage).type
    momentum = common.gaussian(n, np.dtype(wide).name, 50)
    spans = [slice(a, b) for a, b in itertools.pairwise(CUTS)]
    for cut in ([slice(0, n)], spans):
        ours, halves, plain = made("ef", n, dtype), made("ef", n, dtype), made("ef", n, np.dtype(wide).name)
        assert ours.adds_own
        for step in range(4):
            x = flat(n, kind, step, {2: np.inf}.get(step))
            values = np.empty(n, wide)
            native.kernels().convert(x.data, kind, values, kind.accumulator, False)
            with np.errstate(invalid="ignore"):
                blended = wide(beta) * momentum + wide(1 - beta) * values
            local = Flat(blended, ours.kind, blended.shape, True, False)
            for memory in (ours, halves):
                memory.blend(momentum, beta)
                assert not memory.adds_own
                memory.begin()
            plain.begin()
            for s in cut[:-1] or cut:
                expected = encode(plain, codec, part(local, s), s, halves=False)
                assert encode(ours, codec, part(x, s), s, halves=False) == expected
                assert encode(halves, codec, part(x, s), s, halves=True) == expected
            if len(cut) > 1:
                own = cut[-1]
                totals = [memory.own(codec, part(x, own), own) for memory in (ours, halves)]
                totals.append(blended[own].copy())
                assert len({total.tobytes() for total in totals}) == 1
                sums = [
                    encode_sum(memory, codec, total, own, 3, memory is halves)
                    for memory, total in zip((ours, halves, plain), totals, strict=True)
                ]
                assert len(set(sums)) == 1
            assert_same_states(ours, plain)
            assert_same_states(halves, plain)
        ours.blend(None)
        assert ours.adds_own


def test_momenta_that_cannot_be_blended():
    memory = made("ef", 10)
    for momentum, beta, allowed in (
        (np.zeros(9, np.float32), 0.9, "must be 10 aligned floats"),
        (np.zeros(10, np.float64), 0.9, "must be 10 aligned floats"),
        (np.zeros(41, np.uint8)[1:], 0.9, "must be 10 aligned floats"),
        (np.zeros(10, np.float32), 1.0, "beta must be from 0 to below 1"),
    ):
        with pytest.raises(ValueError, match=allowed):
            memory.blend(momentum, beta)


@pytest.mark.parametrize("dtype", common.FLOATS)
@pytest.mark.parametrize("isa", native.kernels().available_isas())
def test_signs_of_an_array_that_no_cache_holds(isa, dtype):
    """They have the bits of the halves: blocks are read and written side by side, and the last one is short."""
    kind, n = as_dtype(dtype), (1 << 20) + 12_345
    with native.using_isa(isa):
        for block, threads in ((65536, 1), (24, 3)):
            codec = get_codec(f"sign:block={block}")
            ours, halves = made("ef", n, dtype), made("ef", n, dtype)
            hc.set_num_threads(threads)
            try:
                for step, bad in enumerate((None, None, np.nan)):
                    x, whole = flat(n, kind, step, bad), slice(0, n)
                    messages = {encode(m, codec, x, whole, m is halves) for m in (ours, halves)}
                    assert len(messages) == 1
                    totals = [memory.own(codec, x, whole) for memory in (ours, halves)]
                    sums = {
                        encode_sum(m, codec, total, whole, 3, m is halves)
                        for m, total in zip((ours, halves), totals, strict=True)
                    }
                    assert len(sums) == 1
                    assert_same_states(ours, halves)
            finally:
                hc.set_num_threads(1)

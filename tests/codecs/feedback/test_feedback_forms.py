"""The forms of error feedback: their arithmetic against NumPy, and their sums."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import hybridcomp as hc
from hybridcomp import native
from hybridcomp.arrays import flatten
from hybridcomp.codecs import FORMS
from tests.codecs import common

KEY = ("dp", "layer.0.weight")
STATE = hc.get_codec("int8:block=128")
SPECS = [
    "int8",
    "int2",
    "int4:hadamard=true",
    "int4:symmetric=false",
    "int4:block=32",
    "int4:block=24",
    "int8:block=16384",
    "topk:ratio=0.1",
    "bf16",
]


class Model:
    """A form in NumPy, in the accumulator's dtype; the codec and loco's 8 bits are hybridcomp's own."""

    def __init__(self, form: str, codec: hc.codecs.Codec, n: int, dtype: type) -> None:
        self.form, self.codec = form, codec
        self.a, self.b = np.zeros(n, dtype), np.zeros(n, dtype)

    def encode(self, x: np.ndarray, step: int) -> bytes:
        t = x.dtype.type
        if self.form == "dgc":
            moved = t(0.9) * self.b + x
            c = self.a + moved
        elif self.form == "ef-sgdm":
            moved = t(0.9) * self.b + x
            c = (x + t(0.9) * moved) + self.a
        else:
            c = x - self.a if self.form == "ef21" else x + self.a
        codec = self.codec.at_step(step)
        msg = codec.encode(c)
        d = codec.decode(msg)
        if self.form == "ef":
            self.a = c - d
        elif self.form == "ef21":
            self.a = self.a + d
        elif self.form == "ef-sgdm":
            self.a, self.b = c - d, moved
        elif self.form == "loco":
            self.a = STATE.decode(STATE.encode(t(0.8) * self.a + t(1 - 0.8) * (c - d)))
        else:
            self.a, self.b = c - d, np.where(d != 0, t(0), moved)
        return msg.tobytes()


def state_of(feedback: hc.ErrorFeedback, n: int, dtype: str) -> np.ndarray:
    main = feedback.memory(KEY, n, dtype).arrays()[""]
    return STATE.decode(main) if feedback.form.name == "loco" else main


@pytest.mark.parametrize("dtype", common.FLOATS)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("form", FORMS)
def test_a_model_in_numpy_gives_the_same_bits(form, spec, dtype):
    n = 5001
    feedback = hc.ErrorFeedback(spec, form)
    wide = np.float64 if dtype == "float64" else np.float32
    model = Model(form, hc.get_codec(spec), n, wide)
    for step in range(4):
        x = common.gaussian(n, dtype, seed=step)
        got = common.bits(feedback.encode(x, KEY))
        assert got == model.encode(common.wide(x).astype(wide), step), step
    np.testing.assert_array_equal(state_of(feedback, n, dtype), model.a)
    if form in ("dgc", "ef-sgdm"):
        np.testing.assert_array_equal(feedback.memory(KEY, n, dtype).arrays()["velocity"], model.b)


@pytest.mark.parametrize("spec", ["int8", "int4:block=24", "topk:ratio=0.1"])
@pytest.mark.parametrize("form", FORMS)
def test_instruction_sets_and_threads_agree(form, spec):
    data = [common.gaussian(200_003, "float16", seed=s) for s in range(2)]
    seen = set()
    for name in common.isas():
        for threads in (1, 3):
            with common.isa(name):
                native.kernels().set_threads(threads)
                try:
                    feedback = hc.ErrorFeedback(spec, form)
                    messages = [feedback.encode(x, KEY).tobytes() for x in data]
                finally:
                    native.kernels().set_threads(1)
                states = [a.tobytes() for a in feedback.memory(KEY, data[0].size).arrays().values()]
            seen.add((*messages, *states))
    assert len(seen) == 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [0, 1, 127, 2_000_000])
def test_sizes_and_layouts(form, n):
    """Large arrays exchange their state with scratch, and write it past the caches."""
    x = np.zeros(n + 1, np.float32)
    x[1:] = common.gaussian(n)
    raw = np.zeros(4 * n + 1, np.uint8)[1:]
    raw[:] = x[1:].view(np.uint8)
    results = []
    for given in (x[1:], raw.view(np.float32), torch.from_numpy(x[1:].copy()), np.repeat(x[1:], 2)[::2]):
        feedback = hc.ErrorFeedback("int8", form)
        out = np.empty(feedback.codec.bound(n) + 5, np.uint8)
        first = common.bits(feedback.encode(given, KEY))
        second = feedback.encode(given, KEY, out=out)
        assert flatten(second).data.base is not None
        third = common.bits(feedback.encode(given, KEY))
        results.append((first, common.bits(second), third, state_of(feedback, n, "float32").tobytes()))
    assert all(r == results[0] for r in results)


@pytest.mark.parametrize("spec", ["int8", "topk:ratio=0.1", "fp16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e38])
@pytest.mark.parametrize("form", FORMS)
def test_a_step_that_is_not_finite_changes_no_state(form, bad, spec):
    if bad == 1e38 and spec != "fp16":
        bad = -np.inf
    feedback = hc.ErrorFeedback(spec, form)
    feedback.encode(common.gaussian(1_000), KEY)
    feedback.accumulate(KEY, np.zeros(1_000, np.float32))
    before = [a.tobytes() for a in feedback.memory(KEY, 1_000).arrays().values()]
    x = common.gaussian(1_000, seed=1)
    x[7] = bad
    assert not np.isfinite(hc.decode(feedback.encode(x, KEY))).all()
    assert [a.tobytes() for a in feedback.memory(KEY, 1_000).arrays().values()] == before
    assert np.isfinite(hc.decode(feedback.encode(common.gaussian(1_000), KEY))).all()


CUTS = [0, 100, 1_124, 1_124, 2_148, 2_999, 3_000]


@pytest.mark.parametrize("form", ["ef", "dgc", "ef-sgdm"])
@pytest.mark.parametrize("spec", ["int4", "topk:ratio=0.1"])
def test_spans_add_up_to_an_array(form, spec):
    """A memory that is used in spans holds what memories of their own would."""
    codec, n = hc.get_codec(spec), CUTS[-1]
    whole = hc.ErrorFeedback(form=form).memory(KEY, n)
    spans = [slice(a, b) for a, b in itertools.pairwise(CUTS)]
    parts = [hc.ErrorFeedback(form=form).memory(KEY, s.stop - s.start) for s in spans]
    out, mine = np.empty(codec.bound(n), np.uint8), np.empty(codec.bound(n), np.uint8)
    for step in range(3):
        x = common.gaussian(n, seed=step)
        for part, span in zip(parts, spans, strict=True):
            got = out[: whole.encode(codec, flatten(x[span]), out, span)]
            assert got.tobytes() == mine[: part.encode(codec, flatten(x[span]), mine)].tobytes()
    np.testing.assert_array_equal(whole.arrays()[""], np.concatenate([p.arrays()[""] for p in parts]))


@pytest.mark.parametrize("spec", ["int4", "int8:block=64", "topk:ratio=0.1"])
def test_spans_of_loco_round_whole_blocks_of_the_state(spec):
    codec, n = hc.get_codec(spec), CUTS[-1]
    memory = hc.ErrorFeedback(form="loco").memory(KEY, n)
    out, error, t = np.empty(codec.bound(n), np.uint8), np.zeros(n, np.float32), np.float32
    for step in range(3):
        x = common.gaussian(n, seed=step)
        for a, b in itertools.pairwise(CUTS):
            c = x[a:b] + error[a:b]
            msg = codec.encode(c)
            assert out[: memory.encode(codec, flatten(x[a:b]), out, slice(a, b))].tobytes() == msg.tobytes()
            error[a:b] = t(0.8) * error[a:b] + t(1 - 0.8) * (c - codec.decode(msg))
            first, last = a // 128 * 128, min(n, -(-b // 128) * 128)
            error[first:last] = STATE.decode(STATE.encode(error[first:last]))
    np.testing.assert_array_equal(memory.error, error)


# -- what arrives in the end ---------------------------------------------------------------------------------

STEPS, N = 100, 2_048
# ||c - C(c)|| <= q ||c||: half a step of the largest of 128 is 1/14 of it; top-k leaves at most 1 - k/n.
CONTRACTION = {"int4": np.sqrt(128) / 14, "topk:ratio=0.1": np.sqrt(0.9)}


def inputs(step: int) -> np.ndarray:
    """Return a constant, most of whose elements are far below the largest, and noise."""
    constant = np.random.default_rng(99).standard_normal(N) ** 3 / 3
    return (constant + 0.3 * np.random.default_rng(step).standard_normal(N)).astype(np.float32)


def gap(feedback: hc.ErrorFeedback | None, codec: str) -> tuple[np.ndarray, float]:
    """Return the sum of the inputs less that of the decoded messages, and the largest norm of an input."""
    missing, largest = np.zeros(N), 0.0
    plain = hc.get_codec(codec)
    for step in range(STEPS):
        x = inputs(step)
        msg = plain.encode(x) if feedback is None else feedback.encode(x, KEY)
        missing += x.astype(np.float64) - hc.decode(msg)
        largest = max(largest, float(np.linalg.norm(x)))
    return missing, largest


@pytest.mark.parametrize("codec", CONTRACTION)
def test_ef_owes_its_residual_and_no_more(codec):
    feedback = hc.ErrorFeedback(codec)
    missing, largest = gap(feedback, codec)
    residual = feedback.residual(KEY, N)
    np.testing.assert_allclose(missing, residual, atol=2e-4)
    q = CONTRACTION[codec]
    assert np.linalg.norm(missing) <= q / (1 - q) * largest
    assert np.linalg.norm(missing) < 0.25 * np.linalg.norm(gap(None, codec)[0])


@pytest.mark.parametrize("codec", CONTRACTION)
def test_loco_owes_its_average_over_one_less_beta(codec):
    """Each loss is sent again in shares (1 - beta) beta^k, which add up to one. So what is missing is e / (1 - beta),
    and what the state's 8 bits rounded off at each step, half a scale of its block at most, over (1 - beta)."""
    feedback, rest = hc.ErrorFeedback(codec, "loco"), 1 - 0.8
    missing, rounded = np.zeros(N), np.zeros(N // 128)
    largest = 0.0
    for step in range(STEPS):
        x = inputs(step)
        missing += x.astype(np.float64) - hc.decode(feedback.encode(x, KEY))
        error = feedback.memory(KEY, N).error
        rounded += np.abs(error).reshape(-1, 128).max(1) / 254
        largest = max(largest, float(np.linalg.norm(x)))
    slack = np.repeat(rounded, 128) * 1.01 + 1e-4
    assert (np.abs(missing * rest - error) <= slack).all()
    q = CONTRACTION[codec]
    assert np.linalg.norm(error) <= q / (1 - q) * largest
    assert np.linalg.norm(missing) < 0.5 * np.linalg.norm(gap(None, codec)[0])


def test_loco_forgets_its_error_every_so_many_steps_of_its_key():
    feedback = hc.ErrorFeedback("int4", "loco", reset_steps=4)
    plain = hc.get_codec("int4")
    for step in range(9):
        x = common.gaussian(300, seed=step)
        first = feedback.encode(x, KEY).tobytes()
        assert (first == plain.encode(x).tobytes()) == (step % 4 == 0), step
        for other in range(3):  # a counter of all tensors would come round earlier
            feedback.encode(x, ("dp", other))


def test_loco_takes_a_byte_an_element():
    feedback = hc.ErrorFeedback("int4", "loco")
    feedback.encode(common.gaussian(100_000), KEY)
    assert sum(a.nbytes for a in feedback.state_dict().values()) < 1.04 * 100_000


def test_dgc_sends_momentum_late_and_without_it_is_ef():
    a, b = hc.ErrorFeedback("topk:ratio=0.05", "dgc:momentum=0"), hc.ErrorFeedback("topk:ratio=0.05")
    for step in range(6):
        x = common.gaussian(1_000, seed=step)
        assert a.encode(x, KEY).tobytes() == b.encode(x, KEY).tobytes()
    # An element that is never sent gathers what momentum SGD would have moved it by.
    slow = hc.ErrorFeedback("topk:ratio=0.01", "dgc")
    x = np.zeros(100, np.float32)
    x[0], x[1] = 1_000, 1
    for _ in range(10):
        slow.encode(x, KEY)
    velocity = total = 0.0
    for _ in range(10):
        velocity = 0.9 * velocity + 1
        total += velocity
    arrays = slow.memory(KEY, 100).arrays()
    assert arrays[""][1] == pytest.approx(total, rel=1e-5)
    assert arrays["velocity"][1] == pytest.approx(velocity, rel=1e-5)
    assert arrays[""][0] == arrays["velocity"][0] == 0


@pytest.mark.parametrize("codec", ["topk:ratio=0.2", "int4"])
def test_ef21_on_several_ranks_nears_the_sum(codec):
    ranks = [hc.ErrorFeedback(codec, "ef21") for _ in range(3)]
    data = [common.gaussian(500, seed=r) for r in range(3)]
    want = np.sum([x.astype(np.float64) for x in data], axis=0)
    errors = []
    for _ in range(40):
        total = np.zeros(500, np.float32)
        for feedback, x in zip(ranks, data, strict=True):
            hc.decode_add(feedback.encode(x, KEY), total)
        estimates = [feedback.accumulate(KEY, total.copy()) for feedback in ranks]
        assert all(e.tobytes() == estimates[0].tobytes() for e in estimates)
        sent = np.sum([f.memory(KEY, 500).arrays()[""] for f in ranks], axis=0)
        np.testing.assert_allclose(estimates[0], sent, atol=1e-5)
        errors.append(common.relative_error(want, estimates[0]))
    assert errors[-1] < 1e-3
    assert errors[-1] < errors[2] < errors[0]


def test_ef21_of_all_ranks_drops_a_step_that_one_overflowed():
    ranks = [hc.ErrorFeedback("int4", "ef21") for _ in range(3)]
    for step in range(4):
        total = np.zeros((20, 25), np.float32)
        before = [f.state_dict() for f in ranks]
        for r, feedback in enumerate(ranks):
            x = common.gaussian(500, seed=10 * step + r)
            if step == 2 and r == 1:
                x[3] = np.inf
            hc.decode_add(feedback.encode(x, KEY), total)
        estimates = [feedback.accumulate(KEY, torch.from_numpy(total)) for feedback in ranks]
        assert estimates[0].shape == (20, 25)
        assert bool(torch.isfinite(estimates[0]).all()) == (step != 2)
        if step == 2:
            for feedback, old in zip(ranks, before, strict=True):
                new = feedback.state_dict()
                assert all(new[k].tobytes() == v.tobytes() for k, v in old.items() if "steps" not in k)


def test_ef_sgdm_owes_its_residual_of_what_momentum_made():
    """Nesterov's momentum of all inputs in fp64, less what was sent, is the residual; without momentum it is ef."""
    a, b = hc.ErrorFeedback("topk:ratio=0.05", "ef-sgdm:momentum=0"), hc.ErrorFeedback("topk:ratio=0.05")
    feedback = hc.ErrorFeedback("topk:ratio=0.05", "ef-sgdm")
    missing, velocity = np.zeros(1_000), np.zeros(1_000)
    for step in range(30):
        x = common.gaussian(1_000, "float64", seed=step)
        assert a.encode(x, KEY).tobytes() == b.encode(x, KEY).tobytes()
        velocity = 0.9 * velocity + x
        missing += x + 0.9 * velocity - hc.decode(feedback.encode(x, KEY))
    np.testing.assert_allclose(feedback.residual(KEY, 1_000, "float64"), missing, rtol=0, atol=1e-9)
    state = feedback.memory(KEY, 1_000, "float64").arrays()
    np.testing.assert_allclose(state["velocity"], velocity, rtol=0, atol=1e-9)


def test_a_sum_of_another_size_or_type_keeps_the_memory():
    feedback = hc.ErrorFeedback("int8", "ef21")
    x = common.gaussian(100)
    feedback.encode(x, KEY)
    for wrong in (np.zeros(100), np.zeros(99, np.float32)):
        with pytest.raises(
            ValueError, match=r"the sum under .* has \d+ float(32|64), and its memory has 100 float32"
        ):
            feedback.accumulate(KEY, wrong)
    estimate = feedback.accumulate(KEY, hc.decode(feedback.encode(x, KEY)))
    assert np.abs(estimate).max() > 0


@pytest.mark.parametrize("form", ["ef", "loco", "dgc", "ef-sgdm"])
def test_accumulate_is_the_identity_elsewhere(form):
    x = common.gaussian(10)
    assert hc.ErrorFeedback("int8", form).accumulate(KEY, x) is x

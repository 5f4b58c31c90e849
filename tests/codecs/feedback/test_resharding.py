"""reshard: the sum of the residuals over ranks survives a change of their number."""

from __future__ import annotations

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp.codecs import FORMS, reshard
from hybridcomp.codecs.feedback.resharding import release
from tests.codecs import common

KEY, PART = ("dp", "w"), ("dp", "only on some")
STATE = hc.get_codec("int8:block=128")
CHANGES = [(4, 2), (3, 2), (5, 1), (2, 5), (3, 3)]


def made(form: str, ranks: int, dtype: str = "float32") -> list[hc.ErrorFeedback]:
    """Return the feedback of ranks that have sent for a while; the second key is only on the odd ones."""
    group = [hc.ErrorFeedback("topk:ratio=0.1", form) for _ in range(ranks)]
    for step in range(3):
        total = np.zeros(1000, dtype)
        for r, feedback in enumerate(group):
            hc.decode_add(feedback.encode(common.gaussian(1000, dtype, seed=10 * step + r), KEY), total)
            if r % 2:
                feedback.encode(common.gaussian(200, seed=step + r), PART)
        for feedback in group:
            feedback.accumulate(KEY, total)
    return group


def summed(states: list[dict[str, np.ndarray]], key: str) -> np.ndarray:
    arrays = [s[key] for s in states if key in s]
    return np.sum(
        [(STATE.decode(a) if a.dtype == np.uint8 else a).astype(np.float64) for a in arrays], axis=0
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("old", "new"), CHANGES)
@pytest.mark.parametrize("form", FORMS)
def test_sums_are_kept(form, old, new, dtype):
    before = [f.state_dict() for f in made(form, old, dtype)]
    after = reshard(before, new)
    assert len(after) == new
    for name in ('["dp", "w"]', '["dp", "w"]#velocity', '["dp", "only on some"]'):
        if not any(name in state for state in before):
            continue
        assert all(name in state for state in after)
        want, got = summed(before, name), summed(after, name)
        allowed = 1e-5
        if form == "loco" and new < old:  # half a scale of each new rank's block
            allowed += sum(np.abs(STATE.decode(s[name])).max() for s in after) / 254 * 1.01
        assert np.abs(got - want).max() <= allowed
        assert np.abs(want).max() > 0.1
    for rank, state in enumerate(after):
        feedback = hc.ErrorFeedback("topk:ratio=0.1", form)
        feedback.load_state_dict(state)
        assert feedback.memory(KEY, 1000, dtype).steps == 3
        if rank >= old:
            residual = feedback.memory(KEY, 1000, dtype).arrays()[""]
            assert not (STATE.decode(residual) if form == "loco" else residual).any()
        if form == "ef21":
            np.testing.assert_array_equal(state['["dp", "w"]#total'], before[0]['["dp", "w"]#total'])


@pytest.mark.parametrize("form", FORMS)
def test_ranks_that_stay_as_many_stay_as_they_are(form):
    before = [f.state_dict() for f in made(form, 3)]
    for old, new in zip(before, reshard(before, 3), strict=True):
        for key, value in old.items():
            assert new[key].tobytes() == value.tobytes()


def test_ef21_goes_on_after_a_change_of_ranks():
    group = made("ef21", 4)
    states = reshard([f.state_dict() for f in group], 2)
    group = [hc.ErrorFeedback("topk:ratio=0.1", "ef21") for _ in range(2)]
    for feedback, state in zip(group, states, strict=True):
        feedback.load_state_dict(state)
    data = [common.gaussian(1000, seed=77 + r) for r in range(2)]
    for _ in range(80):
        total = np.zeros(1000, np.float32)
        for feedback, x in zip(group, data, strict=True):
            hc.decode_add(feedback.encode(x, KEY), total)
        estimates = [feedback.accumulate(KEY, total) for feedback in group]
    assert common.relative_error(data[0].astype(np.float64) + data[1], estimates[0]) < 1e-2


def test_wrong_states():
    with pytest.raises(ValueError, match="ranks must be an integer from 1 to"):
        reshard([{}], 0)
    with pytest.raises(ValueError, match="at least one rank"):
        reshard([], 2)
    a, b = ({'["w"]': np.zeros(n, np.float32)} for n in (3, 4))
    with pytest.raises(
        ValueError, match=r"\[\"w\"\] is ef float32\[4\] on rank 1, ef float32\[3\] on another"
    ):
        reshard([a, b], 2)
    with pytest.raises(ValueError, match="cannot be of the form 'ef'"):
        reshard([{'["w"]': np.zeros(3, np.float16)}], 2)
    assert reshard([{}, {}], 3) == [{}, {}, {}]


@pytest.mark.parametrize("form", ["ef", "ef-sgdm", "loco"])
def test_what_is_released_is_not_kept(form):
    feedback = hc.ErrorFeedback("int4:block=64", form)
    for step in range(4):
        feedback.encode(common.gaussian(1000, "float32", seed=step), KEY)
    state = feedback.state_dict()
    before = feedback.memory(KEY, 1000, "float32").error.copy()
    velocity = feedback.memory(KEY, 1000, "float32").arrays().get("velocity")
    arrays, missing = release(state, KEY, slice(100, 400))
    weight = 5.0 if form == "loco" else 1.0  # 1 / (1 - beta)
    np.testing.assert_allclose(missing, weight * before[100:400], rtol=1e-6)
    feedback.load_state_dict(state | arrays)
    after = feedback.memory(KEY, 1000, "float32").error
    assert not after[100:400].any()
    before[100:400] = 0
    np.testing.assert_allclose(after, before, atol=np.abs(before).max() / 200 if form == "loco" else 0)
    np.testing.assert_array_equal(feedback.memory(KEY, 1000, "float32").arrays().get("velocity"), velocity)
    assert feedback.memory(KEY, 1000, "float32").steps == 4
    assert release(state | arrays, KEY, slice(100, 400)) is None
    assert release(state, ("dp", "another"), slice(0, 10)) is None


def test_dgc_and_shorter_arrays_release_nothing():
    feedback = hc.ErrorFeedback("int4:block=64", "dgc")
    feedback.encode(common.gaussian(1000, "float32", seed=1), KEY)
    assert release(feedback.state_dict(), KEY, slice(0, 10)) is None
    plain = hc.ErrorFeedback("int4:block=64")
    plain.encode(common.gaussian(10, "float32", seed=1), KEY)
    assert release(plain.state_dict(), KEY, slice(5, 20)) is None

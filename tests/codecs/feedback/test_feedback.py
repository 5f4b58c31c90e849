"""ErrorFeedback: nothing is lost, only late."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import hybridcomp as hc
from tests.codecs import common

KEY = ("dp", "layer.0.weight")


@pytest.mark.parametrize(
    "spec", ["int4", "topk:ratio=0.02", "topk:ratio=0.02,values=int8", "powersgd:rank=1"]
)
def test_what_was_sent_and_what_is_kept_add_up(spec):
    """Over any number of steps: the inputs' sum is the messages' sum plus the residual."""
    feedback = hc.ErrorFeedback(spec)
    sent, given = np.zeros((40, 50)), np.zeros((40, 50))
    for step in range(30):
        x = common.gaussian(2000, seed=step).reshape(40, 50)
        msg = feedback.encode(x, KEY)
        given += x
        sent += hc.decode(msg).reshape(40, 50)
    residual = feedback.residual(KEY, 2000).reshape(40, 50)
    np.testing.assert_allclose(sent + residual, given, atol=1e-4)
    assert np.abs(residual).max() > 0


def test_a_constant_arrives_in_the_mean():
    x = common.gaussian(1000)
    feedback, steps = hc.ErrorFeedback("topk:ratio=0.05"), 400
    mean = sum(hc.decode(feedback.encode(x, KEY)).astype(np.float64) for _ in range(steps)) / steps
    assert common.relative_error(x, mean) < 0.1
    plain = hc.decode(hc.get_codec("topk:ratio=0.05").encode(x))
    assert common.relative_error(x, plain) > 0.8


def test_first_message_is_the_codecs():
    x = common.gaussian(500)
    np.testing.assert_array_equal(hc.ErrorFeedback("int8").encode(x, KEY), hc.get_codec("int8").encode(x))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_short_types_are_corrected_in_float32(dtype):
    x = common.gaussian(300, dtype)
    feedback = hc.ErrorFeedback("int4")
    y = hc.decode(feedback.encode(x, KEY))
    assert y.dtype == (torch.float32 if dtype == "bfloat16" else np.float32)
    residual = feedback.residual(KEY, 300, dtype)
    assert residual.dtype == np.float32
    np.testing.assert_array_equal(residual, (common.wide(x) - common.wide(y)).astype(np.float32))


def test_float64_has_float64_residuals():
    feedback = hc.ErrorFeedback("int8")
    feedback.encode(common.gaussian(300, "float64"), KEY)
    assert feedback.residual(KEY, 300, "float64").dtype == np.float64


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_overflowed_step_leaves_the_residual(bad):
    feedback = hc.ErrorFeedback("int4")
    feedback.encode(common.gaussian(300), KEY)
    before = feedback.residual(KEY, 300).copy()
    x = common.gaussian(300, seed=1)
    x[7] = bad
    assert not np.isfinite(hc.decode(feedback.encode(x, KEY))).all()
    np.testing.assert_array_equal(feedback.residual(KEY, 300), before)
    assert np.isfinite(hc.decode(feedback.encode(common.gaussian(300), KEY))).all()


def test_keys_are_apart_and_changes_reset():
    feedback = hc.ErrorFeedback()
    a = feedback.residual(("dp", "a"), 5)
    a += 1
    assert feedback.residual(("dp", "a"), 5) is a
    assert not feedback.residual(("dp", "b"), 5).any()
    assert not feedback.residual(("dp", "a", 0), 5).any()
    assert feedback.residual(("dp", "a"), 5, "bfloat16") is a
    assert not feedback.residual(("dp", "a"), 6).any()
    assert feedback.residual(("dp", "a"), 6, np.float64).dtype == np.float64
    assert len(feedback) == 3
    feedback.clear()
    assert len(feedback) == 0


def test_a_resumed_run_continues_bit_identically():
    data = [common.gaussian(800, seed=s) for s in range(6)]
    whole = hc.ErrorFeedback("int4")
    expected = [whole.encode(x, KEY).tobytes() for x in data]
    first = hc.ErrorFeedback("int4")
    got = [first.encode(x, KEY).tobytes() for x in data[:3]]
    state = first.state_dict()
    first.encode(data[0], KEY)  # the state is a copy: this must not change it
    second = hc.ErrorFeedback("int4")
    second.load_state_dict(state)
    got += [second.encode(x, KEY).tobytes() for x in data[3:]]
    assert got == expected


def test_state_dict_keys_are_strings_and_come_back():
    feedback = hc.ErrorFeedback()
    keys = [("dp", "a.b"), ("dp", 1), ("dp", "1"), (), ('quo"te', "ü", -3)]
    for i, key in enumerate(keys):
        feedback.residual(key, 3)[:] = i
    state = feedback.state_dict()
    assert all(isinstance(k, str) and json.loads(k) is not None for k in state)
    other = hc.ErrorFeedback()
    other.residual(("old",), 3)
    other.load_state_dict({k: torch.from_numpy(v) for k, v in state.items()})
    assert len(other) == len(keys)
    for i, key in enumerate(keys):
        np.testing.assert_array_equal(other.residual(key, 3), np.full(3, i, np.float32))


def test_wrong_arguments():
    with pytest.raises(ValueError, match="unknown form"):
        hc.ErrorFeedback("int8", form="magic")
    with pytest.raises(ValueError, match="without a codec"):
        hc.ErrorFeedback().encode(common.gaussian(3), KEY)
    with pytest.raises(TypeError, match="tuple of str and int"):
        hc.ErrorFeedback().residual("dp", 3)
    with pytest.raises(hc.CodecMismatchError, match="not floating-point"):
        hc.ErrorFeedback("int8").encode(np.zeros(3, np.int32), KEY)
    for key in ("nonsense", "[1.5]", 100_000 * "["):
        state = {key: np.zeros(3, np.float32)}
        with pytest.raises(ValueError, match="malformed residual key"):
            hc.ErrorFeedback().load_state_dict(state)
    with pytest.raises(ValueError, match="float16"):
        hc.ErrorFeedback().load_state_dict({'["a"]': np.zeros(3, np.float16)})

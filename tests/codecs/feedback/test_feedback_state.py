"""The state of error feedback: step counts, saved states, and states that are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hybridcomp as hc
from hybridcomp.codecs import FORMS, Int8Codec, parse_form
from tests.codecs import common

KEY = ("dp", "layer.0.weight")


class Stepping(Int8Codec):
    """Codec whose block size tells the step that it was asked for: 8 elements more at each step."""

    def at_step(self, step):
        return Int8Codec(block=8 * (step + 1))


def test_the_codec_is_asked_for_each_keys_step():
    feedback = hc.ErrorFeedback(Stepping())
    x = common.gaussian(100)
    for step in range(3):
        for key in (KEY, ("pp", 1)):
            msg = feedback.encode(x, key)
            assert int(msg[32:36].view(np.uint32)[0]) == 8 * (step + 1)
            assert np.isfinite(hc.decode(msg)).all()
    other = hc.ErrorFeedback(Stepping())
    other.load_state_dict(feedback.state_dict())
    assert int(other.encode(x, KEY)[32:36].view(np.uint32)[0]) == 32


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("form", [*FORMS, "loco:beta=0.5,reset_steps=3", "dgc:momentum=0.5"])
def test_a_resumed_run_continues_bit_identically(form, dtype):
    data = [common.gaussian(800, dtype, seed=s) for s in range(6)]

    def go_on(feedback: hc.ErrorFeedback, xs: list[np.ndarray]) -> list[bytes]:
        seen = []
        for x in xs:
            msg = feedback.encode(x, KEY)
            seen += [msg.tobytes(), feedback.accumulate(KEY, hc.decode(msg)).tobytes()]
        return seen

    expected = go_on(hc.ErrorFeedback("int4", form), data)
    first = hc.ErrorFeedback("int4", form)
    got = go_on(first, data[:3])
    state = {k: torch.from_numpy(v) for k, v in first.state_dict().items()}
    go_on(first, data[:1])  # the state is a copy: this must not change it
    for second in (hc.ErrorFeedback("int4", form), hc.ErrorFeedback("int4", form=None)):
        second.load_state_dict(state)
        if second.form is None:
            memory = second.memory(KEY, 800, dtype, form)
            assert memory.steps == 3
            assert second.memory(KEY, 800, dtype, form) is memory
        else:
            assert got + go_on(second, data[3:]) == expected


def test_the_form_is_recorded_and_checked():
    states = {}
    for form in FORMS:
        feedback = hc.ErrorFeedback("int4", form)
        feedback.encode(common.gaussian(100), KEY)
        states[form] = feedback.state_dict()
    for form in FORMS:
        for other in FORMS:
            if other == form:
                hc.ErrorFeedback("int4", other).load_state_dict(states[form])
                continue
            with pytest.raises(
                ValueError, match=f"layer.0.weight.*form '{form}', and '{other}' is asked for"
            ):
                hc.ErrorFeedback("int4", other).load_state_dict(states[form])
    mixed = hc.ErrorFeedback(form=None)
    mixed.load_state_dict(states["dgc"])
    with pytest.raises(ValueError, match="form 'dgc', and 'loco' is asked for"):
        mixed.memory(KEY, 100, form="loco")
    assert mixed.memory(KEY, 100, form="dgc:momentum=0.5").form.options["momentum"] == 0.5


def test_files_of_before_are_plain_residuals():
    old = {'["dp", "w"]': common.gaussian(50), '["dp", "v"]': common.gaussian(7, "float64")}
    feedback = hc.ErrorFeedback("int4")
    feedback.load_state_dict(old)
    np.testing.assert_array_equal(feedback.residual(("dp", "w"), 50), old['["dp", "w"]'])
    assert feedback.residual(("dp", "v"), 7, "float64").dtype == np.float64
    assert feedback.state_dict().keys() == old.keys()


@pytest.mark.parametrize("form", FORMS)
def test_a_changed_count_begins_again(form):
    feedback = hc.ErrorFeedback("int8", form)
    fresh = hc.ErrorFeedback("int8", form)
    feedback.encode(common.gaussian(100), KEY)
    for n, dtype in ((101, "float32"), (101, "float64")):
        x = common.gaussian(n, dtype, seed=1)
        assert feedback.encode(x, KEY).tobytes() == fresh.encode(x, ("new", dtype)).tobytes()
        assert feedback.memory(KEY, n, dtype).steps == 1


WRONG_STATES = {
    "form": {'["a"]#form': np.frombuffer(b"magic", np.uint8), '["a"]': np.zeros(3, np.float32)},
    "no number of steps": {'["a"]#steps': np.zeros(2, np.int64), '["a"]': np.zeros(3, np.float32)},
    "not text": {'["a"]#form': np.zeros(2), '["a"]': np.zeros(3, np.float32)},
    "arrays": {'["a"]#total': np.zeros(3, np.float32)},
    "bfloat16": {'["a"]': torch.zeros(3, dtype=torch.bfloat16)},
    "malformed residual key": {"a#form": np.zeros(3, np.uint8)},
    "int8 message": {'["a"]': np.zeros(3, np.float32), '["a"]#form': np.frombuffer(b"loco", np.uint8)},
    "shorter than a header": {'["a"]': np.zeros(3, np.uint8), '["a"]#form': np.frombuffer(b"loco", np.uint8)},
    "no message of": {
        '["a"]': hc.get_codec("int8:block=64").encode(np.zeros(3, np.float32)),
        '["a"]#form': np.frombuffer(b"loco", np.uint8),
    },
    "its array 'velocity' is float32": {
        '["a"]': np.zeros(3, np.float32),
        '["a"]#velocity': np.zeros(4, np.float32),
        '["a"]#form': np.frombuffer(b"dgc", np.uint8),
    },
}


@pytest.mark.parametrize("what", WRONG_STATES)
def test_wrong_states(what):
    with pytest.raises(ValueError, match=what):
        hc.ErrorFeedback(form=None).load_state_dict(WRONG_STATES[what])


def test_wrong_arguments():
    for spec, match in {
        "loco:beta=1": "beta must be a number from 0 to below 1, not 1",
        "loco:beta=x": "beta must be a number from 0 to below 1, not 'x'",
        "loco:reset_steps=0": "reset_steps must be an integer from 1 to 2147483647, not 0",
        "dgc:momentum=-0.1": "momentum must be a number from 0 to below 1, not -0.1",
        "dgc:beta=0.5": "form 'dgc' has no parameter 'beta'; it takes momentum",
        "ef:0.5": "form 'ef' has no parameter.*it takes none",
        "ef22": "unknown form of error feedback 'ef22'; known: ef, ef21, loco, dgc",
    }.items():
        with pytest.raises(ValueError, match=match):
            hc.ErrorFeedback("int8", spec)
    with pytest.raises(ValueError, match="form is None"):
        hc.ErrorFeedback("int8", None, beta=0.5)
    with pytest.raises(ValueError, match="form must be given"):
        hc.ErrorFeedback("int8", None).encode(common.gaussian(3), KEY)
    with pytest.raises(ValueError, match="form must be 'ef', this ErrorFeedback's, not 'loco'"):
        hc.ErrorFeedback("int8").memory(KEY, 3, form="loco")
    with pytest.raises(ValueError, match="only the forms 'ef' and 'ef-sgdm' have a residual, not 'dgc'"):
        hc.ErrorFeedback("int8", "dgc").residual(KEY, 3)
    with pytest.raises(ValueError, match=r"out must be uint8 of at least \d+ bytes"):
        hc.ErrorFeedback("int8").encode(common.gaussian(30), KEY, out=np.empty(50, np.uint8))
    assert parse_form("loco:0.9").spec == "loco:beta=0.9"
    assert parse_form("loco:beta=0.8").spec == "loco"
    assert parse_form("loco:beta=0.5", beta=0.7).options == {"beta": 0.7, "reset_steps": 1024}

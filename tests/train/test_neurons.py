"""Only the largest values of the residual stream go on to the next stage, and gradients are of those alone."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from hybridcomp.arrays import DType
from hybridcomp.codecs import get_codec
from hybridcomp.errors import ConfigError
from hybridcomp.policy import PHASES, Message
from hybridcomp_lab.train.checkpoints.resume import Checkpoint, check_fits, run_identity
from hybridcomp_lab.train.checks import check_config
from hybridcomp_lab.train.config import TrainConfig
from hybridcomp_lab.train.model.gpt import ModelShape, build_gpt, keep_stage, loss_of
from hybridcomp_lab.train.model.neurons import Neurons, largest, received
from hybridcomp_lab.train.parallel.neurons import Refresh
from hybridcomp_lab.train.start import read_policy
from hybridcomp_lab.train.techniques import NONZERO, concerns

MICRO_BATCHES = 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_largest_values_go_on_with_nan_and_infinity_and_gradients_are_of_those(dtype):
    inf, nan = torch.inf, torch.nan
    x = torch.tensor([0.5, -0.5, 0.25, -0.125, 0.0, inf, -inf, nan], dtype=dtype, requires_grad=True)
    y = largest(x, 0.5)
    assert torch.equal(
        y.nan_to_num(7.0), torch.tensor([0.5, -0.5, 0, 0, 0, inf, -inf, 7], dtype=dtype).nan_to_num()
    )
    y.backward(torch.full_like(y, 3))
    assert x.grad.tolist() == [3, 3, 0, 0, 0, 3, 3, 3]
    # The receiver knows the places by the values.
    arrived = y.detach().requires_grad_()
    again = received(arrived)
    assert torch.equal(again.nan_to_num(7.0), y.nan_to_num(7.0))
    again.backward(torch.full_like(again, nan))
    assert torch.isnan(arrived.grad).tolist() == [True, True, False, False, False, True, True, True]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_codec_carries_every_value_but_zero_as_it_is(dtype):
    least = np.nextafter(np.zeros((), dtype), np.ones((), dtype))
    x = np.zeros(5000, dtype)
    x[::40] = np.resize(np.array([least, -least, np.nan, np.inf, -np.inf, 1e-30, -3], dtype), 125)
    codec, out = get_codec(NONZERO), np.empty_like(x)
    message = codec.encode(x)
    codec.decode(message, out)
    assert out.tobytes() == x.tobytes()
    assert message.size < 125 * (x.itemsize + 2) + 200


def test_thresholds_give_the_share_while_activations_drift():
    share, every = 0.1, 50
    neurons = Neurons(share)
    neurons.watch = Refresh(neurons, MICRO_BATCHES, every, ())
    generator = torch.Generator().manual_seed(1)
    shares, found = [], []
    for step in range(400):
        growth = 2.0 ** (step / 50) if step < 200 else 16.0  # then they stay
        before = neurons.threshold.item()
        kept = [neurons(growth * torch.randn(4, 8, 64, generator=generator)) for _ in range(MICRO_BATCHES)]
        shares.append(sum(int(y.count_nonzero()) for y in kept) / (MICRO_BATCHES * kept[0].numel()))
        if neurons.threshold.item() != before:
            found.append(step)
    assert shares[0] == 1
    assert found[0] == 0
    assert all(abs(shares[step + 1] / share - 1) < 0.25 for step in found)
    assert sum(abs(s / share - 1) > 0.25 for s in shares[1:]) <= len(found)
    growing = [step for step in found if step < 200]
    assert len(growing) > 200 / every * 2  # early ones
    still = [step for step in found if step > 250]
    assert all(b - a == every for a, b in itertools.pairwise(still))
    assert len(still) >= 2


def test_no_threshold_is_made_of_what_is_not_finite_and_the_old_one_stays():
    neurons = Neurons(0.5)
    neurons.watch = Refresh(neurons, 1, 1, ())
    neurons(torch.full((2, 2, 4), torch.inf))
    neurons(torch.zeros(2, 2, 4))
    assert neurons.threshold.item() == 0
    neurons(torch.arange(1.0, 17).view(2, 2, 4))
    assert neurons.threshold.item() == 9
    neurons(torch.full((2, 2, 4), torch.inf))
    assert neurons.threshold.item() == 9
    with torch.no_grad():  # an evaluation
        neurons(torch.ones(2, 2, 4))
    assert (neurons.threshold.item(), neurons.age.item()) == (9, 1)


def test_stages_are_the_whole_model_forward_and_backward():
    shape = ModelShape(50, 3, 16, 2, 8, pp_neurons=0.25, pp_neurons_after=(0, 1))
    whole = build_gpt(shape, 1).double()
    stages = [keep_stage(build_gpt(shape, 1), index, 3).double() for index in range(3)]
    for border, threshold in ((0, 0.02), (1, 0.03)):
        for model in (whole, stages[border]):
            model.neurons[str(border)].threshold.fill_(threshold)
    tokens = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(1))
    loss_of(whole(tokens[:, :-1]), tokens[:, 1:]).backward()
    inputs, outputs = [tokens[:, :-1]], []
    for stage in stages:
        outputs.append(stage(inputs[-1]))
        inputs.append(outputs[-1].detach().requires_grad_())
    gradient = None
    outputs[-1] = loss_of(outputs[-1], tokens[:, 1:])
    for x, y in reversed(list(zip(inputs, outputs, strict=False))):
        y.backward(gradient)
        gradient = x.grad
        if gradient is not None:
            assert torch.equal(gradient != 0, x != 0)
            assert 0.1 < (x != 0).double().mean() < 0.9
    wanted = {name: p.grad for name, p in whole.named_parameters()}
    for stage in stages:
        for name, p in stage.named_parameters():
            torch.testing.assert_close(p.grad, wanted[name], rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"pp_neurons": 1.5}, "pp_neurons must be from 0 to 1, not 1.5"),
        ({"pp_neurons": float("nan")}, "pp_neurons must be from 0 to 1, not nan"),
        ({"pp_neurons": 0.1}, "pp must be at least 2, or pp_neurons_after name layers"),
        ({"pp_neurons": 0.1, "pp": 2, "pp_neurons_refresh": 0}, "pp_neurons_refresh must be positive"),
        ({"pp_neurons_after": (1,)}, "pp_neurons must be above 0"),
        (
            {"pp_neurons": 0.1, "pp_neurons_after": (3, 7)},
            r"\(3, 7\) must be ascending .* last but one \(6\)",
        ),
        ({"pp_neurons": 0.1, "pp_neurons_after": (3, 1)}, r"\(3, 1\) must be ascending numbers"),
        (
            {"pp_neurons": 0.1, "pp": 4, "pp_neurons_after": (1, 3)},
            r"all stages but the last one \(1, 3, 5\)",
        ),
        (
            {"pp_neurons": 0.1, "pp": 2, "schedule": "local"},
            "schedule must be one of 1f1b, .*, 2bw, not local",
        ),
        ({"pp_neurons": 0.1, "pp": 2, "dp": 2, "sync": "local_sgd:every=4"}, "sync must be left out"),
    ],
)
def test_wrong_values_are_told(changes, told):
    with pytest.raises(ConfigError, match=told):
        check_config(TrainConfig(**changes))


def test_another_number_of_stages_is_the_same_model_but_resumes_nothing(tmp_path):
    two = TrainConfig(pp=2, pp_neurons=0.1)
    one = dataclasses.replace(two, pp=1, pp_neurons_after=(3,))
    check_config(one)
    assert one.neuron_borders == two.neuron_borders == (3,)
    identity = run_identity(two, 256, "text")
    made = Checkpoint(tmp_path, 4, 1.5, "digest", identity)
    check_fits(made, identity, two)
    for other, told in (
        (one, "pp 2 there, 1 here"),
        (dataclasses.replace(two, pp_neurons=0.2), "pp_neurons 0.1 there, 0.2 here"),
        (dataclasses.replace(two, pp_neurons_after=(1, 3)), r"pp_neurons_after \[3\] there, \[1, 3\] here"),
    ):
        with pytest.raises(ConfigError, match=told):
            check_fits(made, run_identity(other, 256, "text"), two)


@pytest.mark.parametrize(
    ("policy", "spec"),
    [
        (None, NONZERO),
        ("none", NONZERO),
        ("auto", NONZERO),
        ('[dp]\nall_reduce = "int8"', NONZERO),
        ("hybrid", "int8:block=128"),
        (
            '[pp]\ncodec = "threshold:abs=1e-30,values=(int8:block=64)"',
            "threshold:abs=1e-30,values=(int8:block=64)",
        ),
    ],
)
def test_what_is_not_zero_is_sent_unless_the_policy_names_a_codec(policy, spec, tmp_path):
    if policy is not None and "[" in policy:
        (tmp_path / "policy.toml").write_text(policy)
        policy = str(tmp_path / "policy.toml")
    config = TrainConfig(pp=2, pp_neurons=0.1, policy=policy)
    rules, codec = read_policy(config), get_codec(spec)
    for phase in PHASES:
        message = Message("pp", "send", phase, DType.FLOAT32, 1 << 20, step=0)
        assert rules.choose(message).codec.spec == codec.spec
    warned = [line for line in concerns(rules, config) if "pp sends the zeros, too" in line]
    assert len(warned) == codec.fixed_size
    plain = dataclasses.replace(config, pp_neurons=0.0)
    assert NONZERO not in str([c.spec for c in read_policy(plain).codecs("pp", "send")])

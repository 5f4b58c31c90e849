"""The model, its optimizer and schedule, in one process."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist

from hybridcomp_lab.train.config import TrainConfig
from hybridcomp_lab.train.model.gpt import ModelShape, build_gpt, keep_stage, loss_of
from hybridcomp_lab.train.optimizer.optimizers import (
    clip_gradients,
    learning_rate,
    make_optimizer,
    square_sum,
)
from tests.train.harness import alone

SHAPE = ModelShape(vocab_size=50, layers=4, d_model=16, heads=2, seq_len=8)


def tokens(count=3):
    return torch.randint(SHAPE.vocab_size, (count, SHAPE.seq_len), generator=torch.Generator().manual_seed(0))


def test_stages_in_a_row_are_the_whole_model():
    x = tokens()
    whole = build_gpt(SHAPE, seed=1)
    y = x
    for index in range(2):
        y = keep_stage(build_gpt(SHAPE, seed=1), index, 2)(y)
    assert torch.equal(y, whole(x))


def test_uneven_stages_in_a_row_are_the_whole_model():
    x = tokens()
    y = keep_stage(build_gpt(SHAPE, seed=1), 0, 2, range(3))(x)
    assert torch.equal(
        keep_stage(build_gpt(SHAPE, seed=1), 1, 2, range(3, 4))(y), build_gpt(SHAPE, seed=1)(x)
    )


def test_stages_hold_each_parameter_once():
    whole = dict(build_gpt(SHAPE, seed=1).named_parameters())
    stages = [dict(keep_stage(build_gpt(SHAPE, seed=1), i, 4).named_parameters()) for i in range(4)]
    assert sorted(whole) == sorted(name for stage in stages for name in stage)
    assert {name for name in stages[0] if "blocks" not in name} == {
        "embed.tokens.weight",
        "embed.positions.weight",
    }


def test_weights_come_from_the_seed_and_leave_the_generator_alone():
    state = torch.get_rng_state()
    a, b, c = (build_gpt(SHAPE, seed=s).blocks["1"].attn.qkv.weight for s in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(state, torch.get_rng_state())


def test_attention_does_not_see_the_future():
    model = build_gpt(SHAPE, seed=1)
    x = tokens()
    changed = x.clone()
    changed[:, 5] = (changed[:, 5] + 1) % SHAPE.vocab_size
    before, after = model(x), model(changed)
    assert torch.allclose(before[:, :5], after[:, :5], atol=1e-6)
    assert not torch.allclose(before[:, 5:], after[:, 5:], atol=1e-4)


def test_an_untrained_model_knows_nothing():
    x = tokens(16)
    assert loss_of(build_gpt(SHAPE, seed=1)(x), x).item() == pytest.approx(
        math.log(SHAPE.vocab_size), abs=0.1
    )


def test_names_fit_the_patterns_that_policies_exclude():
    small = {name for name, p in build_gpt(SHAPE, seed=1).named_parameters() if p.dim() < 2}
    assert small
    assert all("norm" in name for name in small)


def test_warm_up_then_cosine():
    config = TrainConfig(steps=110, warmup_steps=10, lr=1.0, min_lr=0.1)
    rates = [learning_rate(config, step) for step in range(111)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[60] == pytest.approx(0.55)
    assert rates[110] == pytest.approx(0.1)
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))
    assert learning_rate(TrainConfig(steps=1, warmup_steps=0, lr=1.0), 0) == 1.0


def test_matrices_decay_embeddings_and_norms_do_not():
    parameters = dict(build_gpt(SHAPE, seed=1).named_parameters())
    groups = {
        g["weight_decay"]: {id(p) for p in g["params"]}
        for g in make_optimizer(parameters, TrainConfig()).param_groups
    }
    plain = {id(p) for n, p in parameters.items() if "norm" in n or "embed" in n}
    assert groups[0.0] == plain
    assert groups[0.1] == {id(p) for p in parameters.values()} - plain


def test_square_sums_and_clipping():
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 4, 5)]
    for i, parameter in enumerate(parameters[:2]):
        parameter.grad = torch.full_like(parameter, i + 1.0)
    split, shared = square_sum(parameters[:1]), square_sum(parameters[1:])
    assert (split, shared) == pytest.approx((3, 16))
    clip_gradients(parameters, math.sqrt(19), 2 * math.sqrt(19))
    clip_gradients(parameters, math.sqrt(19), 0)
    assert parameters[0].grad.tolist() == [1, 1, 1]
    clip_gradients(parameters, math.sqrt(19), math.sqrt(19) / 4)
    assert torch.allclose(parameters[1].grad, torch.full((4,), 0.5))


def test_ranks_are_where_the_mesh_has_them():
    """Every rank is at its place; no two axes are of one size, so that none can stand for another."""
    sizes = {"pp": 2, "dp": 3, "tp": 4}
    for rank in (0, 5, 23):
        with alone(rank, **sizes) as topology:
            assert topology.rank_of(topology.pp, topology.dp, topology.tp) == topology.rank == rank
            for pp, dp, tp in itertools.product(*(range(size) for size in sizes.values())):
                assert topology.rank_of(pp, dp, tp) == topology.mesh.mesh[pp, dp, tp]
            mine = {axis: getattr(topology, axis) for axis in sizes}
            for axis, size in sizes.items():
                ranks = [topology.rank_of(**mine | {axis: place}) for place in range(size)]
                assert dist.get_process_group_ranks(topology.group(axis)) == ranks

"""Streamed layers over hybridcomp and over gloo, beside DDP, against the rule on one process."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hybridcomp.torch as hct
from tests.torch.cases.hook import BACKENDS, group, policy
from tests.torch.models.replicas import assert_close, assert_same_everywhere, values
from tests.torch.models.streaming import DECAY, LR, RANK, Rule, batch, gradients, loss_of, net, step

COARSE = "int8:block=128:rounding=stochastic"


def made(model: nn.Module, backend: str, **more: Any) -> tuple[hct.StreamedLayers, nn.Module, list[Any]]:
    """Stream a model's layers; the rest is in DDP, where more than one rank is."""
    streamed = hct.stream_linear(model, RANK, process_group=group(backend), **more)
    ddp = DistributedDataParallel(model, process_group=group(backend))
    rest = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    return streamed, ddp, [rest, streamed.optimizer(lr=LR, weight_decay=DECAY)]


def train(model: nn.Module, optimizers: list[Any], steps: range) -> None:
    """Train for steps of two backward passes each, of which the first synchronises nothing."""
    dtype = next(model.parameters()).dtype
    for t in steps:
        with model.no_sync():
            loss_of(model, batch(dist.get_rank(), 2 * t, dtype)).backward()
        loss_of(model, batch(dist.get_rank(), 2 * t + 1, dtype)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def bases(streamed: hct.StreamedLayers, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        n: tuple(optimizer.state[w][side] for side in ("left", "right")) for n, w in streamed.weights.items()
    }


def case_streaming_is_its_rule() -> None:
    ranks = dist.get_world_size()
    for backend in BACKENDS:
        model, alone = net(), net()
        streamed, ddp, optimizers = made(model, backend)
        rule = Rule(bases(streamed, optimizers[1]))
        for t in range(6):
            train(ddp, optimizers, range(t, t + 1))
            batches = [batch(rank, n) for rank in range(ranks) for n in (2 * t, 2 * t + 1)]
            step(alone, rule, gradients(alone, batches, ranks))
            assert_close(values(model), values(alone), 1e-9)
        assert_same_everywhere(values(model) | flat(bases(streamed, optimizers[1])))


def flat(both: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {f"{name}.{side}": tensor for name, pair in both.items() for side, tensor in enumerate(pair)}


def case_coarse_factors_have_the_same_bits() -> None:
    """The bits do not depend on the carrier, in weights of few bits too; error feedback keeps nothing of what turns."""
    for backend in BACKENDS:
        for dtype in (torch.float32, torch.bfloat16):
            model = net(dtype)
            start = values(model)
            streamed, ddp, optimizers = made(model, backend, policy=policy(COARSE, True, min_bytes=64))
            train(ddp, optimizers, range(4))
            assert_same_everywhere(values(model) | flat(bases(streamed, optimizers[1])))
            assert not torch.equal(model.twice.weight, start["twice.weight"])
            assert not any("residual" in key for key in hct.state_dict() if key.startswith("stream:")), (
                backend
            )
    assert {row.axis for row in hct.stats() if row.codec == COARSE} == {"dp"}


def case_bytes_are_those_of_factors() -> None:
    elements, ranks = RANK * (1000 + 2000), dist.get_world_size()
    for codec, ratio in (("none", 1.0), ("int8:block=128", 0.26)):
        hct.reset_stats()
        layer = nn.Linear(1000, 2000, bias=False)
        optimizer = hct.stream_linear(layer, RANK, policy=codec, process_group=group("gloo")).optimizer(
            lr=0.1
        )
        layer(torch.randn(4, 1000)).square().mean().backward()
        optimizer.step()
        rows = [row for row in hct.stats() if row.axis == "dp"]
        plain, wire = (sum(getattr(row, what) for row in rows) for what in ("plain_bytes", "wire_bytes"))
        assert abs(plain - 4 * elements * 2 * (ranks - 1) / ranks) < 100
        assert 0.98 * ratio * plain < wire < 1.05 * ratio * plain + 500, (codec, plain, wire)


def case_resumes_with_the_same_bits() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = net(dtype)
        streamed, ddp, optimizers = made(model, "gloo", policy=policy(COARSE, min_bytes=64))
        train(ddp, optimizers, range(3))
        saved = copy.deepcopy([model.state_dict(), *(optimizer.state_dict() for optimizer in optimizers)])
        memory = streamed._averager.memory()
        train(ddp, optimizers, range(3, 6))
        again = net(dtype, seed=1)
        others, beside, resumed = made(again, "gloo", policy=policy(COARSE, min_bytes=64))
        train(beside, resumed, range(1))
        for part, state in zip([again, *resumed], saved, strict=True):
            part.load_state_dict(state)
        others._averager.load_memory(memory)
        train(beside, resumed, range(3, 6))
        for name, tensor in (values(model) | flat(bases(streamed, optimizers[1]))).items():
            assert torch.equal(tensor, (values(again) | flat(bases(others, resumed[1])))[name]), (dtype, name)


def case_layers_without_gradients() -> None:
    """One layer is used on the first rank alone, one on none."""
    model = nn.ModuleDict({name: nn.Linear(5, 5, bias=False) for name in ("some", "none")}).double()
    streamed = hct.stream_linear(model, 2)
    optimizer = streamed.optimizer(lr=1.0, weight_decay=0.1)
    start = values(model)
    alone = nn.Linear(5, 5, bias=False).double()
    alone.weight.data = start["some.weight"]
    x = torch.randn(4, 5, dtype=torch.float64)
    rule = Rule({"weight": bases(streamed, optimizer)["some.weight"]})
    alone(x).square().sum().backward()
    if dist.get_rank() == 0:
        model["some"](x).square().sum().backward()
    optimizer.step()
    moved = rule.direction("weight", alone.weight.grad / dist.get_world_size())
    expected = 0.9 * start["some.weight"] - moved
    assert (model["some"].weight - expected).abs().max() < 1e-9
    assert torch.equal(model["none"].weight, start["none.weight"])
    assert_same_everywhere(values(model))


def case_clips_by_the_norm_of_all_ranks() -> None:
    model, alone = net(), net()
    streamed, ddp, _ = made(model, "hybridcomp")
    rule = Rule(bases(streamed, streamed.optimizer(lr=1.0)))
    ranks = dist.get_world_size()
    found = gradients(alone, [batch(rank, 0) for rank in range(ranks)], ranks)
    whole = {name: rule.direction(name, g) if name in rule.bases else g for name, g in found.items()}
    expected = torch.stack([g.norm() for g in whole.values()]).norm()
    loss_of(ddp, batch(dist.get_rank(), 0)).backward()
    norm = streamed.clip_grad_norm_(expected / 3, model.parameters())
    assert abs(norm - expected) < 1e-9 * expected
    others = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert abs((streamed.grad_norm() ** 2 + others**2) ** 0.5 - expected / 3) < 1e-5 * expected


def case_values_that_are_not_finite_are_told_to_all() -> None:
    for codec in ("none", "int8:block=128"):
        model = net(torch.float32)
        streamed, ddp, optimizers = made(model, "hybridcomp", policy=f"{codec}:min_bytes=0")
        before = {name: tensor.clone() for name, tensor in flat(bases(streamed, optimizers[1])).items()}
        x = batch(dist.get_rank(), 0, torch.float32)
        loss_of(ddp, x * torch.inf if dist.get_rank() == 1 else x).backward()
        optimizers[1].step()
        for weight in streamed.weights.values():
            assert not torch.isfinite(weight).all()
        assert_same_everywhere(
            {name: torch.isfinite(p).view(torch.uint8) for name, p in values(model).items()}
        )
        for name, tensor in flat(bases(streamed, optimizers[1])).items():
            assert torch.equal(tensor, before[name]), name


def case_ranks_begin_alike() -> None:
    seed = dist.get_rank()
    model = net(seed=seed)
    expected = MPI.COMM_WORLD.bcast(values(model))
    own = values(model)
    streamed = hct.stream_linear(model, RANK)
    for name, tensor in values(model).items():
        assert torch.equal(tensor, (expected if name in streamed.weights else own)[name]), name
    mine = net(seed=seed)
    hct.stream_linear(mine, RANK, init_sync=False)
    assert torch.equal(mine.twice.weight, net(seed=seed).twice.weight)


def case_one_rank_of_several() -> None:
    """A group of one rank averages nothing."""
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    model, plain = net(seed=dist.get_rank()), net(seed=dist.get_rank())
    streamed = hct.stream_linear(model, 12, process_group=alone)  # as many as the smaller sides: exact
    optimizer = streamed.optimizer(lr=LR)
    loss_of(model, batch(0, 0)).backward()
    optimizer.step()
    found = gradients(plain, [batch(0, 0)], 1)
    for name, weight in streamed.weights.items():
        assert (weight - plain.get_parameter(name) + LR * found[name]).abs().max() < 1e-9

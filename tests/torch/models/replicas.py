"""A loop that knows nothing of replicas, and streaming DiLoCo by its formulas on one process."""

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn

import hybridcomp.torch as hct

WIDTH = 24
LR, MOMENTUM = 0.7, 0.9
Tensors = dict[str, torch.Tensor]


def net(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Sequential:
    """Return four parameters, the second and the fourth small."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)).to(dtype)


def batch(rank: int, step: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank), dtype=dtype)


def inner_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    """Do a step of a loop that knows nothing of replicas."""
    optimizer.zero_grad()
    x = batch(rank, step, next(model.parameters()).dtype)
    (model(x) - x).square().mean().backward()
    optimizer.step()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        inner_step(model, optimizer, dist.get_rank(), step)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def values(model: nn.Module) -> Tensors:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def agreed(context: hct.DiLoCo | hct.LocalSGD) -> Tensors:
    """Return the global parameters."""
    return context.state_dict()["globals"]


def assert_same_everywhere(tensors: Tensors) -> None:
    mine = b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors.values())
    assert len(set(MPI.COMM_WORLD.allgather(mine))) == 1


def assert_close(got: Tensors, expected: Tensors, tolerance: float) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        assert (tensor - expected[name]).abs().max() < tolerance, (name, tensor, expected[name])


def rule(
    ranks: int, steps: int, every: int, parts: list[list[str]], delay: int, alpha: float, order: str = "paper"
) -> list[Tensors]:
    """Run streaming DiLoCo by its formulas in this process; return all replicas' parameters, the global ones last.

    An outer step is due when its differences are taken, in the paper's order, or when they are applied, in torchft's.
    """
    models = [net() for _ in range(ranks)]
    optimizers = [adam(model) for model in models]
    whole, momentum = values(models[0]), {name: torch.zeros_like(p) for name, p in values(models[0]).items()}
    sent: Tensors = {}
    for t in range(1, steps + 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            inner_step(model, optimizer, rank, t)
        mine = [dict(model.named_parameters()) for model in models]
        for number, names in enumerate(parts):
            first = every * (number + 1) // len(parts) - (delay if order == "torchft" else 0)
            if t >= first and (t - first) % every == 0:
                for name in names:
                    sent[name] = torch.stack([whole[name] - each[name].detach() for each in mine]).mean(0)
            if t >= first + delay and (t - first - delay) % every == 0:
                for name in names:
                    momentum[name] = MOMENTUM * momentum[name] + sent[name]
                    whole[name] = whole[name] - LR * (sent[name] + MOMENTUM * momentum[name])
                    for each in mine:
                        each[name].data = alpha * each[name].data + (1 - alpha) * whole[name]
    return [*(values(model) for model in models), whole]

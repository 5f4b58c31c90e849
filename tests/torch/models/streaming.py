"""A model with linear layers, and streaming batch PCA by its formulas, on gradients that are formed."""

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import nn

RANK, LR, DECAY = 3, 0.3, 0.01
Tensors = dict[str, torch.Tensor]
STREAMED = ("inner.weight", "twice.weight", "outer.weight")


class Net(nn.Module):
    """A layer that is used twice, a norm, and biases, of which streaming leaves all but linear weights alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.twice, self.outer = nn.Linear(7, 12), nn.Linear(12, 12, bias=False), nn.Linear(12, 5)
        self.norm = nn.LayerNorm(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.inner(x))
        return self.outer(self.norm(self.twice(torch.tanh(self.twice(x)))))


def net(dtype: torch.dtype = torch.float64, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype)


def batch(rank: int, step: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return two sequences of four vectors; on rank 2 none in each third step."""
    x = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(100 * step + rank), dtype=dtype)
    return x[:0] if rank == 2 and step % 3 == 2 else x


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum() / 100


class Rule:
    """The bases of weights, and the step that they make of gradients.

    Args:
        bases: L and R of each weight, to begin with.
    """

    def __init__(self, bases: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.bases = {name: [side.double().numpy().copy() for side in both] for name, both in bases.items()}

    def direction(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Return what G's projection leaves of it; take the next bases from G."""
        g, (left, right) = gradient.double().numpy(), self.bases[name]
        lost = g - left @ (left.T @ g)
        lost = lost - (lost @ right) @ right.T
        self.bases[name] = [np.linalg.qr(g @ right)[0], np.linalg.qr(g.T @ left)[0]]
        return torch.from_numpy(g - lost)


def gradients(model: nn.Module, batches: Iterable[torch.Tensor], ranks: int) -> Tensors:
    """Return the mean over the ranks of the gradients of all their batches."""
    model.zero_grad()
    for x in batches:
        (loss_of(model, x) / ranks).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@torch.no_grad()
def step(model: nn.Module, rule: Rule, found: Tensors) -> None:
    """Update streamed weights by the rule, all other parameters by SGD."""
    for name, p in model.named_parameters():
        if name in rule.bases:
            p.sub_(LR * (rule.direction(name, found[name]) + DECAY * p))
        else:
            p.sub_(0.1 * found[name])

"""Define mixtures of experts: several MLPs in the place of a block's one, of which each token passes one.

After Fedus, Zoph, Shazeer 2021, "Switch Transformers" (arXiv 2101.03961):

1.  A router gives every token a probability for each expert. The likeliest expert takes the token, unless it has taken
    its capacity of the micro-batch's tokens before: ``capacity_factor * tokens / experts``, rounded up.
2.  The expert's output is multiplied by the probability. For a token that no expert took it is zero: the
    residual stream passes that one on.
3.  The balance loss, ``experts * sum over experts of (its share of the tokens) * (its mean probability)``, is 1 where
    all experts get as many tokens, and more elsewhere. Its gradient is added where the mixture is, so that a stage of
    a pipeline needs no other for it.

Where there are replicas each has equally many of the experts. Tokens travel to them in one all-to-all, of [experts,
capacity, d_model] whatever the router says, and back in another; gradients do so in the backward pass.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from hybridcomp_lab.train.config import AXES
from hybridcomp_lab.train.topology import Topology, make_groups


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        arrived = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(arrived, x.contiguous(), group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        back = torch.empty_like(gradients[0], memory_format=torch.contiguous_format)
        dist.all_to_all_single(back, gradients[0].contiguous(), group=ctx.group)
        return back, None


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.ones_like(ctx.saved_tensors[0])


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange rows of ``x`` so that each rank of the group gets its part; parts are equal."""
    return _AllToAll.apply(x, group)  # type: ignore[no-any-return]


def with_loss(x: Tensor, loss: Tensor) -> Tensor:
    """Return ``x``; in backward add the gradient of ``loss``, a scalar, to that of the batch."""
    return _WithLoss.apply(x, loss)  # type: ignore[no-any-return]


class Experts(nn.Module):
    """MLPs of experts, side by side, each like a block's own."""

    def __init__(self, d_model: int, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, d_model, 4 * d_model))
        self.down = nn.Parameter(torch.empty(experts, 4 * d_model, d_model))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [experts, tokens, d_model] to the same shape, each expert its own tokens."""
        return torch.bmm(functional.gelu(torch.bmm(x, self.up)), self.down)


class Mixture(nn.Module):
    """Router and its experts.

    Args:
        d_model: width of the tokens.
        count: number of experts, on all replicas together.
        capacity_factor: see the module.

    Attributes:
        group: replicas that share the experts; None where all experts are here.
        balance: factor of the balance loss.
    """

    def __init__(self, d_model: int, count: int, capacity_factor: float) -> None:
        super().__init__()
        self.router = nn.Linear(d_model, count, bias=False)
        self.experts = Experts(d_model, count)
        self.count = count
        self.capacity_factor = capacity_factor
        self.group: dist.ProcessGroup | None = None
        self.balance = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [batch, time, d_model] to the same shape. In ``eval()`` every token is taken."""
        tokens = x.flatten(0, 1)
        shares = self.router(tokens).softmax(-1)
        share, expert = shares.max(-1)
        chosen = functional.one_hot(expert, self.count)
        place = (chosen.cumsum(0) * chosen).sum(-1) - 1  # position among the tokens of the same expert
        capacity = self._capacity(len(tokens))
        taken = (place < capacity).nonzero().flatten()
        slots = expert[taken] * capacity + place[taken]
        room = tokens.new_zeros(self.count * capacity, x.shape[-1]).index_copy(0, slots, tokens[taken])
        made = self._pass(room.view(self.count, capacity, -1)).flatten(0, 1)
        y = made[slots] * share[taken, None]
        y = y.new_zeros(len(tokens), x.shape[-1]).index_copy(0, taken, y)
        if self.balance:
            uneven = self.count * (chosen.to(shares.dtype).mean(0) * shares.mean(0)).sum()
            y = with_loss(y, self.balance * uneven)
        result: Tensor = y.view_as(x).to(x.dtype)  # shares are fp32 under autocast
        return result

    def _capacity(self, tokens: int) -> int:
        """Return the number of tokens that an expert takes of so many."""
        return min(tokens, math.ceil(self.capacity_factor * tokens / self.count)) if self.training else tokens

    def _pass(self, room: Tensor) -> Tensor:
        """Pass ``room`` [experts, capacity, d_model] through the experts, on the ranks that have them."""
        if self.group is None:
            return self.experts(room)  # type: ignore[no-any-return]
        ranks, (_, capacity, width) = dist.get_world_size(self.group), room.shape
        here = self.count // ranks
        arrived = all_to_all(room, self.group).view(ranks, here, capacity, width)
        made = self.experts(arrived.transpose(0, 1).reshape(here, ranks * capacity, width))
        back = made.view(here, ranks, capacity, width).transpose(0, 1)
        return all_to_all(back.reshape(self.count, capacity, width), self.group)


def make_group(topology: Topology, seconds: float) -> dist.ProcessGroup | None:
    """Make a group of the replicas for the axis ``ep``; None where there is one replica.

    Collective over all ranks.

    Args:
        topology: mesh of the ranks.
        seconds: time after which an operation of the group fails.
    """
    stages, replicas, parts = (range(topology.sizes[axis]) for axis in AXES)
    if len(replicas) == 1:
        return None
    ranks = [[topology.rank_of(pp, dp, tp) for dp in replicas] for pp in stages for tp in parts]
    return make_groups(ranks, "mesh_ep", seconds)


def spread_experts(model: nn.Module, group: dist.ProcessGroup | None, balance: float) -> frozenset[str]:
    """Keep this replica's experts of the mixtures of a stage. Every replica has built them all.

    Args:
        model: stage of the model.
        group: replicas; None where there is one.
        balance: weight of the balance loss in a micro-batch's.

    Returns:
        The names of the parameters that this replica alone has now.
    """
    apart: set[str] = set()
    for path, mixture in model.named_modules():
        if not isinstance(mixture, Mixture):
            continue
        mixture.balance = balance
        if group is None:
            continue
        mixture.group = group
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        for name, whole in list(mixture.experts.named_parameters()):
            part = nn.Parameter(whole.detach().chunk(ranks)[rank].clone())
            # Gradients for all replicas' tokens arrive here, each of its own batch: the step is by their mean.
            part.register_hook(lambda gradient, ranks=ranks: gradient / ranks)  # type: ignore[no-untyped-call]
            mixture.experts.register_parameter(name, part)
            apart.add(f"{path}.experts.{name}")
    return frozenset(apart)

"""Make the optimizers, their learning-rate schedule, and the gradient norm over all axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hybridcomp.torch.momentum.optimizer import MomentumOptimizer
from hybridcomp_lab.train.config import TrainConfig
from hybridcomp_lab.train.optimizer.lans import LANS, Totals, first_moments
from hybridcomp_lab.train.optimizer.momentum import own_state
from hybridcomp_lab.train.topology import Topology


class SGDW(torch.optim.SGD):
    """SGD with Nesterov's momentum and decoupled weight decay.

    After Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization" (arXiv 1711.05101): weights decay apart
    from their momentum, so that it does not matter whether momentum is here or is in error feedback
    (``ef-sgdm``). ::

        u = momentum u + g;  x -= lr (g + momentum u + decay x)

    Args:
        groups: parameters in groups, each with its ``decay``.
        lr: learning rate.
        momentum: momentum; 0: none.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, momentum: float) -> None:
        super().__init__(groups, lr=lr, momentum=momentum, nesterov=momentum > 0)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.grad is not None]
            if moved and group["decay"]:
                torch._foreach_mul_(moved, 1 - group["lr"] * group["decay"])
        super().step()


def make_optimizer(
    parameters: Mapping[str, nn.Parameter],
    config: TrainConfig,
    whole: Mapping[str, Tensor] | None = None,
    totals: Totals | None = None,
) -> torch.optim.Optimizer:
    """Make the optimizer, which decays matrices, except embeddings and a head that is one; it decays no norms.

    Args:
        parameters: parameters by name.
        config: configuration with the kind, rates and decays.
        whole: whole parameters of which ``parameters`` has flat parts.
        totals: function for LANS, where ``parameters`` has parts of tensors.
    """
    groups = parameter_groups(parameters, config, whole)
    betas = (config.beta1, config.beta2)
    match config.optimizer:
        case "sgd":
            return SGDW(groups, config.lr, config.momentum)
        case "lans":
            return (
                LANS(groups, config.lr, betas) if totals is None else LANS(groups, config.lr, betas, totals)
            )
        case _:
            # For those that exchange momenta, too, where nothing is exchanged: it costs as much. .momentum makes them.
            return torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=True)


def parameter_groups(
    parameters: Mapping[str, nn.Parameter], config: TrainConfig, whole: Mapping[str, Tensor] | None = None
) -> list[dict[str, Any]]:
    """Return the parameters in groups, by what decays; see :func:`make_optimizer`."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in parameters.items():
        shaped = parameter if whole is None else whole.get(name, parameter)
        embeds = "embed" in name or (config.tie_embeddings and name == "head.weight")
        matrix = shaped.dim() >= 2 and not embeds
        (decayed if matrix else plain).append(parameter)
    decay = "decay" if config.optimizer == "sgd" else "weight_decay"
    groups: list[dict[str, Any]] = [
        {"params": decayed, decay: config.weight_decay},
        {"params": plain, decay: 0.0},
    ]
    return [group for group in groups if group["params"]]


def moments(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return the optimizer's own tensors of a parameter by name, and make them where there was no step yet."""
    if isinstance(optimizer, MomentumOptimizer):
        return own_state(optimizer, parameter)
    state: dict[str, Tensor] = optimizer.state[parameter]
    if isinstance(optimizer, torch.optim.SGD):
        if optimizer.param_groups[0]["momentum"] and not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
    elif not state:
        state.update(first_moments(parameter))
    return state


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the rate for 0-based ``step``: linear warm-up to ``lr``, then a cosine down to ``min_lr``."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.min_lr + (config.lr - config.min_lr) * cosine


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def square_sum(parameters: Sequence[nn.Parameter]) -> float:
    """Return the sum of the squares of the parameters' gradients."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return 0.0
    norms = torch.stack(torch._foreach_norm(gradients)).double()
    return float(norms.square().sum())


def global_norm(topology: Topology, sums: Tensor) -> float:
    """Compute the norm of the whole model's gradient.

    Args:
        topology: mesh of the ranks.
        sums: fp64 [ranks, 3], each rank's sums of squares over split parameters, shared ones, and those that its
            replica alone has.

    Split parameters are summed over tp, shared ones counted once, both summed over pp; replicas (dp) have
    equal gradients of these, so the first one's count. Every rank's sum counts for parameters that a replica alone has.
    Every rank adds the same numbers in the same order: equal bits on all.
    """
    total = 0.0
    for pp in range(topology.sizes["pp"]):
        for tp in range(topology.sizes["tp"]):
            split, shared, _ = sums[topology.rank_of(pp, 0, tp)].tolist()
            total += split + (shared if tp == 0 else 0.0)
    return math.sqrt(total + sum(sums[:, 2].tolist()))


def clip_gradients(parameters: Sequence[nn.Parameter], norm: float, limit: float) -> None:
    """Scale the gradients by ``limit / norm`` where the norm exceeds the limit; a limit of 0 does nothing."""
    if limit and norm > limit:
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], limit / norm)

"""AdamW, its learning-rate schedule, and the gradient norm over all axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hybridcomp.train.config import TrainConfig
from hybridcomp.train.topology import Topology


def make_optimizer(
    parameters: Mapping[str, nn.Parameter], config: TrainConfig, whole: Mapping[str, Tensor] | None = None
) -> torch.optim.AdamW:
    """Make an AdamW that decays matrices, but neither embeddings, a head that is one, nor norms.

    Args:
        parameters: by name.
        config: rates and decays.
        whole: those of which ``parameters`` has flat parts.
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in parameters.items():
        shaped = parameter if whole is None else whole.get(name, parameter)
        embeds = "embed" in name or (config.tie_embeddings and name == "head.weight")
        matrix = shaped.dim() >= 2 and not embeds
        (decayed if matrix else plain).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)


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
    """Sum of the squares of the parameters' gradients."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return 0.0
    norms = torch.stack(torch._foreach_norm(gradients)).double()
    return float(norms.square().sum())


def global_norm(topology: Topology, sums: Tensor) -> float:
    """Compute the norm of the whole model's gradient.

    Args:
        topology: the mesh.
        sums: fp64 [ranks, 3], each rank's squares of split parameters, of shared ones, and of those that its
            replica alone has.

    Split parameters are summed over tp, shared ones counted once, both summed over pp; replicas (dp) have
    equal gradients of these, so the first one's count. Of what a replica alone has, each rank's sum counts.
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

"""Every schedule's rule in one process: the whole model, its weights by version, one AdamW."""

from __future__ import annotations

import math

import torch
from torch.func import functional_call

from hybridcomp.train.model import build_gpt, loss_of
from hybridcomp.train.optim import learning_rate, make_optimizer, set_learning_rate

Weights = dict[str, torch.Tensor]


class Reference:
    """Trains by a rule, and keeps every version of the weights.

    Args:
        shape, config: as the trainer's.
        rule: ``fresh`` (the gradient of the newest weights), ``delayed`` (of those before), ``cdp-v2``.

    Attributes:
        versions: W(0), W(1), ...
        losses, norms: of each step.
    """

    def __init__(self, shape, config, rule: str) -> None:
        self.config, self.rule = config, rule
        self.model = build_gpt(shape, config.seed)
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = make_optimizer(self.parameters, config)
        self.versions = [self._copy()]
        self.losses: list[float] = []
        self.norms: list[float] = []

    def _copy(self) -> Weights:
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    def step(self, batches: list[torch.Tensor]) -> None:
        """Train on the replicas' batches; as many as dp."""
        t = len(self.versions) - 1
        for worker, batch in enumerate(batches, 1):
            weights = self.seen(t, worker)
            logits = functional_call(self.model, weights, (batch[:, :-1],))
            loss = loss_of(logits, batch[:, 1:]) / len(batches)
            self.losses[t:] = [sum(self.losses[t:]) + loss.item()]
            for name, gradient in zip(
                weights, torch.autograd.grad(loss, list(weights.values())), strict=True
            ):
                p = self.parameters[name]
                p.grad = gradient if p.grad is None else p.grad + gradient
        self.norms.append(math.sqrt(sum(p.grad.square().sum().item() for p in self.parameters.values())))
        limit = self.config.clip
        for p in self.parameters.values():
            if limit and self.norms[-1] > limit:
                p.grad *= limit / self.norms[-1]
        set_learning_rate(self.optimizer, learning_rate(self.config, t))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.versions.append(self._copy())

    def seen(self, t: int, worker: int) -> Weights:
        """The weights that a worker (from 1) computes the gradient of step t with."""
        older, newest = self.versions[max(t - 1, 0)], self.versions[t]
        chosen = {}
        for name in newest:
            if self.rule == "cdp-v2":
                stages = self.config.dp
                fresh = worker + stage_of(name, self.config.layers, stages) > stages
            else:
                fresh = self.rule == "fresh"
            chosen[name] = (newest if fresh else older)[name].clone().requires_grad_()
        return chosen


def stage_of(name: str, layers: int, stages: int) -> int:
    """The stage, from 1, of ``stages`` that a parameter of the whole model is in."""
    if name.startswith("embed"):
        return 1
    if name.startswith("blocks."):
        return int(name.split(".")[1]) // (layers // stages) + 1
    return stages


def difference(a: Weights, b: Weights) -> float:
    """The largest difference of two versions."""
    return max((a[name] - b[name]).abs().max().item() for name in a)

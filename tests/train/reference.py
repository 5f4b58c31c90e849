"""Every schedule's rule in one process: the whole model, its weights by version, one optimizer."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch.func import functional_call
from torch.nn import functional

from hybridcomp_lab.train.model.experts import Mixture
from hybridcomp_lab.train.model.gpt import OwnLoss, build_gpt, keep_stage, loss_of, synthetic_labels
from hybridcomp_lab.train.optimizer.optimizers import learning_rate, make_optimizer, set_learning_rate
from tests.train.kept import Kept

MEAN = {"adamw": "exp_avg", "lans": "exp_avg", "sgd": "momentum_buffer"}
Weights = dict[str, torch.Tensor]


class Reference:
    """Training by a rule, which keeps every version of the weights.

    Args:
        shape, config: shape of the model and configuration, as the trainer's.
        rule: ``fresh`` (the gradient of the newest weights), ``delayed`` (of those before), ``cdp-v2``.

    Attributes:
        versions: W(0), W(1), ...
        losses, norms: loss and gradient norm of each step.
        kept: the values that go on from block to block, where that is a share of them.
    """

    def __init__(self, shape, config, rule: str) -> None:
        self.config, self.rule = config, rule
        self.model = build_gpt(dataclasses.replace(shape, pp_neurons=0.0, pp_neurons_after=()), config.seed)
        self.kept = Kept(self.model, config)
        self.mixtures: list[DenseMixture] = []
        for block in self.model.blocks.values():
            if isinstance(block.mlp, Mixture):
                block.mlp = DenseMixture(block.mlp)
                self.mixtures.append(block.mlp)
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
        self.kept.version = t
        for worker, batch in enumerate(batches, 1):
            for micro in batch.chunk(self.config.micro_batches):
                self._add_gradient(t, self.seen(t, worker), micro, len(batches) * self.config.micro_batches)
        self.kept.end_step()
        self.norms.append(math.sqrt(sum(p.grad.square().sum().item() for p in self.parameters.values())))
        limit = self.config.clip
        for p in self.parameters.values():
            if limit and self.norms[-1] > limit:
                p.grad *= limit / self.norms[-1]
        set_learning_rate(self.optimizer, learning_rate(self.config, t))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.versions.append(self._copy())

    def _add_gradient(self, t: int, weights: Weights, micro: torch.Tensor, parts: int) -> None:
        """Add the gradient of a micro-batch, one of ``parts``."""
        loss = loss_of(functional_call(self.model, weights, (micro[:, :-1],)), micro[:, 1:]) / parts
        self.losses[t:] = [sum(self.losses[t:]) + loss.item()]
        for mixture in self.mixtures:
            loss = loss + self.config.balance_loss * mixture.uneven / parts
        for name, gradient in zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True):
            p = self.parameters[name]
            p.grad = gradient if p.grad is None else p.grad + gradient

    def weights(self, version: int, pp: int) -> Weights:
        """Return all weights of a version, whatever the stage."""
        return self.versions[version]

    def moment(self, name: str, pp: int) -> torch.Tensor:
        """Return the optimizer's mean of a parameter's gradients."""
        return self.optimizer.state[self.parameters[name]][MEAN[self.config.optimizer]]

    def logits(self, version: int, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of the model with a version of the weights."""
        self.kept.version = version
        return functional_call(self.model, self.versions[version], (x,))

    def seen(self, t: int, worker: int) -> Weights:
        """Return the weights that a worker (from 1) computes the gradient of step t with."""
        older, newest = self.versions[max(t - 1, 0)], self.versions[t]
        if self.config.predict_weights:
            before = self.versions[max(t - 2, 0)]
            older = {name: 2 * weights - before[name] for name, weights in older.items()}
        chosen = {}
        for name in newest:
            if self.rule == "cdp-v2":
                stages = self.config.dp
                fresh = worker + stage_of(name, self.config.layers, stages) > stages
            else:
                fresh = self.rule == "fresh"
            chosen[name] = (newest if fresh else older)[name].clone().requires_grad_()
        return chosen


class DenseMixture(torch.nn.Module):
    """A mixture token by token, by its definition, with all experts in one place.

    Attributes:
        uneven: balance loss of the last micro-batch.
        passed_on: tokens so far that no expert took.
    """

    def __init__(self, mixture: Mixture) -> None:
        super().__init__()
        self.router, self.experts = mixture.router, mixture.experts
        self.factor = mixture.capacity_factor
        self.uneven: torch.Tensor | float = 0.0
        self.passed_on = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        count = len(self.experts.up)
        shares = torch.softmax(tokens @ self.router.weight.T, dim=1)
        chosen = shares.argmax(1).tolist()
        capacity, taken, rows = math.ceil(self.factor * len(tokens) / count), [0] * count, []
        for token, share, expert in zip(tokens, shares, chosen, strict=True):
            if taken[expert] < capacity:
                inside = torch.nn.functional.gelu(token @ self.experts.up[expert])
                rows.append(share[expert] * (inside @ self.experts.down[expert]))
            else:
                rows.append(torch.zeros_like(token))
                self.passed_on += 1
            taken[expert] += 1
        fractions = [chosen.count(expert) / len(tokens) for expert in range(count)]
        self.uneven = count * sum(f * shares[:, e].mean() for e, f in enumerate(fractions))
        return torch.stack(rows).view_as(x)


class LocalReference:
    """Reference for local updates: stages with losses of their own, by heads or synthetic labels.

    Attributes:
        versions: weights of each stage, by version.
        losses: loss of the last stage, at each step.
        norms: gradient norms over all stages.
    """

    def __init__(self, shape, config) -> None:
        self.config = config
        stages = range(config.pp)
        labels = config.synthetic_labels
        self.stages = [
            keep_stage(build_gpt(shape, config.seed), i, config.pp, own_norm=True, own_head=not labels)
            for i in stages
        ]
        self.labels = [synthetic_labels(shape, config.seed, i) for i in stages] if labels else []
        self.optimizers = [make_optimizer(dict(s.named_parameters()), config) for s in self.stages]
        self.versions = [self._copy()]
        self.losses: list[float] = []
        self.norms: list[float] = []

    def _copy(self) -> list[Weights]:
        return [{n: p.detach().clone() for n, p in stage.named_parameters()} for stage in self.stages]

    def step(self, batches: list[torch.Tensor]) -> None:
        """Train on the replicas' batches."""
        t, batch, squares = len(self.versions) - 1, torch.cat(batches), []
        x = batch[:, :-1]
        for stage, optimizer in zip(self.stages, self.optimizers, strict=True):
            hidden = stage.hidden(x)
            if self.labels and stage is not self.stages[-1]:
                norm, wanted = stage.final_norm, self.labels[self.stages.index(stage)][batch[:, 1:]]
                normed = functional.layer_norm(hidden, hidden.shape[-1:], norm.weight, norm.bias)
                loss = (normed - wanted).square().mean()
            else:
                loss = loss_of(stage.logits(hidden), batch[:, 1:])
            loss.backward()
            squares.append(sum(p.grad.square().sum().item() for p in stage.parameters()))
            if math.sqrt(squares[-1]) > self.config.clip:
                for p in stage.parameters():
                    p.grad *= self.config.clip / math.sqrt(squares[-1])
            set_learning_rate(optimizer, learning_rate(self.config, t))
            optimizer.step()
            optimizer.zero_grad()
            x = hidden.detach()
        self.losses.append(loss.item())
        self.norms.append(math.sqrt(sum(squares)))
        self.versions.append(self._copy())

    def weights(self, version: int, pp: int) -> Weights:
        """Return a stage's weights of a version."""
        return self.versions[version][pp]

    def moment(self, name: str, pp: int) -> torch.Tensor:
        """Return the optimizer's mean of the gradients of a stage's parameter."""
        return self.optimizers[pp].state[self.stages[pp].get_parameter(name)][MEAN[self.config.optimizer]]

    def logits(self, version: int, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of the last stage, with a version of all stages' weights."""
        for stage, weights in zip(self.stages, self.versions[version], strict=True):
            x, logits = functional_call(OwnLoss(stage), {f"stage.{n}": w for n, w in weights.items()}, (x,))
        return logits


def stage_of(name: str, layers: int, stages: int) -> int:
    """Return the stage, from 1, of ``stages`` that a parameter of the whole model is in."""
    if name.startswith("embed"):
        return 1
    if name.startswith("blocks."):
        return int(name.split(".")[1]) // (layers // stages) + 1
    return stages


def difference(a: Reference, b: Reference) -> float:
    """Return the largest difference of two references' weights, at the last version that both have."""
    last = min(len(a.versions), len(b.versions)) - 1
    return max((a.versions[last][name] - b.versions[last][name]).abs().max().item() for name in a.parameters)

"""Normalise Adam's gradients tensor by tensor, with steps in proportion to the tensors' norms: LANS.

After Zheng et al. 2020, "Accelerated Large Batch Optimization of BERT Pretraining in 54 minutes" (arXiv 2006.13484),
as its authors have it in MXNet (``mxnet.optimizer.LANS``). For a parameter tensor x with gradient g, at step t from 1::

    g~ = g / ||g||
    m = beta1 m + (1 - beta1) g~;  v = beta2 v + (1 - beta2) g~^2
    d = sqrt(v / (1 - beta2^t)) + 1e-6
    r = m / (1 - beta1^t) / d + decay x;  c = g~ / d + decay x
    x -= lr ||x|| (beta1 r / ||r|| + (1 - beta1) c / ||c||)

The part with c, of this step's gradient alone, looks ahead as Nesterov's momentum does. Where ||x||, ||r|| or ||c|| is
0, the ratio of ||x|| to the other counts as 1, and a gradient of zeros as g~.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_EPSILON = 1e-6

Totals = Callable[[Sequence[nn.Parameter], Tensor], Tensor]
"""Function that turns sums over this process's parts of tensors into those of whole ones: fp64 [sums, parameters]."""


class LANS(torch.optim.Optimizer):
    """LANS optimizer, by the norms of whole tensors even where this process has parts of them.

    The gradient's size does not count: clipping changes nothing.

    Args:
        groups: parameters in groups, each with its ``weight_decay``.
        lr: learning rate: the change of a tensor in a step, as a share of its norm.
        betas: decays of the mean of gradients, and of that of their squares.
        totals: collective function for sums over whole tensors, twice a step; by default this process has whole ones.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        totals: Totals = lambda _, sums: sums,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})
        self._totals = totals

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        groups = {p: group for group in self.param_groups for p in group["params"] if p.grad is not None}
        mine = list(groups)
        (sizes,) = self._norms(mine, [[p.grad for p in mine if p.grad is not None]])
        directions = [
            self._directions(p, size, group) for (p, group), size in zip(groups.items(), sizes, strict=True)
        ]
        means, now = [r for r, _ in directions], [c for _, c in directions]
        norms = self._norms(mine, [mine, means, now])
        for (p, group), r, c, of_x, of_r, of_c in zip(groups.items(), means, now, *norms, strict=True):
            lr, beta1 = group["lr"], group["betas"][0]
            p.add_(r, alpha=-lr * beta1 * _ratio(of_x, of_r))
            p.add_(c, alpha=-lr * (1 - beta1) * _ratio(of_x, of_c))

    def _directions(self, p: nn.Parameter, size: float, group: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Advance the moments by a gradient, whose norm is ``size``; return r and c."""
        assert p.grad is not None
        (beta1, beta2), decay, state = group["betas"], group["weight_decay"], self.state[p]
        if not state:
            state.update(first_moments(p))
        state["step"] += 1
        count, unit = int(state["step"]), p.grad / (size or 1.0)
        mean = state["exp_avg"].mul_(beta1).add_(unit, alpha=1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(unit, unit, value=1 - beta2)
        deviation = (square / (1 - beta2**count)).sqrt_().add_(_EPSILON)
        r = (mean / (1 - beta1**count)).div_(deviation).add_(p, alpha=decay)
        return r, unit.div_(deviation).add_(p, alpha=decay)

    def _norms(self, mine: Sequence[nn.Parameter], rows: Sequence[Sequence[Tensor]]) -> list[list[float]]:
        """Compute the norms of rows of tensors, one for each parameter; collective."""
        sums = torch.zeros(len(rows), len(mine), dtype=torch.float64)
        for i, row in enumerate(rows):
            if row:
                sums[i] = torch.stack(torch._foreach_norm(list(row))).double().square()
        norms: list[list[float]] = self._totals(mine, sums).sqrt().tolist()
        return norms


def first_moments(parameter: Tensor) -> dict[str, Tensor]:
    """Make the moments of a parameter before its first step, as torch's AdamW and LANS name them."""
    moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), dtype=torch.float32), **moments}


def _ratio(of_x: float, of_direction: float) -> float:
    """Return the norm of a step in a direction that is as long as the tensor, over the direction's."""
    return of_x / of_direction if of_x and of_direction else 1.0

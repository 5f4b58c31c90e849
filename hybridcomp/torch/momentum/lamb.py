"""1-bit LAMB: 1-bit Adam with steps in proportion to the parameters' norms.

Li et al., "1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's Convergence Speed",
arXiv:2104.06069. For a parameter x, with m and v as in :mod:`.adam`, and d = sqrt(v) + eps::

    always       u = m / d + decay x;  x = x - lr c u
    warm-up      c = ||x|| / ||u|| within the limits;  a = coeff_beta a + (1 - coeff_beta) c
    after it     g = (m - b1 m_before) / (1 - b1);  w = b2 w + (1 - b2) g g, from v on
                 r = max(d / (sqrt(w) + eps)) within the limits, and near the r before;  c = r a

c is 1 where a norm is 0, which a leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hybridcomp.torch.momentum.adam import OnebitAdam
from hybridcomp.torch.momentum.optimizer import Group, PolicyLike, real

_LIMITS = (("min_coeff", "max_coeff"), ("factor_min", "factor_max"))


class OnebitLamb(OnebitAdam):
    """1-bit LAMB over ``DistributedDataParallel``, registered and stepped as :class:`.OnebitAdam`."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        *,
        freeze_step: int | str = 100_000,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        codec: PolicyLike = "sign",
        warmup: PolicyLike = "int8",
    ) -> None:
        """Check the options; those that are not below are :class:`.OnebitAdam`'s.

        Args:
            params: parameters or groups.
            lr: learning rate: about the change of a parameter in a step, as a share of its norm.
            freeze_step: number of steps of the warm-up, or ``"auto"``.
            bias_correction: whether to correct the means of the first steps.
            betas: shares of the old in each step's momentum and variance.
            eps: number added to the root of the variance.
            weight_decay: decay of the weights, a part of the update whose norm counts.
            max_coeff: most that the ratio of norms may be.
            min_coeff: least that it may be.
            coeff_beta: share of the old in the mean of ratios that is kept after the warm-up; let the warm-up have more
                than 1/(1 - coeff_beta) steps.
            factor_max: most by which that mean is multiplied after the warm-up.
            factor_min: least by which it is.
            factor_threshold: most that this factor changes in a step, as a share of it.
            codec: codec of momenta.
            warmup: codec of the warm-up's gradients, or a policy.

        Raises:
            ValueError: an option is out of its range; says its name, and what is allowed.
            PolicyError: a codec or policy cannot be read.
        """
        self._lamb = {
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
            "coeff_beta": coeff_beta,
            "factor_max": factor_max,
            "factor_min": factor_min,
            "factor_threshold": factor_threshold,
        }
        for least, most in _LIMITS:
            if not 0 < self._lamb[least] <= self._lamb[most] < math.inf:
                raise ValueError(
                    f"{least} must be above 0, and {most} finite and not below it, not {self._lamb[least]!r} and "
                    f"{self._lamb[most]!r}"
                )
        for name in ("coeff_beta", "factor_threshold"):
            if not 0 <= self._lamb[name] < 1:
                raise ValueError(f"{name} must be a number from 0 to below 1, not {self._lamb[name]!r}")
        super().__init__(
            params,
            lr,
            freeze_step=freeze_step,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            decoupled_weight_decay=True,
            codec=codec,
            warmup=warmup,
        )

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), **self._lamb}

    def _follow(self, group: Group, state: dict[str, Any], momentum: torch.Tensor) -> None:
        """Keep a variance of the gradients that momenta tell."""
        beta1, beta2 = group["betas"]
        if "exp_avg_sq_fresh" not in state:
            state["exp_avg_sq_fresh"] = state["exp_avg_sq"].clone()
        gradient = (momentum - beta1 * real(state["exp_avg"])).div_(1 - beta1)
        real(state["exp_avg_sq_fresh"]).mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

    def _move(self, moving: Sequence[tuple[Group, torch.Tensor]]) -> None:
        if self.frozen:
            for group, parameter in moving:
                state = self.state[parameter]
                self._update(group, parameter, self._factor(group, state) * state.get("coeff", 0.0))
            return
        norms: list[float] = []
        for group, parameter in moving:
            update = self._direction(group, parameter)
            norms += [float(part.double().norm()) for part in (real(parameter), update)]
        agreed = self._from_rank_0(norms)
        for (group, parameter), weight, update_norm in zip(moving, agreed[::2], agreed[1::2], strict=True):
            ratio = 1.0
            if weight > 0 and update_norm > 0:
                ratio = min(max(weight / update_norm, self._lamb["min_coeff"]), self._lamb["max_coeff"])
                state, beta = self.state[parameter], self._lamb["coeff_beta"]
                state["coeff"] = beta * state.get("coeff", 0.0) + (1 - beta) * ratio
            self._update(group, parameter, ratio)

    def _direction(self, group: Group, parameter: torch.Tensor) -> torch.Tensor:
        """Return the update of a parameter before it is scaled."""
        state = self.state[parameter]
        first, deviation = self._corrected(group, state)
        update = torch.div(real(state["exp_avg"]), deviation).div_(first)
        return update.add_(real(parameter), alpha=group["weight_decay"]) if group["weight_decay"] else update

    def _update(self, group: Group, parameter: torch.Tensor, scale: float) -> None:
        real(parameter).add_(self._direction(group, parameter), alpha=-float(group["lr"]) * scale)

    def _factor(self, group: Group, state: dict[str, Any]) -> float:
        """Return the factor of a parameter's kept ratio, by how much its variance has changed since."""
        taken, fresh = int(state["step"]), real(state["exp_avg_sq_fresh"])
        own = 1 - group["betas"][1] ** taken if group["bias_correction"] else 1.0
        _, deviation = self._corrected(group, state)
        now = fresh.sqrt().div_(math.sqrt(own)).add_(group["eps"])
        largest = float(deviation.div_(now).max()) if now.numel() else 1.0  # exact in any order
        last, near = float(state.get("factor", 1.0)), self._lamb["factor_threshold"]
        factor = min(max(largest, self._lamb["factor_min"]), self._lamb["factor_max"])
        state["factor"] = min(max(factor, last * (1 - near)), last * (1 + near))
        return float(state["factor"])

"""0/1 Adam's variance: renewed by mean gradients at steps that grow apart, with momenta exchanged between them.

Lu et al., "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam", arXiv:2202.06009. ::

    step k_j     g = mean of g_r;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g g
    all others   m = mean of C(b1 m + (1 - b1) g_r), with error feedback there and back;  v stays
    always       x = x - lr m / (sqrt(v) + eps)

where k_(j+1) = k_j + 2^floor(j / var_update_scaler). After step ``var_freeze_step`` the variance stays, and momenta
are exchanged at steps that grow apart, too: the next one comes after H steps, where H is 1 first, doubles every
``local_step_scaler`` steps, and is at most ``local_step_clipper``. Between two exchanges rank r steps by itself, from
the parameters x' of the last one::

    H - 1 steps  m_r = b1 m_r + (1 - b1) g_r;  u_r = u_r + lr m_r;  w = w + lr
                 x_r = x_r - lr m_r / (sqrt(v) + eps)
    exchange     m_r, u_r, w as before;  m = mean of C(u_r / w);  x = x' - w m / (sqrt(v) + eps);  u_r = w = 0

With decoupled decay d, x', u_r, w and x_r are multiplied by 1 - lr d in each of these steps; lr stands for
lr / (1 - b1^t) where means are corrected. All ranks have the same bits after each exchange. C takes u_r / w, a mean of
momenta, so that what error feedback keeps is of one size whatever H and lr are.

Elements whose gradients travel apart stay between two exchanges, and then step as Adam's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from hybridcomp.torch.hook.averager import Blend
from hybridcomp.torch.momentum.exchange import Apart, MomentumExchange
from hybridcomp.torch.momentum.optimizer import AdamFamily, Group, PolicyLike, coupled, real

_MOST_DOUBLINGS = 30
_LEAST = {
    "var_freeze_step": 1,
    "var_update_scaler": 1,
    "local_step_scaler": 1,
    "local_step_clipper": 1,
    "warmup_steps": 0,
}


class ZeroOneAdam(AdamFamily):
    """0/1 Adam over ``DistributedDataParallel``, registered and stepped as :class:`.OnebitAdam`."""

    counted = frozenset({"steps", "next_renewal", "renewals", "next_exchange"})

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        *,
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32_678,
        local_step_clipper: int = 16,
        warmup_steps: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        codec: PolicyLike = "sign",
        warmup: PolicyLike = "int8",
    ) -> None:
        """Check the options.

        Args:
            params: parameters or groups.
            lr: learning rate.
            var_freeze_step: last step that may renew the variance; after it ranks may step by themselves.
            var_update_scaler: number of renewals after which the steps between them double.
            local_step_scaler: number of steps, from ``var_freeze_step`` on, after which those from one exchange to the
                next double.
            local_step_clipper: most of these; 1 exchanges at every step.
            warmup_steps: number of first steps that all renew the variance; those of the rule come after them.
            bias_correction: whether to correct the means of the first steps.
            betas: shares of the old in each step's momentum, and in each renewal's variance.
            eps: number added to the root of the variance.
            weight_decay: decay of the weights: of the gradient as in Adam,
            decoupled_weight_decay: or, if this is true, of the weights themselves as in AdamW.
            codec: codec of momenta, as of :class:`.OnebitAdam`.
            warmup: codec of the gradients of renewals, or a policy.

        Raises:
            ValueError: an option is out of its range; says its name, and what is allowed.
            PolicyError: a codec or policy cannot be read.
        """
        self._rule = {
            "var_freeze_step": var_freeze_step,
            "var_update_scaler": var_update_scaler,
            "local_step_scaler": local_step_scaler,
            "local_step_clipper": local_step_clipper,
            "warmup_steps": warmup_steps,
        }
        for name, value in self._rule.items():
            if type(value) is not int or value < _LEAST[name]:
                raise ValueError(f"{name} must be a whole number from {_LEAST[name]}, not {value!r}")
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "bias_correction": bias_correction,
            "next_renewal": 1,
            "renewals": 0,
            "next_exchange": 1,
        }
        super().__init__(params, defaults, codec=codec, warmup=warmup)
        self._ran.why = f", by warmup_steps {warmup_steps} and var_update_scaler {var_update_scaler}"

    @property
    def exchanges_momentum(self) -> bool:
        """Tell whether the next step takes momenta, not gradients."""
        step, due = self.steps + 1, int(self.param_groups[0]["next_renewal"])
        return step != due or step > self._rule["var_freeze_step"]

    @property
    def steps_alone(self) -> bool:
        """Tell whether the next step takes this rank's own gradients, and nothing is exchanged."""
        return self.steps + 1 < int(self.param_groups[0]["next_exchange"])

    @property
    def synchronized(self) -> bool:
        """Tell whether all ranks have the same parameters: none has stepped by itself since the last exchange."""
        return all("local_from" not in state for state in self.state.values())

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), **self._rule}

    def _stepped(self) -> None:
        step = self.steps
        self._decide_renewal(step)
        if step >= self.param_groups[0]["next_exchange"]:
            doublings = max(0, step - self._rule["var_freeze_step"]) // self._rule["local_step_scaler"]
            apart = min(2 ** min(doublings, _MOST_DOUBLINGS), self._rule["local_step_clipper"])
            for group in self.param_groups:
                group["next_exchange"] = step + (apart if step >= self._rule["var_freeze_step"] else 1)

    def _decide_renewal(self, step: int) -> None:
        due = self.param_groups[0]
        if step != due["next_renewal"] or step > self._rule["var_freeze_step"]:
            return
        counted = int(due["renewals"]) + (step > self._rule["warmup_steps"])
        doublings = max(0, counted - 1) // self._rule["var_update_scaler"]
        for group in self.param_groups:
            group["renewals"], group["next_renewal"] = counted, step + 2**doublings
        if self.exchanges_momentum:
            self._keep_renewing()

    # -- steps without exchange ----------------------------------------------------------------------

    @torch.no_grad()
    def localize(
        self,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        scale: float,
        blended: Collection[torch.Tensor],
    ) -> tuple[list[Apart], dict[torch.Tensor, Blend]]:
        """Turn gradients into what is exchanged: the mean of the local momenta since the last exchange."""
        if self.synchronized:
            return super().localize(parameters, gradients, scale, blended)
        apart, left = super().localize(parameters, gradients, scale, ())
        for parameter, values in zip(parameters, gradients, strict=True):
            state = self.state[parameter]
            keep, share = _shares(self._group_of(parameter), int(state["step"]) + 1)
            weight = keep * state.get("local_weight", 0.0) + share
            if "local_sum" in state and weight > 0:
                values.mul_(share).add_(real(state["local_sum"]), alpha=keep).div_(weight)
        return apart, left

    def _advance(self, exchange: MomentumExchange, taken: str) -> None:
        if taken != "alone":
            super()._advance(exchange, taken)
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    self._step_alone(group, parameter)

    def _step_alone(self, group: Group, parameter: torch.Tensor) -> None:
        """Move a parameter by this rank's own momentum; one without a gradient as by a gradient of zero."""
        state, beta = self.state_of(parameter), group["betas"][0]
        if "local_from" not in state:
            state["local_from"] = parameter.clone(memory_format=torch.preserve_format)
            state["local_sum"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["local_weight"], state["local_decay"] = 0.0, 1.0
        state["step"] += 1
        keep, share = _shares(group, int(state["step"]))
        values, momentum, renews = real(parameter), real(state["exp_avg"]), state.get("renews")
        stay = None if renews is None else (values[renews], momentum[renews])
        momentum.mul_(beta)
        if parameter.grad is not None:
            momentum.add_(real(parameter.grad), alpha=1 - beta)
        if coupled(group):
            momentum.add_(values, alpha=(1 - beta) * group["weight_decay"])
        _, deviation = self._corrected(group, state)
        values.mul_(keep).addcdiv_(momentum, deviation, value=-share)
        total = real(state["local_sum"]).mul_(keep).add_(momentum, alpha=share)
        if stay is not None:
            values[renews], momentum[renews] = stay
            total[renews] = 0
        state["local_weight"] = keep * state["local_weight"] + share
        state["local_decay"] *= keep

    def _move(self, moving: Sequence[tuple[Group, torch.Tensor]]) -> None:
        together: list[tuple[Group, torch.Tensor]] = []
        for group, parameter in moving:
            state = self.state[parameter]
            start = state.pop("local_from", None)
            if start is None:
                together.append((group, parameter))
                continue
            del state["local_sum"]
            keep, share = _shares(group, int(state["step"]))
            weight = keep * state.pop("local_weight") + share
            values, renews = real(parameter), state.get("renews")
            _, deviation = self._corrected(group, state)
            update = torch.div(real(state["exp_avg"]), deviation)
            values.copy_(real(start)).mul_(keep * state.pop("local_decay"))
            ends = None if renews is None else values[renews] - update[renews] * share
            values.sub_(update, alpha=weight)
            if ends is not None:
                values[renews] = ends
        super()._move(together)


def _shares(group: Group, step: int) -> tuple[float, float]:
    """Return what a step leaves of the parameters, and the share of its momentum: the rate, corrected."""
    rate = float(group["lr"])
    decays = group["weight_decay"] if group["decoupled_weight_decay"] else 0.0
    return 1 - rate * decays, rate / (1 - group["betas"][0] ** step if group["bias_correction"] else 1.0)

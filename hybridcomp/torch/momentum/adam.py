"""1-bit Adam: Adam whose variance stays after a warm-up, from which on the ranks exchange their momentum.

Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed",
arXiv:2102.02888. ::

    warm-up   g = mean of g_r;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g g
    after it  m = mean of C(b1 m + (1 - b1) g_r), with error feedback there and back;  v stays
    always    x = x - lr m / (sqrt(v) + eps)

The means of m and v at their beginning are corrected as Adam does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from hybridcomp.torch.momentum.optimizer import AdamFamily, PolicyLike, real

AUTO = "auto"
_SETTLED = 0.96  # of the variance's norm, over 1/(1 - beta2) steps
_LEAST_STEPS = 1


class OnebitAdam(AdamFamily):
    """1-bit Adam over ``DistributedDataParallel``: :meth:`register` it with the module.

    .. code-block:: python

        ddp = DistributedDataParallel(model)
        optimizer = hct.OnebitAdam(ddp.parameters(), lr=1e-3, freeze_step=1000)
        optimizer.register(ddp)

    All ranks have the same bits after every step. After the freeze ``p.grad`` holds the new momentum once a backward
    pass is over, so ``clip_grad_norm_`` clips that.
    """

    counted = frozenset({"steps", "frozen", "variance_norms"})

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
        decoupled_weight_decay: bool = False,
        codec: PolicyLike = "sign",
        warmup: PolicyLike = "int8",
    ) -> None:
        """Check the options.

        Args:
            params: parameters or groups.
            lr: learning rate.
            freeze_step: number of steps of the warm-up; ``"auto"`` ends it when the variance has settled: the sum of
                all its elements is within 4 % of what it was 1/(1 - beta2) steps before. The learning rate's own
                warm-up should be over by then.
            bias_correction: whether to correct the means of the first steps.
            betas: shares of the old in each step's momentum and variance.
            eps: number added to the root of the variance.
            weight_decay: decay of the weights: of the gradient as in Adam,
            decoupled_weight_decay: or, if this is true, of the weights themselves as in AdamW.
            codec: codec of momenta, with error feedback, or a policy; ``"sign"`` has one scale for a parameter, or for
                each 65,536 of its values.
            warmup: codec of the warm-up's gradients, or a policy.

        Raises:
            ValueError: an option is out of its range; says its name, and what is allowed.
            PolicyError: a codec or policy cannot be read.
        """
        if freeze_step != AUTO and (type(freeze_step) is not int or freeze_step < _LEAST_STEPS):
            raise ValueError(
                f"freeze_step must be a whole number from {_LEAST_STEPS}, or {AUTO!r}, not {freeze_step!r}"
            )
        self._freeze_step = freeze_step
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "bias_correction": bias_correction,
            "frozen": False,
            "variance_norms": [],
        }
        super().__init__(params, defaults, codec=codec, warmup=warmup)
        self._ran.why = f", since freeze_step is {freeze_step}"

    @property
    def frozen(self) -> bool:
        """Tell whether the warm-up is over: the variance stays, and momenta are exchanged."""
        return bool(self.param_groups[0]["frozen"])

    @property
    def exchanges_momentum(self) -> bool:
        """Tell whether the next step takes momenta, not gradients."""
        return self.frozen

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "freeze_step": self._freeze_step}

    def _stepped(self) -> None:
        if self.frozen:
            return
        if self._has_settled() if self._freeze_step == AUTO else self.steps >= int(self._freeze_step):
            self._keep_renewing()
            for group in self.param_groups:
                group["frozen"], group["variance_norms"] = True, []

    def _has_settled(self) -> bool:
        """Tell whether the variance has settled; collective."""
        total = 0.0
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state.get(parameter)
                if state:
                    sum_ = float(real(state["exp_avg_sq"]).sum(dtype=torch.float64))
                    total += sum_ / (1 - group["betas"][1] ** int(state["renewals"]))
        (norm,) = self._from_rank_0([total])
        group = self.param_groups[0]
        norms = [*group["variance_norms"], norm]
        apart = math.ceil(1 / (1 - group["betas"][1]) - 1e-9)
        group["variance_norms"] = norms[-apart:]
        least, most = sorted((norms[0], norm))
        return bool(len(norms) > apart and least > 0 and least / most >= _SETTLED)

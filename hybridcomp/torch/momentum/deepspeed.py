"""Make the optimizer that a DeepSpeed configuration names: ``OneBitAdam``, ``ZeroOneAdam`` or ``OneBitLamb``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hybridcomp.torch.momentum.adam import OnebitAdam
from hybridcomp.torch.momentum.lamb import OnebitLamb
from hybridcomp.torch.momentum.optimizer import MomentumOptimizer
from hybridcomp.torch.momentum.zero_one import ZeroOneAdam

_COMMON = ("lr", "betas", "eps", "weight_decay")
_RATIOS = ("max_coeff", "min_coeff", "coeff_beta", "factor_max", "factor_min", "factor_threshold")
_PERIODS = ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")
# DeepSpeed's optimizers: what they are here, the parameters that are taken as they are, and what is always so there.
_KINDS: dict[str, tuple[type[MomentumOptimizer], tuple[str, ...], dict[str, Any]]] = {
    "OneBitAdam": (OnebitAdam, ("freeze_step",), {"decoupled_weight_decay": True}),
    "ZeroOneAdam": (ZeroOneAdam, _PERIODS, {"decoupled_weight_decay": True}),
    "OneBitLamb": (OnebitLamb, ("freeze_step", *_RATIOS), {}),
}
_BY_NAME = {name.lower(): name for name in _KINDS}  # DeepSpeed does not look at their case either
_WITHOUT_EFFECT = ("bias_correction", "cuda_aware", "comm_backend_name", "torch_adam")
_REFUSED = ("amsgrad", "eps_inside_sqrt", "max_grad_norm")


def deepspeed_optimizer(
    config: Mapping[str, Any], params: Iterable[Any], **options: Any
) -> OnebitAdam | OnebitLamb | ZeroOneAdam:
    """Make the optimizer of a DeepSpeed configuration; :meth:`.OnebitAdam.register` it with the DDP module.

    As there, weights decay apart from gradients, and the means of the first steps are not corrected, whatever
    ``bias_correction`` says; ``bias_correction=True`` among the options does.

    Args:
        config: configuration, as read from its JSON, or its ``"optimizer"`` section alone.
        params: parameters or groups.
        **options: further options of the optimizer here, such as ``codec``, which come before the configuration's.

    Raises:
        ValueError: the configuration names another optimizer, or a parameter that it does not have here; says its
            name, and what is allowed.
    """
    section = config.get("optimizer", config)
    given = section.get("type") if isinstance(section, Mapping) else None
    name = _BY_NAME.get(str(given).lower())
    if name is None:
        raise ValueError(f"type must be one of {', '.join(_KINDS)}, not {given!r}")
    kind, own, always = _KINDS[name]
    chosen: dict[str, Any] = {"bias_correction": False, **always}
    for key, value in section.get("params", {}).items():
        if key in _REFUSED and value:
            raise ValueError(f"{key} is {value!r}: {kind.__name__} does not have it; leave it out")
        if key in _WITHOUT_EFFECT or key in _REFUSED:
            continue
        if key not in (*_COMMON, *own):
            raise ValueError(f"params of {name} must be among {', '.join((*_COMMON, *own))}, not {key!r}")
        if value == "auto" and key != "freeze_step":
            raise ValueError(f"{key} is 'auto', for which transformers fills in a number: give one")
        chosen[key] = tuple(value) if key == "betas" else value
    made: Any = kind(params, **(chosen | options))
    return made  # type: ignore[no-any-return]


__all__ = ["deepspeed_optimizer"]

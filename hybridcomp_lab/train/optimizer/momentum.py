"""Make the optimizers whose replicas exchange momenta, and keep their state in checkpoints.

They are those of :mod:`hybridcomp.torch.momentum`, which step by what the hook of DDP has exchanged. Their state grows
as they step: which elements go on by gradients is known when a warm-up ends. So a checkpoint has what there is, by
name, and the counters of the parameters' groups as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hybridcomp.torch as hct
from hybridcomp.errors import ConfigError
from hybridcomp.policy import Policy
from hybridcomp.policy.message import MOMENTUM
from hybridcomp.torch.momentum.adam import AUTO
from hybridcomp.torch.momentum.optimizer import MomentumOptimizer, policy_of_momenta
from hybridcomp_lab.train.config import TrainConfig
from hybridcomp_lab.train.parallel.stages import Stage


def section_of_momenta(policy: Policy) -> tuple[Policy, str]:
    """Return the policy of momenta, and its section: ``policy`` has a section for them, or they go by signs."""
    if MOMENTUM in policy.axes:
        return policy_of_momenta(policy), MOMENTUM
    return policy_of_momenta("sign"), "dp"


def exchanging_optimizer(
    groups: Sequence[dict[str, Any]], config: TrainConfig, policy: Policy, stage: Stage
) -> MomentumOptimizer:
    """Make the optimizer of a stage's parameters, and have the stage's hook call it; collective over its replicas.

    Args:
        groups: parameters in groups.
        config: configuration that names it.
        policy: policy of its warm-up's gradients, and of momenta where it has a section for them; else they go by
            signs.
        stage: stage, in DDP.
    """
    given: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "codec": section_of_momenta(policy)[0],
        "warmup": policy,
    }
    freeze: int | str = config.freeze_step or AUTO
    optimizer: MomentumOptimizer
    match config.optimizer:
        case "onebit-lamb":
            optimizer = hct.OnebitLamb(groups, freeze_step=freeze, **given)
        case "onebit-adam":
            optimizer = hct.OnebitAdam(groups, freeze_step=freeze, decoupled_weight_decay=True, **given)
        case _:
            # Without local steps: replicas whose weights differ could not be evaluated, or saved, as one.
            optimizer = hct.ZeroOneAdam(
                groups,
                warmup_steps=config.freeze_step or config.warmup_steps,
                var_update_scaler=config.var_update_scaler,
                local_step_clipper=1,
                decoupled_weight_decay=True,
                **given,
            )
    assert isinstance(stage.module, DistributedDataParallel)
    assert stage.hook is not None
    stage.hook.call(optimizer.attach(stage.module, stage=stage.index))
    return optimizer


def own_state(optimizer: MomentumOptimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return all that the optimizer keeps of a parameter, by name; numbers as fp64 []."""
    return {
        name: value if torch.is_tensor(value) else torch.tensor(value, dtype=torch.float64)
        for name, value in optimizer.state_of(parameter).items()
    }


def take_state(optimizer: MomentumOptimizer, parameter: nn.Parameter, name: str, value: Tensor) -> None:
    """Take a part of a parameter's state that :func:`own_state` of another run had."""
    number = value.dtype == torch.float64 and not value.dim()
    optimizer.state_of(parameter)[name] = value.item() if number else value


def counters(optimizer: MomentumOptimizer) -> Tensor:
    """Return the values of the groups that change as the optimizer steps, as bytes."""
    found = [
        {key: value for key, value in group.items() if key in optimizer.counted}
        for group in optimizer.param_groups
    ]
    return torch.from_numpy(np.frombuffer(json.dumps(found).encode(), np.uint8).copy())


def load_counters(optimizer: MomentumOptimizer, stored: Tensor) -> None:
    """Load what :func:`counters` returned.

    Raises:
        ConfigError: it is something else.
    """
    try:
        found = json.loads(stored.numpy().tobytes())
        for group, values in zip(optimizer.param_groups, found, strict=True):
            for key in optimizer.counted & group.keys():
                if not isinstance(values[key], type(group[key])):
                    raise TypeError(f"{key} is {values[key]!r}")
                group[key] = values[key]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"the checkpoint has no counters of {type(optimizer).__name__}: {error}") from error

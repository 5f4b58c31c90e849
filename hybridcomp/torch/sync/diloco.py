"""DiLoCo and streaming DiLoCo: an outer optimizer on the changes that replicas have made apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from hybridcomp.torch.backend.options import PolicyLike
from hybridcomp.torch.sync.semi_sync import SemiSync
from hybridcomp.torch.sync.synchronizer import MakeOuter, Order

OUTER_LR = 0.7
OUTER_MOMENTUM = 0.9


class DiLoCo(SemiSync):
    """A context manager that applies an outer optimizer to the changes that replicas have made apart.

    DiLoCo of Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (arXiv 2311.08105),
    and with ``fragments`` and ``fragment_sync_delay`` their streaming DiLoCo (arXiv 2501.18512), as
    ``torchft.local_sgd.DiLoCo`` has them. After every ``every`` steps of the inner optimizer:

    1.  Each replica takes the difference between the global parameters, which all have, and its own.
    2.  The differences are averaged over the replicas, compressed: the outer gradient.
    3.  The outer optimizer updates the global parameters by it: all replicas get the same bits.
    4.  Each replica goes on from there, or from a mixture with its own parameters.

    States of inner optimizers, and buffers, stay with their replica. Beside the model it takes memory for the global
    parameters, their differences, and the outer optimizer's momentum, in float32 (float64 for float64 parameters).

    .. code-block:: python

        with hct.DiLoCo(model, inner, every=100, fragments=4, fragment_sync_delay=5):
            for x, y in batches:
                inner.zero_grad()
                loss(model(x), y).backward()    # no DDP
                inner.step()
    """

    def __init__(
        self,
        model: nn.Module,
        inner: Optimizer,
        outer: Optimizer | None = None,
        *,
        every: int,
        fragments: int | Sequence[nn.Module] = 1,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        fragment_sync_order: Order = "torchft",
        policy: PolicyLike | None = None,
        process_group: Any = None,
        axis: str = "dp",
        init_sync: bool = True,
    ) -> None:
        """Copy the model's parameters.

        Args:
            model: as for :class:`.LocalSGD`.
            inner: optimizer whose steps are counted; torchft's ``inner_optimizer``. Where several optimizers train the
                model, the one that steps last.
            outer: any optimizer that was made for all of the model's parameters that require gradients, and has taken
                no step: it gets the global ones in their place. torchft's ``outer_optimizer``; None is the paper's, SGD
                with a learning rate of 0.7 and a Nesterov momentum of 0.9.
            every: inner steps from one outer step of a parameter to its next; torchft's ``sync_every``.
            fragments: number of parts of about equal size that the model is cut into, whose outer steps take turns; or
                the modules that are the parts, torchft's ``model_fragments``.
            fragment_sync_delay: inner steps that go on while a part's differences are averaged: it is updated so many
                steps after they were taken. Below ``every`` divided by the number of fragments, or below ``every`` in
                the order ``"paper"``.
            fragment_update_alpha: the share of its own parameters that a replica keeps in an update; 0: none, so that
                all have the same bits after it. Between them, and whatever it is, the global parameters are the same.
            fragment_sync_order: ``"torchft"``: a part is updated after ``every`` steps, by differences that were taken
                ``fragment_sync_delay`` steps before, and what is under way at the context's end waits for a context
                that is entered again; call :meth:`average` for one model. ``"paper"``: its differences are taken after
                ``every`` steps, and it is updated ``fragment_sync_delay`` steps later, or at the context's end
                (algorithm 2 of arXiv 2501.18512). Without a delay they are the same.
            policy, process_group, axis, init_sync: as for :class:`.LocalSGD`. A policy's ``warmup_steps`` are a part's
                outer steps.

        Raises:
            ValueError: a number is out of its range, or fragments or the outer optimizer do not fit the model.
            PolicyError: the policy cannot be read, or has feedback with momentum.
        """
        if outer is inner:
            raise ValueError("outer must be another optimizer than inner")
        super().__init__(
            model,
            inner,
            nesterov if outer is None else _rebound(outer, model),
            every=every,
            fragments=fragments,
            delay=fragment_sync_delay,
            alpha=fragment_update_alpha,
            order=fragment_sync_order,
            policy=policy,
            process_group=process_group,
            axis=axis,
            init_sync=init_sync,
        )


def nesterov(
    parameters: Mapping[str, nn.Parameter], lr: float = OUTER_LR, momentum: float = OUTER_MOMENTUM
) -> torch.optim.SGD:
    """Make the outer optimizer of arXiv 2311.08105: SGD with Nesterov momentum; without where that is 0."""
    return torch.optim.SGD(parameters.values(), lr=lr, momentum=momentum, nesterov=momentum > 0)


def _rebound(outer: Optimizer, model: nn.Module) -> MakeOuter:
    """Return a function that gives an optimizer of the model's parameters the global ones in their place."""

    def make(parameters: Mapping[str, nn.Parameter]) -> Optimizer:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        given = [names.get(id(p)) for group in outer.param_groups for p in group["params"]]
        if outer.state:
            raise ValueError("outer has taken steps: make it anew, and load its state with this object's")
        if set(given) != set(parameters):
            left = [name for name in parameters if name not in given]
            what = f"lacks {left[0]}" if left else "has others, too"
            raise ValueError(
                f"outer must be made for the model's parameters that require gradients: it {what}"
            )
        for group in outer.param_groups:
            group["params"] = [parameters[names[id(p)]] for p in group["params"]]
        return outer

    return make

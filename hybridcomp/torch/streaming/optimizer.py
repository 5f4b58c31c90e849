"""Step streamed weights as SGD would, by the factors of their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from hybridcomp.torch.registry import registry
from hybridcomp.torch.streaming.factors import Factors

_BASES = ("left", "right")


class Streamed(Protocol):
    """Layers whose weights are stepped: see :class:`.StreamedLayers`.

    Attributes:
        weights: the weights, by name.
    """

    weights: dict[str, torch.Tensor]

    def factors_of(self, weight: torch.Tensor) -> Factors:
        """Return a weight's factors."""

    def average(self) -> None:
        """Average the factors of gradients over the ranks."""

    def squares(self) -> Any:
        """Return the sums of squares by which gradients that are not finite are known."""

    def zero(self) -> None:
        """Drop accumulated factors."""


class StreamedSGD(torch.optim.Optimizer):
    """SGD on streamed weights: W -= lr (H + weight_decay W), H as in :mod:`hybridcomp.torch.streaming.factors`.

    It is an optimizer of torch's, which learning-rate schedulers take. Its state is the bases, with which training goes
    on with the same bits. There is no momentum, whose buffer would be of the weight's size: H changes its bases in each
    step. A weight without a gradient in a step stays as it is; one whose gradient is not finite ceases to be, on all
    ranks, and keeps its bases.
    """

    def __init__(
        self, streamed: Streamed, *, lr: float, weight_decay: float = 0.0, has_others: bool = True
    ) -> None:
        """Take the weights; :meth:`.StreamedLayers.optimizer` calls this.

        Args:
            streamed: the layers.
            lr: learning rate.
            weight_decay: L2 penalty, as SGD's.
            has_others: whether another optimizer steps, too, whose steps are the training's.

        Raises:
            ValueError: a number is negative or not finite.
        """
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and not negative, as {value} is not")
        super().__init__(list(streamed.weights.values()), {"lr": lr, "weight_decay": weight_decay})
        self._streamed = streamed
        if has_others:
            registry.ignore_steps_of(self)
        self._show_bases()

    def _show_bases(self) -> None:
        """Have the bases themselves in the optimizer's state."""
        for weight in self._streamed.weights.values():
            factors = self._streamed.factors_of(weight)
            self.state[weight] = {"left": factors.left, "right": factors.right}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Average the factors over the ranks, update the weights, and take the next bases. Collective.

        Accumulated factors are dropped.

        Args:
            closure: function that computes the loss again, and returns it.

        Raises:
            HybridcompError: see :meth:`.StreamedLayers.average`; weights are as they were.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._streamed.average()
        squares = self._streamed.squares()
        for group in self.param_groups:
            for weight in group["params"]:
                if squares[weight] == 0:
                    continue
                factors = self._streamed.factors_of(weight)
                factors.apply(group["lr"], group["lr"] * group["weight_decay"])
                if squares[weight] < torch.inf:
                    factors.advance()
        self._streamed.zero()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the factors that backward passes have accumulated since the last step."""
        super().zero_grad(set_to_none)
        self._streamed.zero()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state that ``state_dict`` returned, bases exactly as they were, whatever type the weights have.

        Raises:
            ValueError: the state is of other weights, or of another rank.
        """
        weights = self._streamed.weights
        saved = state_dict["state"]
        for number, (name, weight) in enumerate(weights.items()):
            factors = self._streamed.factors_of(weight)
            for side, mine in zip(_BASES, (factors.left, factors.right), strict=True):
                there = saved[number][side].shape if number in saved else None
                if there != mine.shape:
                    has = "none" if there is None else list(there)
                    raise ValueError(
                        f"of {name} the saved state has a basis {has}, and this has {list(mine.shape)}: the layers and "
                        "rank must be as they were"
                    )
        super().load_state_dict(dict(state_dict))
        for number, weight in enumerate(weights.values()):
            factors = self._streamed.factors_of(weight)
            for side, mine in zip(_BASES, (factors.left, factors.right), strict=True):
                mine.copy_(saved[number][side])
        self._show_bases()
        self._streamed.zero()

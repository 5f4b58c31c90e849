"""Define the linear layer whose backward pass streams the gradient of its weight instead of forming it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hybridcomp.torch.streaming.factors import Factors


class StreamedLinear(nn.Linear):
    """A linear layer whose weight gets no gradient: its backward pass adds to the weight's factors.

    A layer becomes one by :meth:`take`; parameters, buffers, hooks and names stay. The gradients of inputs and bias are
    those of ``nn.Linear``.
    """

    factors: Factors

    @classmethod
    def take(cls, layer: nn.Linear, factors: Factors) -> None:
        """Make a layer, of type ``nn.Linear``, one that streams; its weight no longer requires a gradient."""
        layer.__class__ = cls
        layer.factors = factors  # type: ignore[assignment]  # of the class that it has now
        layer.weight.requires_grad_(False)

    def forward(self, input: Tensor) -> Tensor:
        """Compute the layer for ``input`` [..., n]: [..., m]; by autocast, too."""
        if not torch.is_grad_enabled():
            return super().forward(input)
        values = [input, self.weight, *([] if self.bias is None else [self.bias])]
        if torch.is_autocast_enabled(input.device.type):
            dtype = torch.get_autocast_dtype(input.device.type)
            # As autocast does, which spares float64.
            values = [v if v.dtype is torch.float64 else v.to(dtype) for v in values]
        x, weight, *bias = values
        # Backward comes only where something requires a gradient: neither data nor a frozen weight does.
        alone = not any(v.requires_grad for v in values)
        anchor = torch.empty(0, requires_grad=True) if alone else None
        # Reshaped out here: a function's result must be no view, to be changed in place.
        rows = x.reshape(-1, self.in_features)
        output: Tensor = _Streamed.apply(self.factors, anchor, rows, weight, *bias)
        return output.view(*x.shape[:-1], self.out_features)


class _Streamed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        factors: Factors,
        anchor: Tensor | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
    ) -> Tensor:
        ctx.factors = factors
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.factors.accumulate(x, gradient)
        of_x, of_bias = (len(ctx.needs_input_grad) > i and ctx.needs_input_grad[i] for i in (2, 4))
        found = None, None, gradient @ weight if of_x else None, None, gradient.sum(0) if of_bias else None
        return found[: len(ctx.needs_input_grad)]

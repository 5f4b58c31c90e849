"""Keep the most relevant values of the residual stream, and make gradients of those alone.

Gupta et al., "Training Recommender Models at Scale: Communication-Efficient Model and Data Parallelism" (KDD 2021,
arXiv:2010.08899), applied to the activations that a pipeline's stages send: values of at least a magnitude tau go on,
the others are zero. The backward pass uses the values that went on, so the gradient has zeros in the same places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, threshold: float) -> Tensor:
        # Zero the values below the threshold, not all but those that reach it: NaN is not below it, and goes on.
        kept = x.masked_fill(x.abs() < threshold, 0) if threshold else x.view_as(x)
        ctx.save_for_backward(kept)
        return kept

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        return gradients[0].masked_fill(kept == 0, 0), None


def largest(x: Tensor, threshold: float) -> Tensor:
    """Keep the values of at least a magnitude, and NaN; the others become zero.

    The gradient is zero wherever the result is, and passes as it is elsewhere.

    Args:
        x: tensor of any shape, in a floating dtype.
        threshold: least magnitude; 0 keeps all.
    """
    return _Kept.apply(x, threshold)  # type: ignore[no-any-return]


def received(x: Tensor) -> Tensor:
    """Return ``x``, the largest values that another stage has computed; the gradient is of those alone."""
    return largest(x, 0.0)


class Neurons(nn.Module):
    """Selection of the residual stream's largest values after a block.

    Attributes:
        share: share of the values that is to go on.
        threshold: fp64 [1], least magnitude that goes on; 0 before one is known: everything does.
        age: int64 [1], number of steps since the threshold was found.
        watch: function called with the input and the output of a training forward pass; None: the threshold stays.
    """

    threshold: Tensor
    age: Tensor

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.register_buffer("threshold", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("age", torch.zeros(1, dtype=torch.int64))
        self.watch: Callable[[Tensor, Tensor], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [batch, time, d_model] to the same shape."""
        kept = largest(x, self.threshold.item())
        if self.watch is not None and torch.is_grad_enabled():
            self.watch(x.detach(), kept.detach())
        return kept

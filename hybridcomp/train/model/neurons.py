"""Keep the most relevant values of the residual stream, and make gradients of those alone.

Gupta et al., "Training Recommender Models at Scale: Communication-Efficient Model and Data Parallelism" (KDD 2021,
arXiv:2010.08899), for the activations that a pipeline's stages send: those of at least a magnitude tau go on, and the
others are zero. The backward pass is of the values that went on, so the gradient has zeros in the same places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, threshold: float) -> Tensor:
        # Not those of at least the threshold: NaN is not below it, and goes on.
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
        x: of any shape, in a floating type.
        threshold: the magnitude; 0 keeps all.
    """
    return _Kept.apply(x, threshold)  # type: ignore[no-any-return, no-untyped-call]


def received(x: Tensor) -> Tensor:
    """Return ``x``, the largest values of what another stage has computed; the gradient is of those alone."""
    return largest(x, 0.0)


class Neurons(nn.Module):
    """The largest values of the residual stream after a block.

    Attributes:
        share: of the values, that is to go on.
        threshold: fp64 [1], the least magnitude that goes on; 0 before one is known: everything does.
        age: int64 [1], steps since the threshold was found.
        watch: called with what comes in and what goes on in a forward pass of training; None: the threshold stays.
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

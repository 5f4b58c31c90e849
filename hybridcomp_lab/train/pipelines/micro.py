"""Run one micro-batch through all stages of a model, forward and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridcomp_lab.train.model.gpt import GPT, loss_of
from hybridcomp_lab.train.pipelines.cyclic import Pass


class MicroBatch:
    """Passes of a micro-batch, stage by stage; gradients are added to those of the parameters.

    Args:
        stages: whole model, in order.
        weight: factor on the loss.

    Attributes:
        saved: input and output of the stages (from 1) whose backward pass is to come, which autograd keeps
            alive.
        peak: most stages that were saved at once.
        loss: loss of the last forward pass through all stages, before it is weighted.
    """

    def __init__(self, stages: Sequence[GPT], weight: float) -> None:
        self._stages = stages
        self._weight = weight
        self._between: Tensor | None = None  # activations in forward, their gradients in backward
        self.saved: dict[int, tuple[Tensor, Tensor]] = {}
        self.peak = 0
        self.loss = 0.0

    def run(self, which: Pass, micro: Tensor) -> None:
        """Run one pass of ``micro``, int64 [micro_batch_size, seq_len + 1]; passes come in their order."""
        if which.direction == "forward":
            self._forward(which.stage, micro)
        else:
            self._backward(which.stage)

    def _forward(self, stage: int, micro: Tensor) -> None:
        x = micro[:, :-1] if self._between is None else self._between.requires_grad_()
        y = self._stages[stage - 1](x)
        if stage == len(self._stages):
            loss = loss_of(y, micro[:, 1:])
            self.loss = loss.item()
            y, self._between = loss * self._weight, None
        else:
            self._between = y.detach()
        self.saved[stage] = x, y
        self.peak = max(self.peak, len(self.saved))

    def _backward(self, stage: int) -> None:
        x, y = self.saved.pop(stage)
        torch.autograd.backward(y, self._between)
        self._between = x.grad  # None before the first stage, whose input is tokens

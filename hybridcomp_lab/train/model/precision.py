"""Compute activations in bf16 by PyTorch's autocast; weights, their gradients and the optimizer's moments stay in fp32.

Matrix products and attention compute in bf16, and so tp sums bf16. The residual stream is bf16, too, from
the embeddings to the last norm, whatever stages it is cut into: embeddings are rounded, blocks add bf16 to it, norms
take and give bf16. Stages send it and its gradient to each other. The loss is computed in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridcomp_lab.train.model.gpt import GPT


def compute_in_bf16(model: GPT) -> None:
    """Make the stage run under autocast; call it before hooks that send its activations are registered."""
    stream, logits = model.hidden, model.logits

    def rounded(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return stream(x)

    def widened(hidden: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return logits(hidden).float()

    # Replace the methods, so that a stage does the same for every caller: a schedule, DDP, an evaluation.
    model.hidden = rounded  # type: ignore[method-assign]
    model.logits = widened  # type: ignore[method-assign]
    if model.embed is not None:
        model.embed.register_forward_hook(lambda _, inputs, output: output.bfloat16())

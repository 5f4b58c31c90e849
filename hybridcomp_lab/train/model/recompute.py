"""Checkpoint activations: a block keeps its input alone, and runs forward once more in the backward pass.

After Chen, Xu, Zhang, Guestrin 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174). A block's
second forward pass sends what its first one sent: the same messages in the same order, which a policy sees
as forward ones, by the same codecs. They keep no memory between messages of tp, so the bits are the same, too.
"""

from __future__ import annotations

import functools

from torch.utils.checkpoint import checkpoint

from hybridcomp_lab.train.model.gpt import GPT


def recompute_blocks(model: GPT, count: int | None = None) -> None:
    """Make blocks of ``model`` compute forward again in backward; under ``no_grad`` nothing changes.

    Args:
        model: stage, or whole model.
        count: number of its first blocks that are computed again; None: all.
    """
    for block in list(model.blocks.values())[:count]:
        # Wrap the method, not the module: names of parameters, and hooks around the block, stay as they are.
        again = functools.partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        block.forward = again

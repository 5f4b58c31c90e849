"""Split sequences over tp between the layers that it splits: sequence parallelism.

After Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198). The
all-reduce after a row-parallel layer becomes a reduce-scatter, on whose result the residual stream and the next norm
work; before the next column-parallel layer comes an all-gather. In backward it is the other way round. That is as many
bytes, and 1/tp of the activations between the layers, and of a pipeline's sends.

Embeddings are computed whole on every rank, which keeps its part; the gradient of their output is gathered, so that
all ranks have the same gradient of the tables, which may be larger than any activation. The last stage gathers its
stream before its norm, and all ranks compute the same loss. So the norms of the blocks alone have gradients that are
parts of sums; they are summed once a step, by :func:`sum_gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridcomp_lab.train.model.gpt import GPT

# torch 2.13 has new names for these, and warns of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _gather(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather [batch, time / n, ...] from each of the n ranks to [batch, time, ...]."""
    parts = part.new_empty(group.size() * part.shape[0], *part.shape[1:])
    _all_gather(parts, part.contiguous(), group=group)
    return parts.view(group.size(), *part.shape).transpose(0, 1).flatten(1, 2)


def _sum_to_parts(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum [batch, time, ...] over the n ranks; return this rank's part of the sum, [batch, time / n, ...]."""
    parts = whole.chunk(group.size(), 1)
    mine = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
    _reduce_scatter(mine, torch.cat(parts), group=group)
    return mine


def _keep_part(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    return whole.chunk(group.size(), 1)[group.rank()].contiguous()


_Move = Callable[[Tensor, dist.ProcessGroup], Tensor]


class _ThereAndBack(torch.autograd.Function):
    """Autograd function that moves parts and sequences one way in forward, the gradient another way in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, there: _Move, back: _Move) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(gradients[0], ctx.group), None, None, None


def _move(x: Tensor, group: dist.ProcessGroup, there: _Move, back: _Move) -> Tensor:
    return _ThereAndBack.apply(x, group, there, back)  # type: ignore[no-any-return]


def gather(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the ranks' parts to whole sequences; in backward sum the ranks' gradients, of which each gets its part."""
    return _move(part, group, _gather, _sum_to_parts)


def sum_to_parts(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of the sum of the ranks' whole sequences; in backward gather the parts."""
    return _move(whole, group, _sum_to_parts, _gather)


def split_sequence(model: GPT, group: dist.ProcessGroup) -> frozenset[str]:
    """Make the stage's residual stream this rank's part of the sequences, from the embeddings to the last norm.

    Returns:
        The names of the parameters whose gradients the ranks of the group have to sum.
    """
    if model.embed is not None:
        model.embed.register_forward_hook(lambda _, inputs, output: _move(output, group, _keep_part, _gather))
    if model.final_norm is not None:
        model.final_norm.register_forward_pre_hook(
            lambda _, inputs: (_move(inputs[0], group, _gather, _keep_part),)
        )
    return frozenset(
        name for name, _ in model.named_parameters() if name.startswith("blocks.") and "_norm." in name
    )


def sum_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum the parameters' gradients over the group, in the order of ranks; collective.

    They go as bytes, which no policy compresses: a message of the group has no name, by which it could be excluded.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return
    mine = torch.cat([gradient.flatten() for gradient in gradients])
    everyone = mine.new_empty(group.size(), mine.numel())
    dist.all_gather(list(everyone.view(torch.uint8)), mine.view(torch.uint8), group=group)
    total, *others = everyone
    for other in others:
        total += other
    for gradient, part in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view(gradient.shape))

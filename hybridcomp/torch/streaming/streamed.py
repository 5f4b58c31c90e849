"""Make linear layers of a model stream their gradients, and average the factors over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridcomp.policy import Policy, load_policy
from hybridcomp.torch.backend.options import PolicyLike
from hybridcomp.torch.flat import views
from hybridcomp.torch.hook.averager import Averager, Named
from hybridcomp.torch.replicas import copy_from_first
from hybridcomp.torch.streaming.factors import Factors
from hybridcomp.torch.streaming.layer import StreamedLinear
from hybridcomp.torch.streaming.optimizer import StreamedSGD
from hybridcomp.torch.streaming.selection import choose


class StreamedLayers:
    """The streamed layers of a model, as :func:`stream_linear` returns them.

    Attributes:
        weights: weights whose gradients are streamed, by name.
    """

    def __init__(self, factors: Sequence[Factors], averager: Averager, *, has_others: bool) -> None:
        """Lay P and Q of all weights out in one buffer.

        Args:
            factors: factors of each weight, on one device, of one type.
            averager: averager of the ranks.
            has_others: whether the model has parameters that another optimizer steps.
        """
        self.weights = {each.name: each.weight for each in factors}
        self._factors = {each.weight: each for each in factors}
        self._averager = averager
        self._has_others = has_others
        parts = [part for each in factors for part in (each.left, each.right)]
        self._buffer = parts[0].new_zeros(sum(part.numel() for part in parts))
        self._parts = views(self._buffer, parts)
        for each, p, q in zip(factors, self._parts[::2], self._parts[1::2], strict=True):
            each.keep_in(p, q)
        # The policy sees vectors: their low-rank structure has been used already.
        self._named: Named = [
            (f"{each.name}.{side}", (part.numel(),))
            for each in factors
            for side, part in (("left", each.left), ("right", each.right))
        ]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the factors that are accumulated, averaged and sent in the place of gradients."""
        return self._buffer.nbytes

    @property
    def dense_nbytes(self) -> int:
        """Return the bytes that the gradients of the weights would take."""
        return sum(weight.nbytes for weight in self.weights.values())

    def optimizer(self, *, lr: float, weight_decay: float = 0.0) -> StreamedSGD:
        """Make the optimizer of the streamed weights; see :class:`StreamedSGD`.

        Raises:
            ValueError: a number is negative.
        """
        return StreamedSGD(self, lr=lr, weight_decay=weight_decay, has_others=self._has_others)

    def average(self) -> None:
        """Average the factors over the ranks, if that is not done since the last backward pass. Collective.

        All ranks have the same bits then.

        Raises:
            CollectiveTimeoutError: a rank did not come in time.
            HybridcompError: the average failed, here or on another rank.
        """
        if self._is_averaged:
            return
        if dist.is_available() and dist.is_initialized():
            averaging = self._averager.average(
                self._buffer, lambda: self._named, "factors", self._averager.step
            )
            self._averager.flush()
            if averaging is not None:
                averaging.wait()
        self._averager.step += 1
        self._mark(averaged=True)

    def resume(self, step: int) -> None:
        """Count averages from ``step`` on, whether or not a state was loaded, which has the count as well."""
        self._averager.step = step

    def square_sum(self) -> float:
        """Return the square of :meth:`grad_norm`. Collective."""
        self.average()
        return sum(self.squares().values())

    def grad_norm(self) -> float:
        """Return the norm of the streamed gradients of all weights together, of all ranks' mean. Collective.

        Raises:
            HybridcompError: see :meth:`average`.
        """
        return math.sqrt(self.square_sum())

    def clip_grad_norm_(self, max_norm: float, others: Iterable[Tensor] = ()) -> float:
        """Scale gradients so that their norm is at most ``max_norm``, as torch's function of the name. Collective.

        Args:
            max_norm: limit of the norm of the streamed gradients and those of ``others`` together.
            others: parameters whose gradients are of all ranks' mean, as DDP leaves them.

        Returns:
            The norm before.

        Raises:
            HybridcompError: see :meth:`average`.
        """
        gradients = [p.grad for p in others if p.grad is not None]
        norms = torch._foreach_norm(gradients) if gradients else ()
        norm = math.sqrt(self.square_sum() + sum(each.double().square().item() for each in norms))
        scale = max_norm / (norm + 1e-6)  # as torch has it
        if scale < 1:
            self.scale_(scale)
            if gradients:
                torch._foreach_mul_(gradients, scale)
        return norm

    def scale_(self, scale: float) -> None:
        """Multiply the streamed gradients by a number."""
        self._buffer.mul_(scale)

    def zero(self) -> None:
        """Drop what has been accumulated since the last step."""
        self._buffer.zero_()
        self._mark(averaged=False)

    def factors_of(self, weight: Tensor) -> Factors:
        """Return the factors of a weight, from its backward passes up to now."""
        return self._factors[weight]

    def squares(self) -> dict[Tensor, float]:
        """Return the sum of squares of each weight's streamed gradient, of what has been accumulated."""
        parts = [part for each in self._factors.values() for part in each.square_parts()]
        norms = torch.stack(torch._foreach_norm(parts)).double().square().view(-1, 2).sum(1)
        return dict(zip(self._factors, norms.tolist(), strict=True))

    @property
    def _is_averaged(self) -> bool:
        return all(each.averaged for each in self._factors.values())

    def _mark(self, *, averaged: bool) -> None:
        for each in self._factors.values():
            each.averaged = averaged


def stream_linear(
    model: nn.Module,
    rank: int = 10,
    *,
    process_group: Any = None,
    policy: PolicyLike | None = None,
    exclude: Sequence[str] = (),
    axis: str = "dp",
    init_sync: bool = True,
) -> StreamedLayers:
    """Have the linear layers of a model stream their weights' gradients, which then are never formed.

    Streaming batch PCA (Huang et al. 2020, arXiv 2004.12041), by the equations of
    :mod:`hybridcomp.torch.streaming.factors`: the backward pass adds to two factors of ``rank`` columns, of (m + n) k
    elements where the weight has m n. Ranks average these in the place of gradients, and the optimizer of
    :meth:`StreamedLayers.optimizer` updates the weights by them. Streamed weights no longer require a gradient, so
    other optimizers, DDP and other users of ``.grad`` leave them alone. Call it before ``DistributedDataParallel``,
    which then has the other parameters.

    .. code-block:: python

        streamed = hct.stream_linear(model, rank=10)
        ddp = DistributedDataParallel(model)                           # for biases, norms, embeddings
        optimizers = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad), streamed.optimizer(lr=0.3)

        for x, y in batches:
            loss(ddp(x), y).backward()                                 # once or more
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    Args:
        model: model whose layers of type ``nn.Linear`` (not of types derived from it) are chosen if their weight is
            trained and no other module's; a head whose weight is the embedding, too, stays as it is. The layers must
            be called: it is not enough that other code reads their ``weight``. They are on the device that they stay
            on.
        rank: k, the columns of each basis; at most the smaller side of each weight is used, which makes its gradient
            exact.
        process_group: the ranks whose factors are averaged; None is the default group, if there is one.
        policy: policy as :func:`hybridcomp.load_policy` takes it, whose section of ``axis`` says how ``all_reduce`` is
            compressed, without error feedback: bases change in each step. Messages are named ``NAME.weight.left`` and
            ``NAME.weight.right``. None compresses nothing. The same on all ranks.
        exclude: ``fnmatch`` patterns of the names of layers that stay as they are.
        axis: the policy's section.
        init_sync: whether ranks begin with rank 0's weights; False if they are alike already. Collective.

    Returns:
        The layers' handle, which averages, clips and makes the optimizer.

    Raises:
        ValueError: the rank, a layer or a pattern is wrong; says what is allowed.
        PolicyError: the policy cannot be read.
    """
    if type(rank) is not int or rank < 1:
        raise ValueError(f"rank must be an integer of at least 1, not {rank!r}")
    chosen: Policy = load_policy("none" if policy is None else policy)
    layers = choose(model, exclude)
    weights = {name: of[0].weight for name, of in layers.items()}
    double = any(weight.dtype is torch.float64 for weight in weights.values())
    dtype = torch.float64 if double else torch.float32
    averager = Averager(chosen, kind="stream", axis=axis, group=process_group, remembers=False)
    if init_sync and dist.is_available() and dist.is_initialized():
        copy_from_first(list(weights.values()), process_group)
    factors = [Factors(name, weight, rank, dtype) for name, weight in weights.items()]
    for each in factors:
        for layer in layers[each.name]:
            StreamedLinear.take(layer, each)
    return StreamedLayers(factors, averager, has_others=any(p.requires_grad for p in model.parameters()))

"""One stage of the model on one rank: split over tp, replicated over dp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket  # torch.distributed re-exports it, untyped
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import hybridcomp.torch as hct
from hybridcomp.policy import Policy
from hybridcomp.train.config import TrainConfig
from hybridcomp.train.model import GPT, ModelShape, build_gpt, keep_stage
from hybridcomp.train.tensor_parallel import split_over_tp
from hybridcomp.train.topology import Topology


class GradientHook:
    """DDP's communication hook, which can be switched off for a rehearsal.

    Args:
        state: the state of the hook that is called.
        hook: that hook.
    """

    def __init__(self, state: object, hook: Any) -> None:
        self._state = state
        self._hook = hook
        self.rehearsing = False

    def __call__(self, _: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Reduce the bucket, or hand it back as it is while rehearsing."""
        if self.rehearsing:
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future
        return self._hook(self._state, bucket)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Stage:
    """What a rank trains.

    Attributes:
        module: the stage's part of the model; tp and dp inside.
        plain: the same without DDP, for evaluation.
        parameters: by name, as plain local tensors (a split one is this rank's part).
        split: names of the parameters that are split over tp.
        hook: of DDP; None without data parallelism.
    """

    module: nn.Module
    plain: GPT
    parameters: dict[str, nn.Parameter]
    split: frozenset[str]
    hook: GradientHook | None


def build_stage(shape: ModelShape, config: TrainConfig, policy: Policy, topology: Topology) -> Stage:
    """Build this rank's stage; collective. All build the whole model from the seed and keep their part."""
    model = keep_stage(build_gpt(shape, config.seed), topology.pp, config.pp)
    split = split_over_tp(model, topology.mesh["tp"]) if config.tp > 1 else frozenset()
    parameters = dict(model.named_parameters())
    if config.dp == 1:
        return Stage(model, model, parameters, split, None)
    group = topology.group("dp")
    ddp = DistributedDataParallel(
        model,
        process_group=group,
        bucket_cap_mb=config.bucket_mb,
        gradient_as_bucket_view=True,
        init_sync=False,  # all replicas are built from one seed
    )
    if policy.codecs("dp", "all_reduce"):
        state = hct.HookState(policy, module=model, process_group=group)
        hook = GradientHook(state, hct.comm_hook)
    else:
        hook = GradientHook(group, allreduce_hook)
    ddp.register_comm_hook(None, _as_function(hook))
    return Stage(ddp, model, parameters, split, hook)


def _as_function(hook: GradientHook) -> Any:
    """DDP insists on a function with these annotations."""

    def comm_hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return hook(state, bucket)

    comm_hook.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]}
    return comm_hook


def rehearse(stage: Stage, shape: ModelShape, config: TrainConfig, topology: Topology) -> None:
    """Run one forward and backward on made-up input and forget the gradients; collective.

    DDP lays its buckets out anew in the order in which the first backward produced the gradients.
    Compression and the order of floating-point sums depend on that layout, so without a rehearsal the first
    step of a resumed run would differ from the same step of an uninterrupted one.
    """
    size = (config.micro_batch_size, config.seq_len)
    if topology.is_first_stage:
        x = torch.zeros(size, dtype=torch.int64)
    else:
        x = torch.zeros(*size, shape.d_model, requires_grad=True)
    if stage.hook is not None:
        stage.hook.rehearsing = True
    stage.module(x).sum().backward()
    if stage.hook is not None:
        stage.hook.rehearsing = False
    for parameter in stage.parameters.values():
        parameter.grad = None

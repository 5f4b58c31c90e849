"""Define the stages of the model that a rank has: split over tp, replicated over dp."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket  # torch.distributed re-exports it, untyped
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import hybridcomp.torch as hct
from hybridcomp.policy import Place, Policy, place, set_place
from hybridcomp_lab.train.config import CYCLIC, TrainConfig
from hybridcomp_lab.train.model.embedding import COPIES, SharedEmbedding, is_shared
from hybridcomp_lab.train.model.experts import make_group, spread_experts
from hybridcomp_lab.train.model.gpt import GPT, ModelShape, OwnLoss, build_gpt, keep_stage, synthetic_labels
from hybridcomp_lab.train.model.precision import compute_in_bf16
from hybridcomp_lab.train.model.recompute import recompute_blocks
from hybridcomp_lab.train.parallel.residual_stream import stream_of
from hybridcomp_lab.train.parallel.sequence_parallel import split_sequence
from hybridcomp_lab.train.parallel.tensor_parallel import partial_codes, split_over_tp
from hybridcomp_lab.train.topology import Topology


class GradientHook:
    """Communication hook for DDP that can be switched off for a rehearsal.

    Args:
        state: state of the hook that is called.
        hook: hook that is called.
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

    def call(self, state: hct.HookState) -> None:
        """Have :func:`hct.comm_hook` called with a state, from the next bucket on."""
        self._state, self._hook = state, hct.comm_hook

    def resume(self, step: int) -> None:
        """Go on after so many steps, whether or not the state was loaded, which counts them as well."""
        if isinstance(self._state, hct.HookState):
            self._state.step = step


@dataclass(frozen=True)
class Stage:
    """One of the consecutive parts that the model is cut into.

    Attributes:
        index: place among the stages, from 0.
        count: number of all stages.
        module: module that training calls: the stage, or :class:`OwnLoss` of it; in DDP where it is replicated.
        plain: stage itself.
        hook: hook of DDP; None without it.
    """

    index: int
    count: int
    module: nn.Module
    plain: GPT
    hook: GradientHook | None

    @property
    def is_first(self) -> bool:
        """Tell whether tokens enter here."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Tell whether the model's loss is computed here."""
        return self.index == self.count - 1

    def sends_activations(self, *, train: bool = True) -> AbstractContextManager[None]:
        """Name the place of a send of the stage's output, at its last layer; in training it is a link."""
        link = f"activations of stage {self.index}" if train else None
        return hct.in_place(stage=self.index, layer=max(map(int, self.plain.blocks)), link=link)

    def sends_gradients(self, *, cools: bool | None = None) -> AbstractContextManager[None]:
        """Name the place of a send of the gradient of the stage's input, at the last layer before it; not of the first.

        Args:
            cools: whether its last forward pass of the step is done; None where the schedule has no cool-down.
        """
        part = None if cools is None else "cool-down" if cools else "steady"
        layer, link = min(map(int, self.plain.blocks)) - 1, f"gradients of stage {self.index}"
        return hct.in_place(stage=self.index, layer=layer, part=part, link=link)


@dataclass(frozen=True)
class RankModel:
    """Stages that a rank trains.

    Attributes:
        stages: stages in order.
        parameters: parameters of all stages by name, as plain local tensors (a split one is this rank's part).
        split: names of the parameters that are split over tp.
        embedding: shared embedding, where a pipeline's first and last stage have one.
        partial: names of parameters of which each rank of tp has the gradient of its part of the sequences.
        apart: names of parameters that this replica alone has.
        streamed: layers whose gradients are not formed, if there are any.
    """

    stages: tuple[Stage, ...]
    parameters: dict[str, nn.Parameter]
    split: frozenset[str]
    partial: frozenset[str]
    apart: frozenset[str]
    embedding: SharedEmbedding | None = None
    streamed: hct.StreamedLayers | None = None

    @property
    def copies(self) -> frozenset[str]:
        """Return the names of the parameters that are copies of one in an earlier stage."""
        return frozenset(COPIES[1:] if self.embedding is not None else ()).intersection(self.parameters)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers that training changes in the stages, by name: alike on all replicas."""
        return {name: buffer for stage in self.stages for name, buffer in stage.plain.named_buffers()}


def build_model(shape: ModelShape, config: TrainConfig, policy: Policy, topology: Topology) -> RankModel:
    """Build this rank's stages; collective. All build the whole model from the seed and keep their part."""
    count = config.stages
    indices = range(topology.pp, count, config.pp)
    group = make_group(topology, config.timeout) if config.experts else None
    split: set[str] = set()
    partial: set[str] = set()
    apart: set[str] = set()
    streamed = None
    stages = []
    for index in indices:
        whole = build_gpt(shape, config.seed)
        local = config.schedule == "local"
        own = {"own_norm": local, "own_head": local and not config.synthetic_labels}
        model = keep_stage(whole, index, count, config.blocks_of(index), **own)
        if config.dtype == "bf16":
            compute_in_bf16(model)
        if config.tp > 1:
            split |= split_over_tp(model, topology.mesh["tp"], sequence=config.sequence_parallel)
            partial |= partial_codes(model, sequence=config.sequence_parallel)
            if policy.places:
                _say_layers(model)
        if config.sequence_parallel:
            partial |= split_sequence(model, topology.group("tp"))
        if config.recompute == "blocks":
            recompute_blocks(model, len(config.recomputed(index)))
        if config.stream_rank is not None:  # there is one stage
            streamed = hct.stream_linear(
                model, config.stream_rank, process_group=topology.group("dp"), policy=policy, init_sync=False
            )
        experts = spread_experts(model, group, config.balance_loss / config.micro_batches)
        apart |= experts
        module, hook = _replicate(model, index, experts, config, policy, topology)
        stages.append(Stage(index, count, module, model, hook))
    parameters = {name: p for stage in stages for name, p in stage.plain.named_parameters()}
    embedding = None
    if is_shared(config):
        embedding = SharedEmbedding(parameters, config, topology, policy)
    return RankModel(
        tuple(stages), parameters, frozenset(split), frozenset(partial), frozenset(apart), embedding, streamed
    )


def _replicate(
    model: GPT, index: int, apart: frozenset[str], config: TrainConfig, policy: Policy, topology: Topology
) -> tuple[nn.Module, GradientHook | None]:
    """Return the module that training calls for a stage, and its gradient hook.

    It is in DDP where there are replicas, unless something else sums gradients. Parameters in ``apart`` are no
    replicas.
    """
    module: nn.Module = model
    if config.schedule == "local":
        labels = None if model.head is not None else synthetic_labels(model.shape, config.seed, index)
        module = OwnLoss(model, labels)
    if config.dp == 1 or config.schedule in CYCLIC or config.shard != "none" or config.sync is not None:
        return module, None
    # A shared embedding's gradient is summed over the stages, too; and replicas change buffers alike by themselves.
    buffers = (name for name, _ in module.named_buffers())
    elsewhere = [*apart, *(COPIES if is_shared(config) else ()), *buffers]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, elsewhere)  # type: ignore[no-untyped-call]
    group = topology.group("dp")
    ddp = DistributedDataParallel(
        module,
        process_group=group,
        bucket_cap_mb=config.bucket_mb,
        gradient_as_bucket_view=True,
        init_sync=False,  # all replicas are built from one seed
    )
    if policy.codecs("dp", "all_reduce"):
        hook = GradientHook(
            hct.HookState(policy, module=model, process_group=group, stage=index), hct.comm_hook
        )
    else:
        hook = GradientHook(group, allreduce_hook)
    ddp.register_comm_hook(None, _as_function(hook))
    return ddp, hook


def _as_function(hook: GradientHook) -> Any:
    """Wrap a hook in a function with the annotations that DDP insists on."""

    def comm_hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return hook(state, bucket)

    comm_hook.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]}
    return comm_hook


def rehearse(model: RankModel, config: TrainConfig) -> None:
    """Run one forward and backward of each stage on made-up input and drop the gradients; collective.

    DDP lays its buckets out anew in the order in which the first backward produced the gradients.
    Compression and the order of floating-point sums depend on that layout, so without a rehearsal the first
    step of a resumed run would differ from the same step of an uninterrupted one.
    """
    for stage in model.stages:
        if stage.is_first:
            x = torch.zeros(config.micro_batch_size, config.seq_len, dtype=torch.int64)
        else:
            x = stream_of(config).empty().zero_().requires_grad_()
        if stage.hook is not None:
            stage.hook.rehearsing = True
        output = stage.module(x)
        (output[1] if isinstance(output, tuple) else output).sum().backward()
        if stage.hook is not None:
            stage.hook.rehearsing = False
    for parameter in model.parameters.values():
        parameter.grad = None
    if model.streamed is not None:
        model.streamed.zero()


def _say_layers(model: GPT) -> None:
    """Set the layer of each block as the place of its messages, in forward and in backward: policies may ask for it."""
    for number, block in model.blocks.items():
        saying = _Saying(int(number))
        block.register_forward_pre_hook(saying.begin)
        block.register_forward_hook(saying.end, always_call=True)
        block.register_full_backward_pre_hook(saying.begin)
        block.register_full_backward_hook(saying.end)


class _Saying:
    """Setting of a layer as messages' place between two hooks; a forward pass may lie within a backward pass."""

    def __init__(self, layer: int) -> None:
        self._layer = layer
        self._before: list[Place] = []

    def begin(self, *_: Any) -> None:
        self._before.append(set_place(dataclasses.replace(place(), layer=self._layer)))

    def end(self, *_: Any) -> None:
        set_place(self._before.pop())

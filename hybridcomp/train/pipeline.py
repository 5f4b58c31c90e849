"""A step's forward and backward passes: 1F1B over the stages, or a plain loop where there is one stage."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from hybridcomp.train.config import TrainConfig
from hybridcomp.train.model import ModelShape, loss_of
from hybridcomp.train.parallel import Stage
from hybridcomp.train.topology import Topology


class Runner(Protocol):
    """Runs batches through all stages. Every rank of the pipeline calls it with the same batch."""

    def train(self, batch: Tensor) -> float:
        """Leave the gradients of the batch's mean loss in the parameters.

        Args:
            batch: int64 [micro_batches * micro_batch_size, seq_len + 1].

        Returns:
            The mean loss of this replica's batch on the last stage, 0 elsewhere.
        """

    def evaluate(self, micro_batches: Sequence[Tensor]) -> float:
        """Run forward only, without gradients.

        Args:
            micro_batches: each int64 [micro_batch_size, seq_len + 1].

        Returns:
            Their mean loss on the last stage, 0 elsewhere.
        """


def make_runner(stage: Stage, shape: ModelShape, config: TrainConfig, topology: Topology) -> Runner:
    """The runner that fits the mesh."""
    if config.pp == 1:
        return _OneStage(stage, config)
    return _Pipeline(stage, shape, config, topology)


class _OneStage:
    """Gradient accumulation; the replicas' reduction starts in the last micro-batch's backward."""

    def __init__(self, stage: Stage, config: TrainConfig) -> None:
        self._stage = stage
        self._count = config.micro_batches

    def train(self, batch: Tensor) -> float:
        module = self._stage.module
        total = 0.0
        for i, micro in enumerate(batch.chunk(self._count)):
            last = i == self._count - 1
            ddp = module if isinstance(module, DistributedDataParallel) else None
            with contextlib.nullcontext() if last or ddp is None else ddp.no_sync():
                loss = loss_of(module(micro[:, :-1]), micro[:, 1:]) / self._count
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        return total

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Tensor]) -> float:
        losses = [loss_of(self._stage.plain(micro[:, :-1]), micro[:, 1:]).item() for micro in micro_batches]
        return sum(losses) / len(losses)


class _Pipeline:
    """PyTorch's 1F1B schedule for training, a chain of receives and sends for evaluation."""

    def __init__(self, stage: Stage, shape: ModelShape, config: TrainConfig, topology: Topology) -> None:
        self._plain = stage.plain
        self._topology = topology
        self._group = topology.group("pp")
        size = (config.micro_batch_size, config.seq_len)
        self._activation = torch.empty(*size, shape.d_model)
        # Shapes given here need not be inferred, which would send pickled objects along the pipeline.
        tokens = torch.empty(size, dtype=torch.int64)
        hidden = torch.empty(*size, shape.d_model, requires_grad=True)
        logits = torch.empty(*size, shape.vocab_size, device="meta").requires_grad_()
        self._count = config.micro_batches
        pipeline_stage = PipelineStage(
            stage.module,
            topology.pp,
            config.pp,
            torch.device("cpu"),
            input_args=tokens if topology.is_first_stage else hidden,
            output_args=logits if topology.is_last_stage else hidden,
            group=self._group,
        )
        # Losses are divided here, before the replicas' reduction: scaling the gradients after it would
        # cost another pass over them.
        self._schedule = Schedule1F1B(pipeline_stage, self._count, loss_fn=self._loss, scale_grads=False)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return loss_of(logits, targets) / self._count

    def train(self, batch: Tensor) -> float:
        if self._topology.is_first_stage:
            self._schedule.step(batch[:, :-1].contiguous(), return_outputs=False)
            return 0.0
        if not self._topology.is_last_stage:
            self._schedule.step(return_outputs=False)
            return 0.0
        losses: list[Tensor] = []
        self._schedule.step(target=batch[:, 1:].contiguous(), losses=losses, return_outputs=False)
        return sum(loss.item() for loss in losses)

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Tensor]) -> float:
        losses = []
        pending: dist.Work | None = None
        for micro in micro_batches:
            if self._topology.is_first_stage:
                x = micro[:, :-1]
            else:
                x = self._activation
                dist.recv(x, group=self._group, group_src=self._topology.pp - 1)
            y = self._plain(x)
            if self._topology.is_last_stage:
                losses.append(loss_of(y, micro[:, 1:]).item())
                continue
            if pending is not None:
                pending.wait()
            sent = y.contiguous()
            pending = dist.isend(sent, group=self._group, group_dst=self._topology.pp + 1)
        if pending is not None:
            pending.wait()
        return sum(losses) / len(losses) if losses else 0.0

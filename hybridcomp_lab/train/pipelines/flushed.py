"""Run pipelines that are empty between steps: PyTorch's GPipe, 1F1B and interleaved 1F1B.

GPipe is of Huang et al. 2019 (arXiv 1811.06965); 1F1B with a flush is PipeDream-Flush, of Narayanan et al. 2021
(arXiv 2006.09503); interleaved is of Narayanan et al. 2021 (arXiv 2104.04473). All three apply the gradient of the
whole batch to the weights that it was computed with.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from hybridcomp_lab.train.model.gpt import loss_of
from hybridcomp_lab.train.optimizer.update import Result
from hybridcomp_lab.train.parallel.residual_stream import stream_of
from hybridcomp_lab.train.parallel.stages import Stage
from hybridcomp_lab.train.pipelines.base import Run, Schedule


class _Stashes:
    """Count of a rank's forward passes, over all its stages, whose backward is to come."""

    def __init__(self) -> None:
        self.stages: list[PipelineStage] = []
        self.peak = 0

    def count(self) -> None:
        self.peak = max(self.peak, sum(len(stage.fwd_cache) for stage in self.stages))


class _CountedStage(PipelineStage):
    """Stage for PyTorch's pipelines that counts its stashes for backward, and names the place of its sends.

    Attributes:
        cools: micro-batches whose backward pass comes after the rank's last forward pass.
    """

    def __init__(self, stage: Stage, stashes: _Stashes, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._mine = stage
        self._stashes = stashes
        self.cools: frozenset[int] = frozenset()
        stashes.stages.append(self)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        with self._mine.sends_activations():
            return super().get_fwd_send_ops(fwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        with self._mine.sends_gradients(cools=bwd_chunk_id in self.cools):
            return super().get_bwd_send_ops(bwd_chunk_id)

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(*args, **kwargs)
        self._stashes.count()
        return output


class FlushedPipeline(Schedule):
    """One of PyTorch's schedules, chosen by the configuration; the update follows when the pipeline is empty."""

    def __init__(self, run: Run) -> None:
        super().__init__(run, run.updater())
        config = run.config
        self._count = config.micro_batches
        self._stashes = _Stashes()
        stages = [self._stage(stage) for stage in run.model.stages]
        # Losses are divided here, before the replicas' reduction: scaling the gradients after it would
        # cost another pass over them.
        given: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False}
        self._order: ScheduleGPipe | Schedule1F1B | ScheduleInterleaved1F1B
        if config.schedule == "interleaved":
            self._order = ScheduleInterleaved1F1B([*stages], self._count, **given)
        elif config.schedule == "gpipe":
            self._order = ScheduleGPipe(stages[0], self._count, **given)
        else:
            self._order = Schedule1F1B(stages[0], self._count, **given)
        for stage in stages:
            stage.cools = self._cools(stage.stage_index)

    def _cools(self, index: int) -> frozenset[int]:
        """Return the micro-batches whose backward pass, on stage ``index``, follows this rank's last forward pass."""
        if isinstance(self._order, ScheduleGPipe):
            return frozenset(range(self._count))
        if isinstance(self._order, Schedule1F1B):  # runs so many forward passes ahead
            return frozenset(
                range(self._count - min(self._count, self.run.config.stages - index), self._count)
            )
        order = [action for action in self._order.pipeline_order[self.run.topology.pp] if action is not None]
        last = max(i for i, action in enumerate(order) if action.computation_type == "F")
        return frozenset(
            action.microbatch_index
            for action in order[last:]
            if action.stage_index == index
            and action.computation_type == "B"
            and action.microbatch_index is not None
        )

    def _stage(self, stage: Stage) -> _CountedStage:
        """Make the stage for PyTorch; the shapes given here need not be inferred, which would send pickled objects."""
        size = (self.run.config.micro_batch_size, self.run.config.seq_len)
        tokens = torch.empty(size, dtype=torch.int64)
        hidden = stream_of(self.run.config).empty().requires_grad_()
        logits = torch.empty(*size, self.run.shape.vocab_size, device="meta").requires_grad_()
        return _CountedStage(
            stage,
            self._stashes,
            stage.module,
            stage.index,
            stage.count,
            torch.device("cpu"),
            input_args=tokens if stage.is_first else hidden,
            output_args=logits if stage.is_last else hidden,
            group=self.run.topology.group("pp"),
        )

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return loss_of(logits, targets) / self._count

    def train(self, step: int, *, last: bool) -> list[Result]:
        """Run a step as :class:`Schedule` does; behind where replicas synchronise rarely."""
        inputs: tuple[Tensor, ...] = ()
        losses: list[Tensor] = []
        outcome: dict[str, Any] = {}
        if self.run.topology.is_first_stage or self.run.topology.is_last_stage:
            batch = self.run.batch(step)
            if self.run.topology.is_first_stage:
                inputs = (batch[:, :-1].contiguous(),)
            else:
                outcome = {"target": batch[:, 1:].contiguous(), "losses": losses}
        self._order.step(*inputs, **outcome, return_outputs=False)
        if self.run.model.embedding is not None:
            self.run.model.embedding.sum_gradient()
        return self.updater.update(step, sum(loss.item() for loss in losses), last=last)

    def peaks(self) -> dict[str, int]:
        """See :class:`Schedule`."""
        return {"weight_versions": 1, "stashes": self._stashes.peak}

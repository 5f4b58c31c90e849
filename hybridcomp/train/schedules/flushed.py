"""Pipelines that are empty between steps: PyTorch's GPipe, 1F1B and interleaved 1F1B.

GPipe is of Huang et al. 2019 (arXiv 1811.06965); 1F1B with a flush is PipeDream-Flush, of Narayanan et al. 2021
(arXiv 2006.09503); interleaved is of Narayanan et al. 2021 (arXiv 2104.04473). All three apply the gradient of the
whole batch to the weights that it was computed with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from hybridcomp.train.model import loss_of
from hybridcomp.train.parallel import Stage
from hybridcomp.train.schedules.base import Run, Schedule
from hybridcomp.train.stream import stream_of
from hybridcomp.train.update import Result


class _Stashes:
    """Forward passes of all stages of a rank whose backward is to come."""

    def __init__(self) -> None:
        self.stages: list[PipelineStage] = []
        self.peak = 0

    def count(self) -> None:
        self.peak = max(self.peak, sum(len(stage.fwd_cache) for stage in self.stages))


class _CountedStage(PipelineStage):
    """Counts what PyTorch's stage keeps for backward."""

    def __init__(self, stashes: _Stashes, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stashes = stashes
        stashes.stages.append(self)

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

    def _stage(self, stage: Stage) -> PipelineStage:
        """The stage for PyTorch. Shapes given here need not be inferred, which would send pickled objects."""
        size = (self.run.config.micro_batch_size, self.run.config.seq_len)
        tokens = torch.empty(size, dtype=torch.int64)
        hidden = stream_of(self.run.config).empty().requires_grad_()
        logits = torch.empty(*size, self.run.shape.vocab_size, device="meta").requires_grad_()
        return _CountedStage(
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
        """See :class:`Schedule`; never behind."""
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
        return [self.updater.update(step, sum(loss.item() for loss in losses))]

    def peaks(self) -> dict[str, int]:
        """See :class:`Schedule`."""
        return {"weight_versions": 1, "stashes": self._stashes.peak}

"""Train one stage: gradient accumulation over the micro-batches."""

from __future__ import annotations

import contextlib

from torch.nn.parallel import DistributedDataParallel

from hybridcomp.train.model.gpt import loss_of
from hybridcomp.train.optimizer.update import Result
from hybridcomp.train.pipelines.base import Run, Schedule


class Loop(Schedule):
    """Forward and backward of one micro-batch after the other, then the update.

    The replicas' reduction, if there is one, starts in the last micro-batch's backward.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run, run.updater())
        self._module = run.model.stages[0].module

    def train(self, step: int, *, last: bool) -> list[Result]:
        """Run a step as :class:`Schedule` does; behind where replicas synchronise rarely."""
        batch = self.run.batch(step, self.updater.begin())
        count = len(batch) // self.run.config.micro_batch_size
        total = 0.0
        ddp = self._module if isinstance(self._module, DistributedDataParallel) else None
        for i, micro in enumerate(batch.chunk(count)):
            with contextlib.nullcontext() if i == count - 1 or ddp is None else ddp.no_sync():
                loss = loss_of(self._module(micro[:, :-1]), micro[:, 1:]) / count
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        return self.updater.update(step, total, last=last)

    def peaks(self) -> dict[str, int]:
        """See :class:`Schedule`."""
        return {"weight_versions": 1, "stashes": 1}

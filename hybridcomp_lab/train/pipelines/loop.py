"""Train one stage: gradient accumulation over the micro-batches."""

from __future__ import annotations

import contextlib

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hybridcomp_lab.train.model.gpt import loss_of
from hybridcomp_lab.train.optimizer.update import Result
from hybridcomp_lab.train.pipelines.base import Run, Schedule


def accumulate(module: nn.Module, batch: Tensor, micro_batch_size: int) -> float:
    """Add up the gradients of a batch, micro-batch after micro-batch; in DDP, replicas reduce them in the last one.

    Args:
        module: whole model, in DDP where it has replicas.
        batch: int64 [micro_batches * micro_batch_size, seq_len + 1].
        micro_batch_size: sequences of a micro-batch.

    Returns:
        The mean loss.
    """
    count = len(batch) // micro_batch_size
    total = 0.0
    ddp = module if isinstance(module, DistributedDataParallel) else None
    for i, micro in enumerate(batch.chunk(count)):
        with contextlib.nullcontext() if i == count - 1 or ddp is None else ddp.no_sync():
            loss = loss_of(module(micro[:, :-1]), micro[:, 1:]) / count
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


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
        loss = accumulate(self._module, batch, self.run.config.micro_batch_size)
        return self.updater.update(step, loss, last=last)

    def peaks(self) -> dict[str, int]:
        """See :class:`Schedule`."""
        return {"weight_versions": 1, "stashes": 1}

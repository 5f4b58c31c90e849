"""Train every stage of a pipeline on a loss of its own, sending nothing backward: local updates.

The method is the "greedy" local parallelism of Laskin et al. 2020, "Parallel Training of Deep Networks with Local
Updates" (arXiv 2012.03837). A stage's loss is the cross-entropy of its own norm and head on its activations; the next
stage gets the activations, cut off from autograd. The last stage's is the model's own loss. Stages wait for each other
only for activations: each clips its gradient to the limit by its own norm, and updates at once.

With ``synthetic_labels`` a stage but the last has no head: its loss is the mean square distance of its normed
activations to random vectors of the next tokens (:func:`~hybridcomp_lab.train.model.gpt.synthetic_labels`), all stages
at the same time, where the authors train one after the other.
"""

from __future__ import annotations

import contextlib
from collections import deque

from torch.nn.parallel import DistributedDataParallel

from hybridcomp_lab.train.model.gpt import OwnLoss
from hybridcomp_lab.train.optimizer.update import Report, Result
from hybridcomp_lab.train.parallel.residual_stream import stream_of
from hybridcomp_lab.train.pipelines.base import Run, Schedule
from hybridcomp_lab.train.pipelines.links import Inbox, Outbox


class Local(Schedule):
    """Schedule of local updates on one stage a rank, whose module gives its activations and its logits."""

    def __init__(self, run: Run) -> None:
        super().__init__(run, run.updater())
        topology = run.topology
        self._stage = run.model.stages[0]
        self._activations = Inbox(topology.group("pp"), topology.pp - 1, stream_of(run.config))
        self._onward = Outbox(topology.group("pp"), topology.pp + 1, "forward")
        self._reports: deque[Report] = deque()

    def train(self, step: int, *, last: bool) -> list[Result]:
        """Run a step as :class:`Schedule` does; one step behind: a report needs the last stage, the update does not."""
        count = self.run.config.micro_batches
        if not self._stage.is_first:
            self._activations.expect(count)
        module = self._stage.module
        ddp = module if isinstance(module, DistributedDataParallel) else None
        own = module if ddp is None else ddp.module
        assert isinstance(own, OwnLoss)
        total = 0.0
        for i, micro in enumerate(self.run.batch(step).chunk(count)):
            x = micro[:, :-1] if self._stage.is_first else self._activations.take()
            with contextlib.nullcontext() if i == count - 1 or ddp is None else ddp.no_sync():
                activations, output = module(x)
                if not self._stage.is_last:
                    with self._stage.sends_activations():
                        self._onward.send(activations)
                loss = own.loss(output, micro[:, 1:]) / count
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        self.updater.complete_gradients()
        self._reports.append(self.updater.report(step, total, self.updater.square_sums()))
        self.updater.apply(step, self.updater.own_norm())
        if last:
            self._onward.flush()
        return [self.updater.result(self._reports.popleft()) for _ in range(len(self._reports) - (not last))]

    def peaks(self) -> dict[str, int]:
        """See :class:`Schedule`."""
        return {"weight_versions": 1, "stashes": 1}

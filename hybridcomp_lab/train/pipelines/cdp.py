"""Run replicas two time-steps apart, and send their gradients on point to point: cyclic data parallelism.

After Fournier and Oyallon 2024 (arXiv 2403.08837); :mod:`.cyclic` has its time-steps. With N replicas (workers), the
model cut into N stages, and one micro-batch on each worker, the update of stage j is

    W(t+1)[j] = W(t)[j] - lr / N * sum over i of grad_j f_i(V(i, t))

    CDP-v1:  V(i, t) = W(t-1),        W(-1) = W(0)
    CDP-v2:  V(i, t)[j] = W(t)[j] if i + j > N, where that is made in time, else W(t-1)[j]

With ``predict_weights`` W(t-1) is 2 W(t-1) - W(t-2) there: see :mod:`.versions`.

In each time-step a worker runs one pass of one stage; both passes of a micro-batch use the same version of it. When a
stage's backward pass ends, its sum goes to the next worker, and the total around the ring (:mod:`.ring`): under CDP-v2
at once, under CDP-v1 with the workers, two time-steps for each. The next step has begun by then. CDP-v1 clips the
gradient by the norm of all stages, as a step's totals are there before it is needed; CDP-v2 updates a stage before the
gradients of the others are known, and cannot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from hybridcomp.torch.flat import views
from hybridcomp_lab.train.optimizer.update import Report, Result
from hybridcomp_lab.train.pipelines.base import Run, Schedule
from hybridcomp_lab.train.pipelines.cyclic import LAG, Pass, is_fresh, passes, totals_due
from hybridcomp_lab.train.pipelines.micro import MicroBatch
from hybridcomp_lab.train.pipelines.ring import Ring
from hybridcomp_lab.train.pipelines.versions import Versions


class Cyclic(Schedule):
    """Schedule CDP-v1 or CDP-v2 on all stages of the model.

    Attributes:
        versions: versions of each stage's weights.
    """

    def __init__(self, run: Run) -> None:
        modules = [stage.plain for stage in run.model.stages]
        count = len(modules)
        self._parameters = [list(module.parameters()) for module in modules]
        sizes = [sum(p.numel() for p in parameters) for parameters in self._parameters]
        self._ring = Ring(run.topology.group("dp"), run.policy, sizes)
        self._sums = [views(flat, of) for flat, of in zip(self._ring.sums, self._parameters, strict=True)]
        self._by_stage = run.config.schedule == "cdp-v2"
        self._fresh = [self._by_stage and is_fresh(self._ring.worker, j, count) for j in range(1, count + 1)]
        self.versions = [
            Versions(
                dict(module.named_parameters()),
                kept=1 if fresh else 2,
                predict=run.config.predict_weights and not fresh,
            )
            for module, fresh in zip(modules, self._fresh, strict=True)
        ]
        leaves: dict[str, nn.Parameter] = {}
        for versions in self.versions:
            leaves |= versions.leaves
        super().__init__(run, run.updater(leaves))
        self._micro = MicroBatch(modules, 1 / count)
        self._passes = passes(count)
        self._due = totals_due(self._ring.worker, count, at_once=self._by_stage)
        self._open: tuple[int, float] | None = None  # step whose totals are still to be taken, and its loss
        self._expected: list[int] = []  # stages whose totals are still to be taken, in order
        self._taken: list[int] = []  # stages whose totals wait for those of others
        self._squares = 0.0  # sum of squares of the step's gradient, over the stages so far
        self._reports: list[Report] = []
        self._empty = True

    def train(self, step: int, *, last: bool) -> list[Result]:
        """Run a step as :class:`Schedule` does; one step behind, CDP-v1 two: the last worker to take a step's totals
        does so when the first one has ended the next step, and a report waits for all."""
        ring, count = self._ring, len(self.versions)
        first, self._empty = self._empty, last
        if first:
            for versions in self.versions:
                versions.restart(step)
        # Totals that come as they are made keep the workers in step; others leave them time to come closer.
        paced = first or not self._by_stage
        if paced and ring.worker > 1:
            ring.await_start()
        batch = self.run.batch(step)
        for i, which in enumerate(self._passes):
            if i < count:  # by now its buffer has been sent on; its backward pass is as far ahead
                ring.open_partial(count - i)
            self._take_in(len(self._due[i + 2 * count]))
            if self._due[i]:
                self._expect_totals(step)
                self._take_in(len(self._due[i]))
            if which.direction == "forward":
                fresh = self._fresh[which.stage - 1]
                self.versions[which.stage - 1].use(step if fresh else max(step - 1, 0))
                self._micro.run(which, batch)
            else:
                self._backward(step, which, batch)
            if paced and i == LAG - 1 and not ring.is_last:
                ring.start_next()
        self._expect_totals(step)
        if last:
            self._drain()
        older = step if self._by_stage else step - 1
        done = [report for report in self._reports if last or report.step < older]
        del self._reports[: len(done)]
        return [self.updater.result(report) for report in done]

    def _backward(self, step: int, which: Pass, batch: Tensor) -> None:
        """Add this worker's gradient of a stage to the sum, and hand it on."""
        ring, parameters = self._ring, self._parameters[which.stage - 1]
        ring.await_partial(which.stage)
        for parameter, part in zip(parameters, self._sums[which.stage - 1], strict=True):
            parameter.grad = part  # autograd adds to it
        self._micro.run(which, batch)
        for parameter in parameters:
            parameter.grad = None
        if ring.is_last:
            self._open = step, self._micro.loss
            self._take(which.stage, ring.make_total(which.stage, step))
        else:
            ring.pass_partial(which.stage)

    def _expect_totals(self, step: int) -> None:
        """Post the receives of the totals of a step whose loss is known; not on the last worker."""
        if self._open is None and not self._ring.is_last:
            self._open = step, self._micro.loss
            self._expected = list(range(len(self.versions), 0, -1))
            for stage in self._expected:
                self._ring.open_total(stage, step)

    def _take_in(self, count: int) -> None:
        """Await and take the next totals."""
        for stage in self._expected[:count]:
            self._take(stage, self._ring.await_total(stage))
        del self._expected[:count]

    def _take(self, stage: int, total: Tensor) -> None:
        """Update by the total gradient of a stage, or keep it until those of all stages are there."""
        assert self._open is not None
        step, loss = self._open
        if self.run.config.clip:
            total = total.clone()  # clipping scales it in place, while it is on its way to the next worker
        leaves = self.versions[stage - 1].leaves.values()
        for leaf, part in zip(leaves, views(total, leaves), strict=True):
            leaf.grad = part
        self._taken.append(stage)
        if not self._by_stage and stage > 1:
            return
        squares = sum(self.updater.square_sums())
        updated = [self.versions[taken - 1] for taken in self._taken]
        self._taken.clear()
        for versions in updated:
            versions.begin()
        self.updater.apply(step, math.sqrt(squares))
        for versions in updated:
            versions.end()
        self._squares += squares
        if stage == 1:
            self._reports.append(self.updater.report(step, loss, (0.0, self._squares, 0.0)))
            self._squares, self._open = 0.0, None

    def _drain(self) -> None:
        """Receive the totals of the step that has just ended."""
        self._take_in(len(self._expected))
        self._ring.flush()

    def evaluate(self, micro_batches: Sequence[Tensor]) -> float:
        """See :class:`Schedule`."""
        for versions in self.versions:
            versions.use_newest()
        return super().evaluate(micro_batches)

    def state(self) -> dict[str, Tensor]:
        """Return the older versions, or predictions, of the stages of which this worker keeps them."""
        return {
            f"stage{number}.{name}": flat
            for number, versions in enumerate(self.versions, 1)
            for name, flat in versions.state().items()
        }

    def peaks(self) -> dict[str, int]:
        """See :class:`Schedule`."""
        held = max(versions.held for versions in self.versions)
        return {"weight_versions": held, "stashes": self._micro.peak}

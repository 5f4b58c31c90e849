"""Hand weights from worker to worker: cyclic data parallelism whose workers share the model's state.

After Fournier and Oyallon 2024 (arXiv 2403.08837), who put it in the place of ZeRO's collectives: where data
parallelism gathers a stage's weights for all replicas at once, each worker hands them to the next, which needs them two
time-steps later. The rules, and the resulting weights, are those of :mod:`~hybridcomp_lab.train.pipelines.cdp`.

1.  Each stage has an owner, which keeps its newest weights and the optimizer's moments; no worker else does.
2.  The owner hands the weights of a step to worker 1 before its forward pass of the stage, and again before its
    backward pass; each worker hands them on when it has used them. In CDP-v2 the owner is the first worker that sees
    fresh weights, which set out with it. The last stage's go once: its backward pass follows the forward one.
3.  The sum of the gradients goes up through the workers with the backward passes, as in :mod:`.ring`, and from the last
    worker to the owner, which updates.

So no worker holds more than a few stages' weights and gradients at once, however many stages there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hybridcomp.torch.flat import views
from hybridcomp_lab.train.model.gpt import loss_of
from hybridcomp_lab.train.optimizer.update import Report, Result
from hybridcomp_lab.train.pipelines.base import Run, Schedule
from hybridcomp_lab.train.pipelines.cyclic import LAG, Pass, duties, is_fresh, owner, passes, weights_from
from hybridcomp_lab.train.pipelines.mail import Mail
from hybridcomp_lab.train.pipelines.micro import MicroBatch
from hybridcomp_lab.train.pipelines.relay import Relay, Room

_START, _PARTIAL, _TOTAL = 1, 2, 3  # tags


class HandedOn(Schedule):
    """Schedule CDP-v1 or CDP-v2; each worker owns one stage."""

    def __init__(self, run: Run) -> None:
        self._modules = [stage.plain for stage in run.model.stages]
        self._count = count = len(self._modules)
        self._mail = Mail(run.topology.group("dp"))
        self._worker = run.topology.dp + 1
        self._by_stage = run.config.schedule == "cdp-v2"
        self._own = owner(self._worker, count)
        self._duties = duties(self._own, count)
        own = dict(self._modules[self._own - 1].named_parameters())
        self._newest = torch.cat([p.detach().flatten() for p in own.values()])
        self._older: Tensor | None = self._newest.clone()  # weights of the first step where steps begin anew
        leaves = zip(own, views(self._newest, own.values()), strict=True)
        self._leaves = {name: nn.Parameter(view) for name, view in leaves}
        self._parameters = [list(module.parameters()) for module in self._modules]
        self._rooms = {j: Room(parameters) for j, parameters in enumerate(self._parameters, 1)}
        self._relay = Relay(self._mail, run.policy, self._rooms)
        self._sums: dict[int, Tensor] = {}  # gradients' sums that come or grow here, by stage
        self._total: Tensor | None = None
        super().__init__(run, run.updater(self._leaves, apart=frozenset(self._leaves)))
        self._micro = MicroBatch(self._modules, 1 / count)
        self._passes = passes(count)
        self._reports: list[Report] = []  # CDP-v1: of the gradient that waits for its norm
        self._results: list[Result] = []
        self._empty = True
        self._step = 0
        self._made = 0  # number of the newest weights
        self._most = self._versions = 0

    def train(self, step: int, *, last: bool) -> list[Result]:
        """Run a step as :class:`Schedule` does; one step behind, CDP-v1 two."""
        first, self._empty, self._step = self._empty, last, step
        if first:
            self._made = step
            if self._duties.on < len(self._passes):
                self._hand_out("forward", step)
            self._ask_for(step, 0)
        # Fresh weights come as they are made, and keep the workers in step; others leave them time to come closer.
        paced = first or not self._by_stage
        if paced and self._worker > 1:
            self._mail.expect("start", torch.zeros(1, dtype=torch.int64), self._worker - 2, _START)
            self._mail.arrived("start")
        batch = self.run.batch(step)
        for index, which in enumerate(self._passes):
            self._serve(step, index, first=first, last=last)
            self._fetch(step, which)
            if index + 1 < len(self._passes):
                self._ask_for(step, index + 1)
            elif not last:
                self._ask_for(step + 1, 0)
            self._run(step, which, batch)
            if paced and index == LAG - 1 and self._worker < self._count:
                self._mail.send("start on", torch.zeros(1, dtype=torch.int64), self._worker, _START)
        if last:
            self._drain(step)
        if self._by_stage:
            ready = [report for report in self._reports if last or report.step < step]
            del self._reports[: len(ready)]
            return [self.updater.result(report) for report in ready]
        done = [result for result in self._results if last or result.step < step - 1]
        del self._results[: len(done)]
        return done

    # -- passes ----------------------------------------------------------------------------------------

    def _ask_for(self, step: int, index: int) -> None:
        """Post the receives for a pass, while the one before it runs."""
        direction, stage = self._passes[index]
        source = self._source(self._worker, stage)
        if source != self._worker and (direction == "forward" or stage < self._count):
            self._relay.expect(stage, source - 1, step)
        if direction == "backward":
            self._sums[stage] = self._newest.new_zeros(self._rooms[stage].size)
            if self._worker > 1:
                self._mail.expect(("sum", stage), self._sums[stage], self._worker - 2, _PARTIAL)

    def _fetch(self, step: int, which: Pass) -> None:
        """Wait for a pass's weights, and put them in place."""
        stage = which.stage
        again = which.direction == "backward" and stage == self._count  # with the last pass's weights
        if not again and self._source(self._worker, stage) == self._worker:
            kept = None if self._by_stage else self._older
            self._relay.bring(stage, self._newest if kept is None else kept, step)
        self._relay.arrived(stage)

    def _run(self, step: int, which: Pass, batch: Tensor) -> None:
        """Run a pass, and send on the tensors that the next worker needs for it."""
        direction, stage = which
        self._note(step, stage)
        if direction == "forward":
            with self._rooms[stage].forgetting():
                self._micro.run(which, batch)
        else:
            self._backward(which, batch)
        self._relay.settle()  # messages of the pass before, while this one ran
        if direction == "backward" or stage < self._count:
            goes_on = self._worker < self._count and self._source(self._worker + 1, stage) == self._worker
            self._relay.leave(stage, self._worker if goes_on else None)

    def _backward(self, which: Pass, batch: Tensor) -> None:
        """Add this worker's gradient of a stage to the sum, and hand it on."""
        stage, parameters = which.stage, self._parameters[which.stage - 1]
        total = self._sums.pop(stage)
        self._mail.arrived(("sum", stage))
        for parameter, part in zip(parameters, views(total, parameters), strict=True):
            parameter.grad = part  # autograd adds to it
        self._micro.run(which, batch)
        for parameter in parameters:
            parameter.grad = None
        to = owner(stage, self._count)
        if self._worker < self._count:
            self._mail.send("sum on", total, self._worker, _PARTIAL)
        elif to == self._worker:
            self._total = total
        else:
            self._mail.send("sum on", total, to - 1, _TOTAL)

    def _source(self, worker: int, stage: int) -> int:
        return weights_from(worker, stage, self._count, by_stage=self._by_stage)

    def _note(self, step: int, stage: int) -> None:
        """Update the maxima of held weights, for :meth:`peaks`."""
        self._most = max(self._most, self._relay.held)
        if stage == self._own:
            fresh = self._by_stage and is_fresh(self._worker, stage, self._count)
            older = set() if self._older is None else {max(self._made - 1, 0)}
            held = {step if fresh else max(step - 1, 0), self._made, *older}
            self._versions = max(self._versions, len(held))

    # -- the stage that this worker owns ---------------------------------------------------------------

    def _serve(self, step: int, index: int, *, first: bool, last: bool) -> None:
        """Do the owner's duties that come before a pass."""
        back, on = self._duties
        if index == back - 1 and not first:
            self._expect_total()
        if index == back:
            self._hand_out("backward", step)
            if not first:
                self._take_total(step - 1)
        if index == back + 1:
            self._older = None
        if index == on % len(self._passes):
            ahead = on < len(self._passes)
            self._update()
            if not (ahead and last):
                self._hand_out("forward", step + 1 if ahead else step)

    def _hand_out(self, direction: str, step: int) -> None:
        """Send the weights of a step to worker 1, for its pass in a direction."""
        if self._worker > 1:
            weights = self._newest if self._older is None else self._older
            self._relay.hand_out(direction, weights, 0, step)

    def _expect_total(self) -> None:
        if self._worker < self._count:
            self._total = torch.empty_like(self._newest)
            self._mail.expect("total", self._total, self._count - 1, _TOTAL)

    def _take_total(self, step: int) -> None:
        """Report the gradient of a step, and update by it: CDP-v1 when its norm over all stages is needed."""
        self._mail.arrived("total")
        assert self._total is not None
        for leaf, part in zip(self._leaves.values(), views(self._total, self._leaves.values()), strict=True):
            leaf.grad = part
        self._total = None
        squares = self.updater.square_sums()
        report = self.updater.report(step, self._micro.loss, squares)
        self._reports.append(report)
        if self._by_stage:
            self.updater.apply(step, math.sqrt(sum(squares)))
            self._made = step + 1

    def _update(self) -> None:
        """Do CDP-v1's waiting update, if there is one."""
        if self._by_stage or not self._reports:
            return
        result = self.updater.result(self._reports.pop())
        self.updater.apply(result.step, result.norm)
        self._made = result.step + 1
        self._results.append(result)

    def _drain(self, step: int) -> None:
        """Receive the total of the step that has just ended."""
        self._update()
        self._older = self._newest.clone()
        self._expect_total()
        self._take_total(step)
        self._update()
        self._relay.flush()

    # -- beside training -------------------------------------------------------------------------------

    def evaluate(self, micro_batches: Sequence[Tensor]) -> float:
        """Evaluate as :class:`Schedule` does, stage by stage, so that no worker has more weights than in training."""
        between = [micro[:, :-1] for micro in micro_batches]
        with torch.no_grad():
            for stage, module in enumerate(self._modules, 1):
                weights = self._newest if stage == self._own else None
                self._relay.share(stage, weights, owner(stage, self._count) - 1, self._step)
                between = [module(x) if stage == self._count else module.hidden(x) for x in between]
                self._rooms[stage].close()
            pairs = zip(between, micro_batches, strict=True)
            losses = [loss_of(logits, micro[:, 1:]).item() for logits, micro in pairs]
        return sum(losses) / len(losses)

    def state(self) -> dict[str, Tensor]:
        """Return the version before the newest of the weights of this worker's own stage."""
        assert self._older is not None  # nothing is in flight
        return {f"stage{self._own}.older": self._older}

    def peaks(self) -> dict[str, int]:
        """Return the peaks, see :class:`Schedule`; also ``stages`` with weights here at once, beside the owner's."""
        return {"weight_versions": self._versions, "stashes": self._micro.peak, "stages": self._most}

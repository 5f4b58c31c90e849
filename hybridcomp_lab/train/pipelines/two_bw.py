"""Run 1F1B without ever emptying the pipeline, with two versions of the weights: PipeDream-2BW.

After Narayanan, Phanishayee, Shi, Chen, Zaharia 2021 (arXiv 2006.09503). With d stages and m >= d micro-batches in
a step, rank r of the pipeline runs:

1.  Into an empty pipeline, d - r - 1 forward passes.
2.  m times: a forward pass, d - r - 1 micro-batches ahead, of this step or the next; a backward pass of this step.
3.  The sum of the gradients over the replicas, within the last backward pass. The update waits for all ranks,
    as it needs the norm of the whole gradient; meanwhile the next step goes on.

Both passes of every micro-batch of step t are computed with W(t-1), so

    W(t+1) = W(t) - lr * grad f(W(t-1)),        W(-1) = W(0),

and the optimizer's moments are those of the delayed gradients. With ``predict_weights`` the gradient is that of
2 W(t-1) - W(t-2): see :mod:`.versions`. W(t), which forward passes of step t+1 need while
step t is in flight, is the second version. Clipping is not in the authors' code, which leaves it out.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hybridcomp_lab.train.model.gpt import loss_of
from hybridcomp_lab.train.optimizer.update import Report, Result
from hybridcomp_lab.train.parallel.residual_stream import stream_of
from hybridcomp_lab.train.pipelines.base import Run, Schedule
from hybridcomp_lab.train.pipelines.links import Inbox, Outbox
from hybridcomp_lab.train.pipelines.versions import Versions


class TwoBW(Schedule):
    """Schedule PipeDream-2BW on one stage a rank."""

    def __init__(self, run: Run) -> None:
        model, topology = run.model, run.topology
        self._versions = Versions(model.parameters, kept=2, predict=run.config.predict_weights)
        super().__init__(run, run.updater(self._versions.leaves))
        self._stage = model.stages[0]
        self._count = run.config.micro_batches
        self._lead = self._stage.count - 1 - self._stage.index  # forward passes ahead of the backward pass
        group, stream = topology.group("pp"), stream_of(run.config)
        self._activations = Inbox(group, topology.pp - 1, stream)
        self._gradients = Inbox(group, topology.pp + 1, stream)
        self._onward = Outbox(group, topology.pp + 1, "forward")
        self._back = Outbox(group, topology.pp - 1, "backward")
        self._batches: dict[int, tuple[Tensor, ...]] = {}
        self._stashed: deque[tuple[int, Tensor, Tensor]] = deque()
        self._report: Report | None = None
        self._results: list[Result] = []
        self._peak = 0

    def train(self, step: int, *, last: bool) -> list[Result]:
        """Run a step as :class:`Schedule` does; one step behind."""
        empty = not self._stashed and self._report is None
        if empty:
            self._versions.restart(step)
        forwards = self._count + (self._lead if empty else 0) - (self._lead if last else 0)
        if not self._stage.is_first:
            self._activations.expect(forwards)
        if not self._stage.is_last:
            self._gradients.expect(self._count)
        if empty:
            for i in range(self._lead):
                self._forward(step, i)
        loss = 0.0
        for i in range(self._count):
            ahead = i + self._lead
            if ahead < self._count:
                self._forward(step, ahead)
            elif not last:
                self._settle()
                self._forward(step + 1, ahead - self._count)
            if i == self._count - 1:
                self._settle()  # its gradients are in DDP's buckets, which this step's gradients take over
            loss += self._backward(last=i == self._count - 1)
        self._batches.pop(step, None)
        if self.run.model.embedding is not None:
            self.run.model.embedding.sum_gradient()
        self._versions.take_gradients()
        self.updater.complete_gradients()
        self._report = self.updater.report(step, loss, self.updater.square_sums())
        if last:
            self._onward.flush()
            self._back.flush()
            self._settle()
        results, self._results = self._results, []
        return results

    def _forward(self, step: int, i: int) -> None:
        """Do the forward pass of micro-batch ``i`` of a step."""
        version = max(step - 1, 0)
        self._versions.use(version)
        x = self._micro(step, i)[:, :-1] if self._stage.is_first else self._activations.take()
        if not self._stage.is_first:
            x.requires_grad_()
        module = self._stage.module
        ddp = module if isinstance(module, DistributedDataParallel) else None
        with contextlib.nullcontext() if ddp is None else ddp.no_sync():
            y = module(x)
        if self._stage.is_last:
            y = loss_of(y, self._micro(step, i)[:, 1:]) / self._count
        else:
            with self._stage.sends_activations():
                self._onward.send(y.detach())
        self._stashed.append((version, x, y))
        self._peak = max(self._peak, len(self._stashed))

    def _backward(self, *, last: bool) -> float:
        """Do the backward pass of the oldest stashed micro-batch; return its part of the loss, on the last stage.

        Args:
            last: whether it is the last one of its step: the replicas' sum starts in it.
        """
        version, x, y = self._stashed.popleft()
        self._versions.use(version)
        gradient = None if self._stage.is_last else self._gradients.take()
        ddp = self._stage.module
        if last and isinstance(ddp, DistributedDataParallel):
            # DDP prepares itself in a forward pass that is followed by its backward pass; here others lie
            # between. PyTorch's own pipelines do the same.
            ddp.reducer.prepare_for_backward([y])
        torch.autograd.backward(y, gradient)
        if not self._stage.is_first and x.grad is not None:
            with self._stage.sends_gradients():
                self._back.send(x.grad)
        return y.item() if self._stage.is_last else 0.0

    def _micro(self, step: int, i: int) -> Tensor:
        if step not in self._batches:
            self._batches[step] = self.run.batch(step).chunk(self._count)
        return self._batches[step][i]

    def _settle(self) -> None:
        """Do the update that is waiting, if there is one."""
        if self._report is None:
            return
        result, self._report = self.updater.result(self._report), None
        self._versions.begin()
        self.updater.apply(result.step, result.norm)
        self._versions.end()
        self._results.append(result)

    def evaluate(self, micro_batches: Sequence[Tensor]) -> float:
        """See :class:`Schedule`."""
        self._versions.use_newest()
        return super().evaluate(micro_batches)

    def state(self) -> dict[str, Tensor]:
        """Return the older version, or predictions, which the next steps compute with."""
        return self._versions.state()

    def peaks(self) -> dict[str, int]:
        """See :class:`Schedule`."""
        return {"weight_versions": self._versions.held, "stashes": self._peak}

"""Train replicas apart, each by an optimizer of its own, and synchronise them rarely: local SGD, DiLoCo.

After Stich 2019, "Local SGD Converges Fast and Communicates Little" (arXiv 1805.09767), and Douillard et al. 2023,
"DiLoCo: Distributed Low-Communication Training of Language Models" (arXiv 2311.08105) and 2025, "Streaming DiLoCo with
overlapping communication" (arXiv 2501.18512). The ranks that have the same part of each replica synchronise it:
:class:`hybridcomp.torch.sync.synchronizer.Synchronizer`.

Nothing else passes between replicas. Each clips its gradient by its own norm, and what ranks report of their steps
travels when replicas meet.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from hybridcomp.policy import Policy
from hybridcomp.torch.hook.averager import Averager
from hybridcomp.torch.sync.cutting import runs
from hybridcomp.torch.sync.diloco import nesterov
from hybridcomp.torch.sync.synchronizer import Synchronizer
from hybridcomp.train.config import TrainConfig
from hybridcomp.train.optimizer.optimizers import learning_rate
from hybridcomp.train.optimizer.update import Result, Updater, check_losses, mean_loss
from hybridcomp.train.parallel.exchange import Exchange
from hybridcomp.train.parallel.stages import RankModel
from hybridcomp.train.sync import parse_sync
from hybridcomp.train.topology import Topology

_MOMENTUM = "momentum_buffer"  # of torch's SGD
_LOSS, _NORM, _STOP, _COUNTERS = range(4)  # columns of a report


class SyncedUpdater(Updater):
    """The optimizer on this replica's parameters, which are its own until replicas meet.

    Args:
        model: this rank's stages.
        policy: its section ``dp`` says how what replicas tell each other is compressed.
        config, topology, traffic, stop_requested: see :class:`Updater`.

    Attributes:
        whole: what all replicas have agreed on, by name; it is the model that is evaluated.
    """

    def __init__(
        self,
        model: RankModel,
        policy: Policy,
        config: TrainConfig,
        topology: Topology,
        traffic: Callable[[], Tensor],
        stop_requested: Callable[[], bool],
    ) -> None:
        about = config, topology, traffic, stop_requested
        mine = model.parameters
        super().__init__(mine, model.split, *about, partial=model.partial, apart=frozenset(mine))
        assert config.sync is not None
        how = parse_sync(config.sync)
        stage = model.stages[0].index if len(model.stages) == 1 else None
        averager = Averager(policy, kind="sync", axis="dp", group=topology.group("dp"), stage=stage)

        def outer(parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
            return nesterov(parameters, how.lr, how.momentum)

        self._sync = Synchronizer(
            runs(mine, how.fragments), averager, outer, every=how.every, delay=how.delay, alpha=how.alpha
        )
        self.whole = self._sync.globals
        self._delays = how.delay > 0
        self._under_way = torch.zeros(how.fragments, dtype=torch.int64)
        self._told: list[list[float]] = []
        for parameter in self.whole.values() if how.momentum else ():  # a checkpoint is loaded into it
            self._sync.outer.state[parameter][_MOMENTUM] = torch.zeros_like(parameter)

    def update(self, step: int, loss: float, *, last: bool) -> list[Result]:
        """Complete, clip and apply this replica's gradient, and synchronise what is due.

        After the last step of all, all parameters are averaged: replicas end as one.

        Args:
            step: from 0.
            loss: mean of this replica's batch, on its last stage; ignored elsewhere.
            last: see :meth:`hybridcomp.train.pipelines.Schedule.train`.

        Returns:
            The steps since the last reports, where replicas have met, or ``last``; else none.
        """
        self.complete_gradients()
        norm = self._replica_norm()
        self.apply(step, norm)
        self._sync.advance()
        if step + 1 == self._config.steps:
            self._sync.average()
        if last:
            self._sync.arrived()  # whose bytes are of training, not of what follows
        counters = self._traffic()
        self._told.append([loss, norm, float(self._stop_requested()), *counters.flatten().tolist()])
        return self._results(step) if last or self._sync.met else []

    def _replica_norm(self) -> float:
        """Compute the norm of this replica's gradient, alike on all its ranks; collective over tp and pp."""
        return math.sqrt(self._summed(self.square_sums()[2], "tp", "pp"))

    def _results(self, step: int) -> list[Result]:
        """Tell all ranks about the steps since the last time; ``step`` is the newest. Collective."""
        told, self._told = self._told, []
        exchange = Exchange([value for row in told for value in row])
        steps = exchange.wait().view(-1, len(told), len(told[0])).unbind(1)
        results = []
        for number, ranks in enumerate(steps, step + 1 - len(told)):
            check_losses(self._topology, ranks[:, _LOSS], number)
            results.append(
                Result(
                    number,
                    mean_loss(self._topology, ranks[:, _LOSS]),
                    learning_rate(self._config, number),
                    mean_loss(self._topology, ranks[:, _NORM]),
                    ranks[:, _COUNTERS:].sum(0).view(2, -1).long(),
                    bool(ranks[:, _STOP].any()),
                )
            )
        return results

    def counts(self, name: str) -> bool:
        """See :class:`Updater`; replicas differ, but are one model."""
        return self._topology.dp == 0

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """See :class:`Updater`: with what all replicas have agreed on."""
        mine = {name: parameter.data for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            parameter.data = self.whole[name].data
        try:
            yield
        finally:
            for name, parameter in self.parameters.items():
                parameter.data = mine[name]

    def state(self) -> dict[str, Tensor]:
        """See :class:`Updater`: the outer optimizer's, and what is under way, for which it waits."""
        self._sync.arrived()
        outer = self._sync.outer.state
        found = {
            f"outer.{name}": outer[parameter][_MOMENTUM]
            for name, parameter in self.whole.items()
            if parameter in outer
        }
        if self._delays:
            flags = [fragment.under_way for fragment in self._sync.fragments]
            self._under_way.copy_(torch.tensor(flags))
            found["under_way"] = self._under_way
            for fragment in self._sync.fragments:
                found |= {f"arrived.{name}": tensor for name, tensor in fragment.differences.items()}
        return found

    def resume(self, step: int) -> None:
        """See :class:`Updater`."""
        self._sync.resume(step, self._under_way.bool().tolist())

"""Train replicas apart, each by an optimizer of its own; a subclass says when and how they synchronise.

Nothing else passes between replicas. Each clips its gradient by its own norm, and the ranks' reports of their steps
travel when replicas meet, and every :data:`REPORT_EVERY` steps: a rank that is asked to stop is heard no later.
"""

from __future__ import annotations

import abc
import contextlib
import math
from collections.abc import Callable, Iterator

from torch import Tensor

from hybridcomp_lab.train.config import TrainConfig
from hybridcomp_lab.train.optimizer.optimizers import learning_rate
from hybridcomp_lab.train.optimizer.update import Replicas, Result, Updater, check_losses, mean_loss
from hybridcomp_lab.train.parallel.exchange import Exchange
from hybridcomp_lab.train.parallel.stages import RankModel
from hybridcomp_lab.train.topology import Topology

_LOSS, _NORM, _STOP, _COUNTERS = range(4)  # columns of a report

REPORT_EVERY = 10
"""Steps from one report of all ranks to the next, however rarely replicas meet."""


def reports(step: int, *, last: bool) -> bool:
    """Tell whether all ranks report after a step, from 0, whether or not replicas have met."""
    return last or (step + 1) % REPORT_EVERY == 0


class ApartUpdater(Updater):
    """Optimizer of this replica's parameters, which are its own until replicas meet.

    A subclass sets ``whole``, the model that is evaluated, by name, in the parameters' shapes.

    Args:
        model: stages of this rank.
        config, topology, traffic, stop_requested: see :class:`Updater`.
    """

    def __init__(
        self,
        model: RankModel,
        config: TrainConfig,
        topology: Topology,
        traffic: Callable[[], Tensor],
        stop_requested: Callable[[], bool],
    ) -> None:
        about = config, topology, traffic, stop_requested
        mine = model.parameters
        super().__init__(mine, model.split, *about, partial=model.partial, apart=frozenset(mine))
        self._told: list[list[float]] = []

    @abc.abstractmethod
    def synchronise(self, step: int, *, last: bool) -> bool:
        """Run the synchronisation that is due after this replica's step; return whether all replicas have met.

        After the last step of all, all parameters are averaged: replicas end as one.

        Args:
            step: step from 0.
            last: see :meth:`hybridcomp_lab.train.pipelines.Schedule.train`.
        """

    def update(self, step: int, loss: float, *, last: bool) -> list[Result]:
        """Complete, clip and apply this replica's gradient, and run the synchronisation that is due.

        Args:
            step: step from 0.
            loss: mean loss of this replica's batch, on its last stage; ignored elsewhere.
            last: see :meth:`hybridcomp_lab.train.pipelines.Schedule.train`.

        Returns:
            The results of the steps since the last reports, where there are new ones; else none.
        """
        self.complete_gradients()
        norm = self._replica_norm()
        self.apply(step, norm)
        met = self.synchronise(step, last=last)
        counters = self._traffic()
        self._told.append([loss, norm, float(self._stop_requested()), *counters.flatten().tolist()])
        return self._results(step) if met or reports(step, last=last) else []

    def _replica_norm(self) -> float:
        """Compute the norm of this replica's gradient, alike on all its ranks; collective over tp and pp."""
        return math.sqrt(self._summed(self.square_sums()[2], "tp", "pp"))

    def _results(self, step: int) -> list[Result]:
        """Tell all ranks about the steps since the last time; ``step`` is the newest. Collective."""
        told, self._told = self._told, []
        exchange = Exchange([*(value for row in told for value in row), *self.told()])
        everyone = exchange.wait()
        length = len(told) * len(told[0])
        steps = everyone[:, :length].reshape(-1, len(told), len(told[0])).unbind(1)
        replicas = self.heard(everyone[:, length:])
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
                    replicas if number == step else None,
                )
            )
        return results

    def told(self) -> list[float]:
        """Return the numbers that this rank reports beside its steps: equally many on all ranks."""
        return []

    def heard(self, everyone: Tensor) -> Replicas | None:
        """Return the ranks' reports beside their steps, fp64 [ranks, numbers], as a state; None without numbers."""
        return None

    def counts(self, name: str) -> bool:
        """Tell whether a parameter counts, see :class:`Updater`; replicas differ, but are one model."""
        return self._topology.dp == 0

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Have the model compute with ``whole``, see :class:`Updater`, not with this replica's parameters."""
        mine = {name: parameter.data for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            parameter.data = self.whole[name].data
        try:
            yield
        finally:
            for name, parameter in self.parameters.items():
                parameter.data = mine[name]

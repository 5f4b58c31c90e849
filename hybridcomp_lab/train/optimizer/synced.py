"""Synchronise replicas rarely: local SGD, DiLoCo.

After Stich 2019, "Local SGD Converges Fast and Communicates Little" (arXiv 1805.09767), and Douillard et al. 2023,
"DiLoCo: Distributed Low-Communication Training of Language Models" (arXiv 2311.08105) and 2025, "Streaming DiLoCo with
overlapping communication" (arXiv 2501.18512). Ranks that have the same part of each replica synchronise it:
:class:`hybridcomp.torch.sync.synchronizer.Synchronizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from hybridcomp.policy import Policy
from hybridcomp.torch.hook.averager import Averager
from hybridcomp.torch.sync.cutting import runs
from hybridcomp.torch.sync.diloco import nesterov
from hybridcomp.torch.sync.synchronizer import Synchronizer
from hybridcomp_lab.train.config import TrainConfig
from hybridcomp_lab.train.optimizer.apart import ApartUpdater
from hybridcomp_lab.train.parallel.stages import RankModel
from hybridcomp_lab.train.sync import DiLoCo
from hybridcomp_lab.train.topology import Topology

_MOMENTUM = "momentum_buffer"  # key in the state of torch's SGD


class SyncedUpdater(ApartUpdater):
    """Optimizer of this replica's parameters, with an outer optimizer of the parameters that all replicas agree on.

    Args:
        how: method of synchronisation.
        model: stages of this rank.
        policy: policy whose section ``dp`` says how the replicas' messages are compressed.
        config, topology, traffic, stop_requested: see :class:`Updater`.

    Attributes:
        whole: parameters that all replicas have agreed on, by name; they are the model that is evaluated.
    """

    def __init__(
        self,
        how: DiLoCo,
        model: RankModel,
        policy: Policy,
        config: TrainConfig,
        topology: Topology,
        traffic: Callable[[], Tensor],
        stop_requested: Callable[[], bool],
    ) -> None:
        super().__init__(model, config, topology, traffic, stop_requested)
        stage = model.stages[0].index if len(model.stages) == 1 else None
        averager = Averager(policy, kind="sync", axis="dp", group=topology.group("dp"), stage=stage)

        def outer(parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
            return nesterov(parameters, how.lr, how.momentum)

        self._sync = Synchronizer(
            runs(model.parameters, how.fragments),
            averager,
            outer,
            every=how.every,
            delay=how.delay,
            alpha=how.alpha,
        )
        self.whole = self._sync.globals
        self._delays = how.delay > 0
        self._under_way = torch.zeros(how.fragments, dtype=torch.int64)
        for parameter in self.whole.values() if how.momentum else ():  # a checkpoint is loaded into it
            self._sync.outer.state[parameter][_MOMENTUM] = torch.zeros_like(parameter)

    def weigh(self, weight: float) -> None:
        """Have this replica count ``weight`` times as much as the mean replica in the next outer steps."""
        self._sync.weight = weight

    def synchronise(self, step: int, *, last: bool) -> bool:
        """Start and end the outer steps that are due, see :class:`ApartUpdater`."""
        self._sync.advance()
        if step + 1 == self._config.steps:
            self._sync.average(untouched=True)
        if last:
            self._sync.arrived()  # its bytes count as training's, not as those of what follows
        return self._sync.met

    def state(self) -> dict[str, Tensor]:
        """Return the outer optimizer's state and averages, waiting for those under way; see :class:`Updater`."""
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

"""Give each replica a part of a step in proportion to its speed, and merge replicas weighted by their batches.

After Ma, Rusu, Wu and Sim, "Adaptive Elastic Training for Sparse Deep Learning on Heterogeneous Multi-GPU Servers"
(arXiv 2110.07029): batch sizes and learning rates follow the replicas' speed, and a merge weighs replicas by their
share. Here all replicas make equally many updates, so that the weights are those of their batches. A step has the same
number of micro-batches in all, on whichever replicas: tokens per step stay as they are. Two things differ from the
paper: shares are found at once from measured times (:func:`hybridcomp_lab.train.shares.divide`), not by a step towards
them in each round, and no replica is favoured at random.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hybridcomp.policy import Policy
from hybridcomp_lab.train.config import TrainConfig
from hybridcomp_lab.train.optimizer.synced import SyncedUpdater
from hybridcomp_lab.train.optimizer.update import Replicas, Result
from hybridcomp_lab.train.parallel.stages import RankModel
from hybridcomp_lab.train.shares import Shares, decide, parse_shares
from hybridcomp_lab.train.sync import Elastic, frozen_shares
from hybridcomp_lab.train.topology import Topology


class ElasticUpdater(SyncedUpdater):
    """Local SGD of replicas that have different numbers of micro-batches, which follow their speed.

    The learning rate of a replica is the configuration's times its share over the mean share.

    Args:
        how: method of synchronisation.
        model, policy, config, topology, traffic, stop_requested: see :class:`SyncedUpdater`.

    Attributes:
        clock: function that returns seconds on this rank.
    """

    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(
        self,
        how: Elastic,
        model: RankModel,
        policy: Policy,
        config: TrainConfig,
        topology: Topology,
        traffic: Callable[[], Tensor],
        stop_requested: Callable[[], bool],
    ) -> None:
        super().__init__(how, model, policy, config, topology, traffic, stop_requested)
        self._least, self._gain = how.least, how.gain
        self._frozen = frozen_shares(config)
        self._adapts = not (how.frozen or how.shares)
        shares = parse_shares(how.shares) if how.shares else (config.micro_batches,) * config.dp
        # Both are in checkpoints: the present shares, and the replicas' micro-batches since the last merge.
        self._shares = torch.tensor(shares)
        self._trained = torch.zeros_like(self._shares)
        self._met = False
        self._began = self._seconds = 0.0
        self._timed = 0  # micro-batches of this replica in those seconds

    @property
    def shares(self) -> Shares:
        """Return the micro-batches of each replica in the next step."""
        return tuple(self._shares.tolist())

    @property
    def _mine(self) -> int:
        return self.shares[self._topology.dp]

    def begin(self) -> Sequence[int]:
        """Begin a step, see :class:`Updater`, and start the clock."""
        self._began = self.clock()
        return self.shares

    def rate(self, step: int) -> float:
        """Return the learning rate, see :class:`Updater`, scaled by the size of this replica's batch."""
        return super().rate(step) * self._mine / self._config.micro_batches

    def update(self, step: int, loss: float, *, last: bool) -> list[Result]:
        """Add up the timed passes of the step, then update as :class:`ApartUpdater` does."""
        self._seconds += self.clock() - self._began
        self._timed += self._mine
        self._trained += self._shares
        return super().update(step, loss, last=last)

    def synchronise(self, step: int, *, last: bool) -> bool:
        """Merge replicas, see :class:`ApartUpdater`, by each one's micro-batches since the last merge."""
        self.weigh(int(self._trained[self._topology.dp]) * self._config.dp / int(self._trained.sum()))
        self._met = super().synchronise(step, last=last)
        if self._met:
            self._trained.zero_()
        return self._met

    def told(self) -> list[float]:
        """Return this rank's seconds of passes, and their micro-batches, for a report; see :class:`ApartUpdater`."""
        told = [self._seconds, float(self._timed)]
        if self._met:
            self._seconds, self._timed = 0.0, 0
        return told

    def heard(self, everyone: Tensor) -> Replicas:
        """Decide the next round's shares, where one has ended, see :class:`ApartUpdater`."""
        if self._met and self._frozen:
            for step, shares in self._frozen:
                if step <= self._sync.step:
                    self._shares.copy_(torch.tensor(shares))
        elif self._met and self._adapts:
            slowest = (
                (everyone[:, 1] / everyone[:, 0]).view(-1, self._config.dp, self._config.tp).amin((0, 2))
            )
            self._shares.copy_(torch.tensor(decide(self.shares, slowest.tolist(), self._least, self._gain)))
        return Replicas(shares=self.shares)

    def state(self) -> dict[str, Tensor]:
        """Return the state, see :class:`SyncedUpdater`, with the shares and the micro-batches since the last merge."""
        return {**super().state(), "shares": self._shares, "trained": self._trained}

"""Find the thresholds of the values that stages send on, alike on all ranks that need one.

A threshold is found by the rule of DCT (:mod:`hybridcomp.policy.adapt.thresholds`), in the last forward pass of a
step, if so many steps have passed since it was found, or if the share of the step's values that went on has drifted
off. It is then the quantile of that pass's values, the mean over replicas and over parts of sequences. So it holds
from the next step on, whatever the schedule, and needs no message where a stage has one rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.policy.adapt.thresholds import is_stale, threshold_of, upper_quantile
from hybridcomp_lab.train.config import TrainConfig
from hybridcomp_lab.train.model.neurons import Neurons
from hybridcomp_lab.train.parallel.exchange import sum_exactly
from hybridcomp_lab.train.parallel.stages import RankModel
from hybridcomp_lab.train.topology import Topology


def find_thresholds(model: RankModel, config: TrainConfig, topology: Topology) -> None:
    """Have training's forward passes find the thresholds of this rank's stages from now on."""
    axes = ("tp", "dp") if config.sequence_parallel else ("dp",)
    groups = [topology.group(axis) for axis in axes if topology.sizes[axis] > 1]
    for stage in model.stages:
        for module in stage.plain.neurons.values():
            assert isinstance(module, Neurons)
            module.watch = Refresh(module, config.micro_batches, config.pp_neurons_refresh, groups)


class Refresh:
    """Refresh of one threshold, when it is due.

    Args:
        neurons: module with the threshold.
        micro_batches: number of forward passes of a step.
        every: steps from one refresh to the next.
        groups: process groups over which values of the same place in the model are spread.
    """

    def __init__(
        self, neurons: Neurons, micro_batches: int, every: int, groups: Sequence[dist.ProcessGroup]
    ) -> None:
        self._neurons = neurons
        self._micro_batches = micro_batches
        self._every = every
        self._groups = groups
        self._passes = 0
        self._kept = self._all = 0  # numbers of values in the passes of this step

    def __call__(self, x: Tensor, kept: Tensor) -> None:
        """Take notice of a forward pass, in which ``x`` came in and ``kept`` went on; collective over the groups."""
        self._passes += 1
        self._kept += int(torch.count_nonzero(kept))
        self._all += x.numel()
        if self._passes == self._micro_batches:
            self._end_step(x)
            self._passes = self._kept = self._all = 0

    def _end_step(self, x: Tensor) -> None:
        neurons = self._neurons
        neurons.age += 1
        if not (self._is_due() or self._drifts()):
            return
        magnitudes = x.abs().double().flatten().numpy()
        threshold = threshold_of(
            self._mean(upper_quantile(magnitudes, np.ones_like(magnitudes), neurons.share))
        )
        if threshold is not None:
            neurons.threshold.fill_(threshold)
            neurons.age.zero_()

    def _is_due(self) -> bool:
        return not self._neurons.threshold.item() or self._neurons.age.item() >= self._every

    def _drifts(self) -> bool:
        return is_stale(self._mean(self._kept / self._all), self._neurons.share)

    def _mean(self, value: float) -> float:
        """Return the mean over the groups, of equally many values on each rank; collective."""
        total = torch.tensor([value], dtype=torch.float64)
        for group in self._groups:
            total = sum_exactly(total, group) / group.size()
        return total.item()

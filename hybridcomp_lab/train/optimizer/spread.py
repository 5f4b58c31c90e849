"""Estimate how far replicas are apart, from a few of their parameters."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from hybridcomp_lab.train.gossip.rules import Tensors
from hybridcomp_lab.train.topology import Topology

VALUES = 256
"""Number of parameters sampled on each rank: they travel in every report."""


class Sample:
    """Sample of this rank's parameters, at the same random places on all replicas.

    Args:
        tensors: parameters by name.
        seed: seed of the places.

    Attributes:
        values: parameters when last sampled, each times the root of the number that it stands for; zeros after
            the last one where there are fewer than :data:`VALUES`.
    """

    def __init__(self, tensors: Tensors, seed: int) -> None:
        size = sum(tensor.size for tensor in tensors.values())
        places = np.sort(np.random.default_rng(seed).choice(size, min(size, VALUES), replace=False))
        self._parts = []
        first = 0
        for tensor in tensors.values():
            inside = places[(places >= first) & (places < first + tensor.size)] - first
            self._parts.append((tensor.reshape(-1), inside))
            first += tensor.size
        self._factor = math.sqrt(size / len(places))
        self.values = [0.0] * VALUES

    def take(self) -> None:
        """Sample the parameters as they are now."""
        found = np.concatenate([flat[inside].astype(np.float64) for flat, inside in self._parts])
        self.values[: found.size] = (found * self._factor).tolist()

    def spread(self, everyone: Tensor, topology: Topology) -> float:
        """Return the RMS distance of replicas' parameters from their mean, over the RMS of the parameters.

        Args:
            everyone: :attr:`values` of all ranks, fp64 [ranks, :data:`VALUES`].
            topology: mesh of the ranks.
        """
        sizes = topology.sizes
        ranks = [
            [topology.rank_of(pp, dp, tp) for pp in range(sizes["pp"]) for tp in range(sizes["tp"])]
            for dp in range(sizes["dp"])
        ]
        replicas = everyone[torch.tensor(ranks)].flatten(1)  # [dp, values of all their ranks]
        whole = replicas.square().sum()
        return math.sqrt((replicas - replicas.mean(0)).square().sum() / whole) if whole else 0.0

"""Describe the hosts that a job runs on."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from hybridcomp.errors import ConfigError
from hybridcomp.perfmodel import Profile
from hybridcomp_lab.planner.compute import ComputeProfile

WAITING = 0.18
"""Share of a core that a rank takes while it waits for messages: fitted to trainings in the lab, docs/plan.md."""


@dataclass(frozen=True)
class Cluster:
    """Hosts of a job and their speeds.

    Ranks fill the hosts in order, as mpiexec places them: ranks 0 to ``ranks_per_host - 1`` are on the first.

    Attributes:
        hosts: number of hosts.
        ranks_per_host: number of ranks on each host.
        profile: speeds of links and codecs.
        compute: source of the seconds of a model's operations on a rank.
        cores: processor cores that all ranks of all hosts share, as the hosts of a lab on one machine do; None: each
            rank has its own.
        memory: bytes of memory of a rank; None: not known.
        speeds: speed of each host's processors relative to ``compute``; empty: 1 for each. Where ``cores`` are shared,
            the share of a core that a rank of the host gets at most.
        rates: bytes/s of each host's link; empty: ``profile.network.bandwidth`` for each.
        waiting: share of a core that a rank takes while it waits, where ranks share cores.
        swap: bytes/s between a rank's memory and its host's, in each direction, for predictions of swapping; None: not
            known.
    """

    hosts: int
    ranks_per_host: int
    profile: Profile
    compute: ComputeProfile
    cores: float | None = None
    memory: float | None = None
    speeds: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()
    waiting: float = WAITING
    swap: float | None = None

    def __post_init__(self) -> None:
        for name in ("hosts", "ranks_per_host"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("cores", "memory", "swap"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} must be positive and finite, not {value}")
        for name in ("speeds", "rates"):
            values = getattr(self, name)
            if values and len(values) != self.hosts:
                raise ConfigError(
                    f"{name} must have a value for each of {self.hosts} hosts, not {len(values)}"
                )
            if not all(0 < value < math.inf for value in values):
                raise ConfigError(f"{name} must be positive and finite, not {', '.join(map(str, values))}")

    @property
    def ranks(self) -> int:
        """Return the number of ranks on all hosts."""
        return self.hosts * self.ranks_per_host

    @property
    def uneven(self) -> bool:
        """Tell whether hosts differ in speed or in the rate of their links."""
        return len(set(self.speeds)) > 1 or len(set(self.rates)) > 1

    def host(self, rank: int) -> int:
        """Return the host of a rank, from 0."""
        return rank // self.ranks_per_host

    def speed(self, rank: int) -> float:
        """Return the relative speed of a rank's processor."""
        return self.speeds[self.host(rank)] if self.speeds else 1.0

    def slowest(self, ranks: Iterable[int]) -> float:
        """Return the relative speed of the slowest processor of some ranks."""
        return min(map(self.speed, ranks))

    def rate(self, host: int) -> float:
        """Return the bytes/s of a host's link."""
        return self.rates[host] if self.rates else self.profile.network.bandwidth

"""Define the topology of a communicator: the host of each rank."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Topology:
    """Hosts of a communicator's ranks; the same on all ranks.

    Attributes:
        hosts: host number of each rank; hosts are numbered from 0 in the order of their first ranks.
    """

    hosts: tuple[int, ...]

    @classmethod
    def even(cls, ranks: int, ranks_per_host: int) -> Topology:
        """Make hosts of ``ranks_per_host`` consecutive ranks each; the last one may have fewer."""
        return cls(tuple(rank // ranks_per_host for rank in range(ranks)))

    @classmethod
    def of(cls, names: Sequence[Hashable]) -> Topology:
        """Make the topology of ranks whose hosts have these names: equal ones, the same host."""
        numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
        return cls(tuple(numbers[name] for name in names))

    @property
    def count(self) -> int:
        """Return the number of hosts."""
        return max(self.hosts) + 1

    @property
    def largest(self) -> int:
        """Return the number of ranks of the host that has most."""
        return max(self.hosts.count(h) for h in range(self.count))

    @property
    def tiered(self) -> bool:
        """Tell whether there are several hosts, one of which has several ranks: operations may go in two levels."""
        return self.count > 1 and self.largest > 1

    def away(self, rank: int) -> list[bool]:
        """Tell of each rank whether it is on another host than ``rank``."""
        return [host != self.hosts[rank] for host in self.hosts]

    def ranks(self, host: int) -> list[int]:
        """Return the ranks of a host, in order."""
        return [rank for rank, h in enumerate(self.hosts) if h == host]

"""Which ranks of a communicator are on which host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from mpi4py import MPI


@dataclass(frozen=True, slots=True)
class Topology:
    """The hosts of a communicator's ranks; the same on all ranks.

    Attributes:
        hosts: per rank, its host's number, from 0 in the order of their first ranks.
    """

    hosts: tuple[int, ...]

    @classmethod
    def of(cls, comm: MPI.Comm, node: MPI.Comm) -> Topology:
        """Ask the ranks of ``comm``; ``node`` has those of this host. Collective."""
        first = np.array([comm.Get_rank()], np.int64)
        node.Allreduce(MPI.IN_PLACE, first, MPI.MIN)
        everyone = np.empty(comm.Get_size(), np.int64)
        comm.Allgather(first, everyone)
        numbers = {rank: i for i, rank in enumerate(dict.fromkeys(everyone.tolist()))}
        return cls(tuple(numbers[rank] for rank in everyone.tolist()))

    @property
    def count(self) -> int:
        """Number of hosts."""
        return max(self.hosts) + 1

    @property
    def largest(self) -> int:
        """Ranks of the host that has most."""
        return max(self.hosts.count(h) for h in range(self.count))

    def ranks(self, host: int) -> list[int]:
        """The ranks of a host, in order."""
        return [rank for rank, h in enumerate(self.hosts) if h == host]

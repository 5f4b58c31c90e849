"""Find the host of each rank of a communicator."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from hybridcomp.schedules.topology import Topology


def discover(comm: MPI.Comm, node: MPI.Comm) -> Topology:
    """Find the hosts of the ranks of ``comm``; ``node`` holds the ranks of this host. Collective."""
    first = np.array([comm.Get_rank()], np.int64)
    node.Allreduce(MPI.IN_PLACE, first, MPI.MIN)
    everyone = np.empty(comm.Get_size(), np.int64)
    comm.Allgather(first, everyone)
    numbers = {rank: i for i, rank in enumerate(dict.fromkeys(everyone.tolist()))}
    return Topology(tuple(numbers[rank] for rank in everyone.tolist()))

"""Find the host of each rank of a communicator: by ``HYBRIDCOMP_HOSTS``, else by who shares memory with whom.

Nothing here initialises MPI.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hybridcomp import variables
from hybridcomp.errors import ConfigError, MismatchError, printable
from hybridcomp.schedules.topology import Topology

if TYPE_CHECKING:
    from mpi4py import MPI

MOST_TOLD = 80  # characters of a list of hosts in a record and in errors


def said_hosts(world: int) -> tuple[int, ...] | None:
    """Return the number of each rank's host as ``HYBRIDCOMP_HOSTS`` says it; None where it is not set.

    Args:
        world: number of the job's ranks.

    Raises:
        ConfigError: the value is no list of hosts, or its ranks are not as many as the job's; names the value.
    """
    counts = variables.HOSTS.read()
    if counts is None:
        return None
    if sum(counts) != world:
        raise ConfigError(
            f"{variables.HOSTS} is {told_hosts()}, which is {sum(counts)} ranks; the job has {world}"
        )
    return tuple(host for host, count in enumerate(counts) for _ in range(count))


def told_hosts() -> str:
    """Return ``HYBRIDCOMP_HOSTS`` as this rank tells the others for :func:`check_hosts`; empty where it is not set.

    The text has at most :data:`MOST_TOLD` characters, and is another one for another list.
    """
    counts = variables.HOSTS.read()
    if counts is None:
        return ""
    if len(set(counts)) == 1:
        return f"{len(counts)}x{counts[0]}"
    text = ",".join(map(str, counts))
    if len(text) <= MOST_TOLD:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return f"{text[: MOST_TOLD - len(digest) - 6]}... ({digest})"


def check_hosts(told: Sequence[str]) -> None:
    """Check that all ranks see the same ``HYBRIDCOMP_HOSTS``, by what :func:`told_hosts` returned on each.

    Raises:
        MismatchError: two ranks see different lists; names the ranks and both lists.
    """
    other = next((rank for rank, text in enumerate(told) if text != told[0]), None)
    if other is not None:
        mine, theirs = (printable(told[rank]) or "none" for rank in (0, other))
        raise MismatchError(
            f"the ranks have different lists of hosts: rank 0 has {variables.HOSTS}={mine}, rank {other} has {theirs}; "
            "give all ranks the same"
        )


def hosts_of(world: int, ranks: Sequence[int], names: Sequence[Hashable]) -> Topology:
    """Return the hosts of some ranks of a job: as ``HYBRIDCOMP_HOSTS`` says, else by the names of their hosts.

    Args:
        world: number of the job's ranks.
        ranks: number of each rank in the job; negative for those of another job, about which the variable says nothing.
        names: for each rank, a value that is equal where hosts are.

    Raises:
        ConfigError: see :func:`said_hosts`.
    """
    said = said_hosts(world)
    if said is None or min(ranks) < 0:
        return Topology.of(names)
    return Topology.of([said[rank] for rank in ranks])


def discover(comm: MPI.Comm, node: MPI.Comm) -> Topology:
    """Find the hosts of the ranks of ``comm``; ``node`` holds the ranks of this host, in their order. Collective."""
    first = np.array([comm.Get_rank()], np.int64)
    node.Bcast(first)
    everyone = np.empty(comm.Get_size(), np.int64)
    comm.Allgather(first, everyone)
    return Topology.of(everyone.tolist())

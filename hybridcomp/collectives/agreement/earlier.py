"""Remember what ranks found out about each other, so that the next communicators of the same ranks need not ask again.

Which ranks share a host, and whose arenas a rank has mapped, takes several collectives of MPI's to find out, and is the
same for all communicators of the same processes. Each rank proposes one earlier communicator that had all the ranks;
only where all propose the same one do they take over what they know from it.

``MPI_Comm_create_group`` has no form that does not wait inside MPI, where ranks that share a core spend their time on
waiting for each other's turns. So a communicator that was made by it for ranks that had one before stays, and later
ones are duplicates of it (:class:`Bases`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mpi4py import MPI

from hybridcomp.collectives.transport.arena import Arena, shares_memory
from hybridcomp.collectives.transport.topology import told_hosts
from hybridcomp.schedules.topology import Topology

_MOST = 64  # communicators that are remembered, and bases that are kept
_MOST_SEEN = 4096


class Surroundings(NamedTuple):
    """Hosts of a communicator's ranks, and the memory that this rank shares with those of its own.

    Attributes:
        topology: which rank is on which host.
        neighbours: arenas of the other ranks of this host, by rank.
    """

    topology: Topology
    neighbours: dict[int, Arena]


class Earlier(NamedTuple):
    """An earlier communicator: its ranks' findings about each other, by their ranks in the job.

    Attributes:
        key: key of the communicator; 0 for none.
        shares: whether the environment let ranks share memory then, and what it said of their hosts.
        hosts: number of each rank's host.
        neighbours: as in :class:`Surroundings`.
        settings: settings of rank 0 that all ranks have; None where they were not told.
    """

    key: int
    shares: tuple[bool, str]
    hosts: dict[int, int]
    neighbours: dict[int, Arena]
    settings: str | None = None

    def of(self, ranks: Sequence[int]) -> Surroundings:
        """Return what this rank knows of some of the ranks.

        Args:
            ranks: ranks in the job of a new communicator's ranks.
        """
        topology = Topology.of([self.hosts[rank] for rank in ranks])
        neighbours = {i: self.neighbours[rank] for i, rank in enumerate(ranks) if rank in self.neighbours}
        return Surroundings(topology, neighbours)


NONE = Earlier(0, (False, ""), {}, {})
_remembered: dict[int, Earlier] = {}


def propose(ranks: Sequence[int]) -> Earlier:
    """Return an earlier communicator that had all the ranks, on all ranks the same one as a rule; :data:`NONE` if none.

    Args:
        ranks: ranks in the job of a new communicator's ranks; negative for those of another job.
    """
    shares = shares_memory(), told_hosts()
    found = [
        one
        for one in _remembered.values()
        if one.shares == shares and all(rank in one.hosts for rank in ranks)
    ]
    return min(found, key=lambda one: one.key, default=NONE)


def remember(key: int, ranks: Sequence[int], around: Surroundings) -> Earlier:
    """Remember what the ranks of a communicator have found out; return it.

    Args:
        key: key of the communicator.
        ranks: ranks in the job of its ranks.
        around: what this rank knows of them.
    """
    hosts = dict(zip(ranks, around.topology.hosts, strict=True))
    neighbours = {ranks[rank]: arena for rank, arena in around.neighbours.items()}
    one = Earlier(key, (shares_memory(), told_hosts()), hosts, neighbours)
    _remembered[key] = one
    if len(_remembered) > _MOST:
        del _remembered[next(iter(_remembered))]
    return one


def told(earlier: Earlier, settings: str) -> None:
    """Remember the settings of rank 0 that the ranks of a communicator have been told."""
    if earlier.key in _remembered:
        _remembered[earlier.key] = _remembered[earlier.key]._replace(settings=settings)


def forget() -> None:
    """Forget everything: the next communicator finds it out anew."""
    _remembered.clear()


def known_to_mpi(comm: MPI.Comm, ranks: Sequence[int]) -> bool:
    """Tell whether MPI says who shares memory with whom among these ranks, and not the communicator's own class."""
    return type(comm) is MPI.Intracomm and all(rank >= 0 for rank in ranks)


class Bases:
    """Communicators of MPI's that nothing is sent on, of which others of the same ranks are duplicates.

    All ranks of a base keep it, or none does: they agree on it when they make it. Where making a communicator fails,
    ranks may have taken different numbers of its steps, and the base is dropped.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], MPI.Intracomm] = {}
        self._seen: set[tuple[int, ...]] = set()

    def find(self, ranks: Sequence[int]) -> MPI.Intracomm | None:
        """Return the base of these ranks in the job, in this order; None if there is none."""
        return self._kept.get(tuple(ranks))

    def wanted(self, ranks: Sequence[int]) -> bool:
        """Tell whether this rank would keep a base: where the ranks had a communicator before."""
        if len(self._seen) > _MOST_SEEN:
            self._seen.clear()
        seen = tuple(ranks) in self._seen
        self._seen.add(tuple(ranks))
        return seen and len(self._kept) < _MOST

    def keep(self, ranks: Sequence[int], base: MPI.Intracomm) -> None:
        """Keep a base."""
        self._kept[tuple(ranks)] = base

    def drop(self, ranks: Sequence[int]) -> None:
        """Forget the base of these ranks; MPI may still be at work on it, so it is not freed."""
        self._kept.pop(tuple(ranks), None)


bases = Bases()

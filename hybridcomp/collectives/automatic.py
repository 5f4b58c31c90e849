"""Connect the policy ``auto`` to a communicator: its measurements, exchanges and changes there.

Groups whose ranks hold copies of the same parameters, such as the dp groups of the ranks of a tp group, must decide
alike, or the copies drift apart: they gather their figures over all of their ranks, from one profile.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from mpi4py import MPI

from hybridcomp.collectives.algorithms.selection import Chooser
from hybridcomp.collectives.figures import check_inside, check_sizes
from hybridcomp.collectives.gathering import Gathers, gather
from hybridcomp.collectives.stats import StatRow
from hybridcomp.errors import MismatchError
from hybridcomp.perfmodel import Profile
from hybridcomp.policy import Policy
from hybridcomp.policy.auto.cost import Place
from hybridcomp.policy.auto.decider import Decider
from hybridcomp.policy.auto.freeze import freezer
from hybridcomp.policy.auto.reviews import Reviews


class Decides(Gathers, Protocol):
    """Communicator whose choices ``auto`` makes: see :class:`~hybridcomp.collectives.session.Session`."""

    @property
    def policy(self) -> Policy:
        """Return its policy."""

    def stats(self) -> list[StatRow]:
        """Return its statistics."""


class _GroupFacts(NamedTuple):
    """Facts about a group, as one rank tells them before groups decide together.

    Attributes:
        ranks, hosts, ranks_per_host, compiled: fields of its :class:`.Place`.
        policy: number made from the digest of its policy.
        outside: lowest rank of the group that the larger communicator does not have; -1 where it has all.
    """

    ranks: int
    hosts: int
    ranks_per_host: int
    compiled: int
    policy: int
    outside: int


class Automatic:
    """Decisions of ``auto`` for one communicator.

    Args:
        comm: communicator to decide for, which keeps this object.
        place: its ranks and hosts.
        anew: reference to its method that forgets what was chosen before a decision changed.

    Attributes:
        together: larger communicator, whose ranks decide together; None where the communicator's own do.
    """

    def __init__(self, comm: Decides, place: Place, anew: weakref.WeakMethod[Callable[[], None]]) -> None:
        self._comm = weakref.proxy(comm)
        self._own = place
        self._anew = anew
        self._reviews: Reviews | None = None
        self._place: Place | None = None
        self.together: Decides | None = None

    def join(self, larger: Decides) -> None:
        """Decide together with the other groups of a larger communicator from now on; collective over that.

        Raises:
            ValueError: the larger communicator lacks a rank of the group, or its groups have unlike numbers of ranks.
            MismatchError: the groups have unlike policies.
        """
        comm, own = self._comm, self._own
        inside = MPI.Group.Translate_ranks(
            comm.mpi.Get_group(), list(range(comm.size)), larger.mpi.Get_group()
        )
        outside = next((rank for rank, found in enumerate(inside) if found == MPI.UNDEFINED), -1)
        digest = int(comm.policy.digest[:12], 16)  # a float64 holds 48 bits exactly
        mine = _GroupFacts(own.ranks, own.hosts, own.ranks_per_host, own.compiled, digest, outside)
        groups = [_GroupFacts(*map(int, row)) for row in gather(larger, np.array(mine, np.float64))()]
        _check(groups, larger.axis)
        hosts, per_host = (max(column) for column in list(zip(*groups, strict=True))[1:3])
        self._place = Place(comm.size, hosts, per_host, all(group.compiled for group in groups))
        self.together = larger

    def begin(self, policy: Policy, chooser: Chooser, profile: Profile) -> Decider | None:
        """Return the decider of a policy, with nothing decided; None where the policy leaves nothing to decide.

        Args:
            policy: policy of the communicator.
            chooser: chooser of its algorithms, which follow the measurements of its links.
            profile: profile of rank 0, of the larger communicator where groups decide together.
        """
        comm, self._reviews = self._comm, None
        chooser.profile = profile
        if not policy.decides or comm.size == 1:
            return None
        decider = Decider(policy, profile, self._place or self._own)
        if policy.auto is not None and policy.auto.freeze is not None and MPI.COMM_WORLD.Get_rank() == 0:
            freezer.add(policy.auto, decider)

        def changed() -> None:
            chooser.profile = decider.profile
            anew = self._anew()
            if anew is not None:
                anew()

        starter: Any = comm
        self._reviews = Reviews(
            decider, lambda: [row.measured for row in comm.stats()], starter.gather_figures, changed
        )
        return decider

    def review(self, operation: int) -> int:
        """Do the reviews due before the operation of this number; return how many operations pass until the next."""
        assert self._reviews is not None
        return self._reviews.review(operation)


def _check(groups: Sequence[_GroupFacts], axis: str) -> None:
    """Check that the groups of a larger communicator can decide together: with the same outcome on all ranks."""
    where = f"on axis {axis!r}"
    check_inside(np.array([group.outside for group in groups]), where)
    for rank, group in enumerate(groups):
        if group.policy != groups[0].policy:
            raise MismatchError(
                f"groups that decide together must have one policy: {where} that of rank {rank} is not that of rank 0"
            )
    check_sizes(np.array([group.ranks for group in groups]), where)

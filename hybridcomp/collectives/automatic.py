"""Connect the policy ``auto`` to a communicator: its measurements, exchanges and changes there."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from hybridcomp.collectives.algorithms.selection import Chooser
from hybridcomp.perfmodel import Profile
from hybridcomp.policy import Policy
from hybridcomp.policy.auto.cost import Place
from hybridcomp.policy.auto.decider import Decider
from hybridcomp.policy.auto.freeze import freezer
from hybridcomp.policy.auto.reviews import Reviews

if TYPE_CHECKING:
    from hybridcomp.collectives.session import Session


class Automatic:
    """Decisions of ``auto`` for one communicator.

    Args:
        comm: communicator to decide for, which keeps this object.
    """

    def __init__(self, comm: Session) -> None:
        self._comm = weakref.proxy(comm)
        self._reviews: Reviews | None = None

    def begin(self, policy: Policy, chooser: Chooser, profile: Profile) -> Decider | None:
        """Return the decider of a policy, with nothing decided; None where the policy leaves nothing to decide.

        Args:
            policy: policy of the communicator.
            chooser: chooser of its algorithms, which follow the measurements of its links.
            profile: profile of rank 0.
        """
        comm, self._reviews = self._comm, None
        chooser.profile = profile
        if not policy.decides or comm.size == 1:
            return None
        topology = comm._topology
        place = Place(comm.size, topology.count, topology.largest, comm._group is not None)
        decider = Decider(policy, profile, place)
        if policy.auto is not None and policy.auto.freeze is not None and MPI.COMM_WORLD.Get_rank() == 0:
            freezer.add(policy.auto, decider)

        def changed() -> None:
            chooser.profile = decider.profile
            comm._choices.forget()
            comm._reconsider()

        starter: Any = comm
        self._reviews = Reviews(
            decider, lambda: [row.measured for row in comm.stats()], starter.gather_figures, changed
        )
        return decider

    def review(self, operation: int) -> int:
        """Do the reviews due before the operation of this number; return how many operations pass until the next."""
        assert self._reviews is not None
        return self._reviews.review(operation)

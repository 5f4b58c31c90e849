"""A communicator with mpi4py's upper-case methods, whose messages a policy compresses.

A program written for ``MPI.Comm`` changes one constructor. A communicator has a
:class:`~hybridcomp.collectives.session.Session`, which holds what its operations share; its methods are functions of
the modules of operations, by kind:

*   :mod:`~.operations.reductions`: Allreduce, Reduce, Reduce_scatter, Reduce_scatter_block, Scan, Exscan.
*   :mod:`~.operations.gather_scatter`: Allgather, Allgatherv, Alltoall, Alltoallv, Alltoallw, Bcast, Barrier.
*   :mod:`~hybridcomp.collectives.operations.rooted`: Gather, Gatherv, Scatter, Scatterv.
*   :mod:`~.operations.p2p`: Send, Ssend, Rsend, Bsend, Recv, Sendrecv, Sendrecv_replace; and Send_array with
    Recv_array, which needs not know the length.
*   :mod:`~.operations.prequests`: Send_init, Recv_init, Allreduce_init and their kin, persistent requests.
*   :mod:`~.operations.persistent`: ``plan_allreduce`` and its kin, operations that are started again and again on
    their own arrays.
*   :mod:`~.operations.neighbors`: Neighbor_allgather, Neighbor_allgatherv, Neighbor_alltoall, Neighbor_alltoallv,
    Neighbor_alltoallw, of communicators with a topology.
*   :mod:`~.operations.probes`: Probe, Iprobe, Mprobe, Improbe, and mpi4py's receives of pickled messages.
*   below: Dup, Split, Create, Create_cart and their kin, which give a communicator of the same policy; Free.
*   It is an ``MPI.Intracomm``: what no policy compresses (methods that pickle, groups, attributes, windows, files, ...)
    is mpi4py's own method, inherited.

The non-blocking twin of a method (``Iallreduce`` of ``Allreduce``) takes the same arguments and returns a
:class:`~hybridcomp.collectives.requests.Request`, which is a request of mpi4py's with a timeout. Waiting ends after the
communicator's ``timeout``.

Buffers are NumPy arrays, torch tensors (bfloat16 included), CuPy arrays, objects with the buffer interface, or mpi4py's
lists such as ``[data, count, datatype]``. The buffers of one call are all in host memory or all on one device,
where they are encoded and decoded in the order of the stream that their library is using; once a call has returned, or
``wait`` has, that stream's later work sees the result. Buffers that only MPI understands (derived datatypes,
``MPI.BOTTOM``, long doubles) go to MPI uncompressed: where a policy compresses, such a buffer must not meet an array of
another rank's in the same operation.

Keyword arguments that mpi4py does not have:

*   ``name``: name of the parameter or bucket. Named messages can be excluded by a policy and get error feedback.
*   ``phase``: ``"forward"`` or ``"backward"``.
*   ``codec``: a codec or spec that this call uses whatever the policy says; ``"none"`` for exact values.
*   ``algorithm``: algorithm in :mod:`hybridcomp.schedules.registry` to use if the call is compressed; the
    environment variable ``HYBRIDCOMP_ALGORITHM`` (of rank 0; ``all_reduce=ring,broadcast=tree``) is for all calls.

Where a policy compresses sends, a status given to a probe tells what the receive will give, and messages that
``Mprobe`` and ``Improbe`` return receive it. ``MPI.Message.Probe(comm)`` is MPI's own and knows no compression;
:class:`~hybridcomp.collectives.operations.probes.Message` has the same functions, which do.

Operations on one communicator must be started in the same order on all its ranks, as MPI asks. Errors: those of mpi4py
for wrong arguments (``ValueError``, ``TypeError``, ``BufferError``, ``MPI.Exception``);
:class:`~hybridcomp.errors.CodecMismatchError` for a buffer that the codec of the call cannot carry; from ``wait`` and
from every blocking method :class:`~hybridcomp.errors.CollectiveTimeoutError`, :class:`~hybridcomp.errors.WireError` and
:class:`~hybridcomp.errors.MismatchError`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Self

from mpi4py import MPI

from hybridcomp.codecs import ErrorFeedback
from hybridcomp.collectives.agreement.making import Founding, bounded
from hybridcomp.collectives.data_path.coding import Array
from hybridcomp.collectives.execution.mpi_collectives import native
from hybridcomp.collectives.execution.steps import Steps
from hybridcomp.collectives.operations import (
    gather_scatter,
    neighbors,
    p2p,
    probes,
    reductions,
    rooted,
)
from hybridcomp.collectives.operations import persistent as plans
from hybridcomp.collectives.operations.fast_path import FastPath
from hybridcomp.collectives.operations.neighbors import Neighborhood
from hybridcomp.collectives.operations.prequests import message, persistent
from hybridcomp.collectives.operations.uncompressed import PassThrough
from hybridcomp.collectives.requests import copy_handle
from hybridcomp.collectives.session import Session
from hybridcomp.collectives.stats import Call, Stats
from hybridcomp.policy import Policy
from hybridcomp.policy.auto.decider import Decider


class Communicator(MPI.Intracomm):
    """Compressed collectives over a duplicate of an MPI communicator. Making one is collective.

    To MPI it is the communicator that its sends and receives run on. Whatever MPI itself does with it (attributes,
    windows, files, pickled objects) does not meet the collectives of operations, which run on :attr:`mpi`.

    Args:
        comm: an mpi4py intracommunicator. Of one with a topology a :class:`CartCommunicator`,
            :class:`GraphCommunicator` or :class:`DistGraphCommunicator` is made.
        policy: a preset's name, ``auto``, a TOML file, a Policy, or a codec spec, which leaves messages below 4 KiB as
            they are (``"int8:min_bytes=0"`` leaves none); the same on all ranks. None means ``auto`` where rank 0 has a
            calibrated profile, ``hybrid`` elsewhere.
        axis: mesh axis that the communicator spans; selects the policy's section.
        timeout: seconds that any operation may take.
        detail: whether ranks compare their operations before these run (:mod:`.consistency`); None to follow
            ``HYBRIDCOMP_DEBUG``.

    Attributes:
        session: policy, transport, statistics and the rest of what operations share, for this package's own use.
        fast_path: native path of operations on plain arrays.
        pass_through: way of operations that no policy compresses.

    Raises:
        PolicyError: the policy cannot be read.
        MismatchError: the ranks' policies differ.
        MPI.Exception: ``comm`` is no intracommunicator, or the null communicator.
    """

    def __new__(cls, comm: MPI.Comm | Founding | None = None, *_args: Any, **_kwargs: Any) -> Self:
        """Make the null communicator of the class for ``comm``'s topology."""
        chosen: type[Any] = cls
        if cls is Communicator and isinstance(comm, MPI.Comm) and comm != MPI.COMM_NULL:
            chosen = _TOPOLOGIES.get(comm.Get_topology(), cls)
        made: Self = MPI.Intracomm.__new__(chosen)
        return made

    def __init__(
        self,
        comm: MPI.Comm | Founding | None = None,
        policy: Any = None,
        axis: str = "default",
        *,
        timeout: float = 300.0,
        detail: bool | None = None,
    ) -> None:
        if isinstance(comm, MPI.Comm) and (comm == MPI.COMM_NULL or comm.Is_inter()):
            raise MPI.Exception(MPI.ERR_COMM)
        if comm is None:  # mpi4py makes null communicators of a class, to take a handle
            return
        if isinstance(comm, Communicator):
            comm = comm.session.p2p
        self.session: Session = Session(comm, policy, axis, timeout, detail)
        self.fast_path = FastPath(self.session)
        self.pass_through = PassThrough(self.session, self.fast_path)
        copy_handle(self.session.p2p, self)

    __hash__ = object.__hash__  # it has state of its own, by which sets and dictionaries tell it from others

    # -- its ranks, and the choices of its policy ----------------------------------------------------

    @property
    def rank(self) -> int:  # type: ignore[override]
        """Return the number of this rank."""
        return self.session.rank

    @property
    def size(self) -> int:  # type: ignore[override]
        """Return the number of ranks."""
        return self.session.size

    @property
    def hosts(self) -> int:
        """Return the number of hosts that the ranks are on."""
        return self.session.hosts

    @property
    def mpi(self) -> MPI.Intracomm:
        """Return the duplicate of the caller's communicator that collectives run on."""
        return self.session.mpi

    @property
    def timeout(self) -> float:
        """Return the seconds that any operation may take; may be set, for operations that start from then on."""
        return self.session.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self.session.timeout = seconds

    @property
    def policy(self) -> Policy:
        """Return the policy that chooses codecs; the same on all ranks, and may be set."""
        return self.session.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self.session.policy = policy

    @property
    def axis(self) -> str:
        """Return the mesh axis that this communicator spans; may be set."""
        return self.session.axis

    @axis.setter
    def axis(self, axis: str) -> None:
        self.session.axis = axis

    @property
    def step(self) -> int:
        """Return the training step, for policies with a warm-up; the caller advances it."""
        return self.session.step

    @step.setter
    def step(self, step: int) -> None:
        self.session.step = step

    @property
    def feedback(self) -> ErrorFeedback:
        """Return the error-feedback memory of named messages."""
        return self.session.feedback

    @property
    def warm(self) -> dict[str, Array]:
        """Return the arrays that linear codecs keep of named messages: PowerSGD's Q."""
        return self.session.warm

    @property
    def decider(self) -> Decider | None:
        """Return the decider of choices that the policy leaves to ``auto``; None where it leaves none."""
        return self.session.decider

    @property
    def deciding(self) -> int:
        """Return the number of ranks that decide together."""
        return self.session.deciding

    def decide_together(self, larger: Communicator) -> None:
        """Decide by the figures of all ranks of a larger communicator, alike in all the groups that it is made of.

        Ranks that hold copies of the same values in groups of their own, such as the dp groups of the ranks of a tp
        group, keep their copies alike where a policy decides as training goes on: ``auto`` and rules with ``adapt``.
        All groups must start the same operations, in the same order. Decisions begin anew. Collective over ``larger``,
        which must not be freed before this communicator.

        Args:
            larger: communicator that has all ranks of this one, and of the other groups.

        Raises:
            ValueError: on all ranks; ``larger`` lacks a rank, or its groups have unlike numbers of ranks.
            MismatchError: on all ranks; the groups have unlike policies.
        """
        self.session.decide_together(larger.session)

    # -- what has been done --------------------------------------------------------------------------

    @property
    def on_start(self) -> Callable[[Call], None] | None:
        """Return the function called with each operation's statistics as it starts; may be set.

        It is called in the thread that starts the operation, before any data moves; not for blocking operations on
        plain arrays that MPI does in one call.
        """
        return self.session.on_start

    @on_start.setter
    def on_start(self, note: Callable[[Call], None] | None) -> None:
        self.session.on_start = note

    def stats(self) -> Stats:
        """Return totals per operation and codec since the communicator was made, on this rank, and means of a step."""
        return self.session.stats()

    @property
    def busy(self) -> bool:
        """Tell whether operations in which all ranks take part are in flight here."""
        return self.session.busy

    @property
    def failed(self) -> bool:
        """Tell whether an operation is known to have failed, here or on another rank: MPI may still be at work."""
        return self.session.failed

    # -- its end -------------------------------------------------------------------------------------

    def Free(self) -> None:
        """Release MPI's resources, once all ranks have called this and no operation is in flight. Collective.

        It waits for no operation: those in flight end as if it had not been called, and a new one raises
        ``MPI.Exception``. A communicator on which an operation has failed, here or on another rank, is only silenced
        (:mod:`~hybridcomp.collectives.failure.release`). Freeing it again has no effect.
        """
        if not self.session.freed:
            copy_handle(MPI.Intracomm(), self)
            self.session.free()

    def Disconnect(self) -> None:
        """Wait until the operations in flight here have ended, well or not; then do as :meth:`Free`. Collective."""
        self.session.finish()
        self.Free()

    def free(self) -> None:
        """Release MPI's resources as :meth:`Free` does, if that has not been done."""
        self.Free()

    # -- reductions -----------------------------------------------------------------------------------

    Allreduce = reductions.Allreduce
    Iallreduce = reductions.Iallreduce
    Reduce_scatter_block = reductions.Reduce_scatter_block
    Ireduce_scatter_block = reductions.Ireduce_scatter_block
    Reduce_scatter = reductions.Reduce_scatter
    Ireduce_scatter = reductions.Ireduce_scatter
    Reduce = reductions.Reduce
    Ireduce = reductions.Ireduce
    Scan = reductions.Scan
    Iscan = reductions.Iscan
    Exscan = reductions.Exscan
    Iexscan = reductions.Iexscan

    # -- from and to every rank -----------------------------------------------------------------------

    Allgather = gather_scatter.Allgather
    Iallgather = gather_scatter.Iallgather
    Allgatherv = gather_scatter.Allgatherv
    Iallgatherv = gather_scatter.Iallgatherv
    Alltoall = gather_scatter.Alltoall
    Ialltoall = gather_scatter.Ialltoall
    Alltoallv = gather_scatter.Alltoallv
    Ialltoallv = gather_scatter.Ialltoallv
    Alltoallw = gather_scatter.Alltoallw
    Ialltoallw = gather_scatter.Ialltoallw
    Bcast = gather_scatter.Bcast
    Ibcast = gather_scatter.Ibcast
    Barrier = gather_scatter.Barrier
    Ibarrier = gather_scatter.Ibarrier

    # -- from and to one rank -------------------------------------------------------------------------

    Gather = rooted.Gather
    Igather = rooted.Igather
    Gatherv = rooted.Gatherv
    Igatherv = rooted.Igatherv
    Scatter = rooted.Scatter
    Iscatter = rooted.Iscatter
    Scatterv = rooted.Scatterv
    Iscatterv = rooted.Iscatterv

    # -- sends and receives ---------------------------------------------------------------------------

    Send = p2p.Send
    Isend = p2p.Isend
    Ssend = p2p.Ssend
    Issend = p2p.Issend
    Rsend = p2p.Rsend
    Irsend = p2p.Irsend
    Bsend = p2p.Bsend
    Ibsend = p2p.Ibsend
    Recv = p2p.Recv
    Irecv = p2p.Irecv
    Sendrecv = p2p.Sendrecv
    Isendrecv = p2p.Isendrecv
    Sendrecv_replace = p2p.Sendrecv_replace
    Isendrecv_replace = p2p.Isendrecv_replace
    Send_array = p2p.Send_array
    Isend_array = p2p.Isend_array
    Recv_array = p2p.Recv_array

    # -- probes ---------------------------------------------------------------------------------------

    Probe = probes.Probe
    Iprobe = probes.Iprobe
    Mprobe = probes.Mprobe
    Improbe = probes.Improbe
    probe = probes.probe
    iprobe = probes.iprobe
    mprobe = probes.mprobe
    improbe = probes.improbe
    recv = probes.recv
    irecv = probes.irecv
    sendrecv = probes.sendrecv

    # -- the same without a request of MPI's, for the rest of this package ----------------------------

    allreduce_immediate = reductions.allreduce_immediate
    start_allreduce = reductions.start_allreduce
    start_reduce_scatter_block = reductions.start_reduce_scatter_block
    start_reduce_scatter = reductions.start_reduce_scatter
    start_reduce = reductions.start_reduce
    start_allgather = gather_scatter.start_allgather
    start_allgatherv = gather_scatter.start_allgatherv
    start_alltoallv = gather_scatter.start_alltoallv
    start_bcast = gather_scatter.start_bcast
    start_barrier = gather_scatter.start_barrier
    start_gather = rooted.start_gather
    start_scatter = rooted.start_scatter
    start_send = p2p.start_send
    start_recv = p2p.start_recv

    # -- operations that are started again and again -------------------------------------------------

    Send_init = message("Send")
    Ssend_init = message("Ssend")
    Bsend_init = message("Bsend")
    Rsend_init = message("Rsend")
    Recv_init = message("Recv")
    Bcast_init = persistent("Bcast", "broadcast")
    Gather_init = persistent("Gather", "gather")
    Gatherv_init = persistent("Gatherv", "gather")
    Scatter_init = persistent("Scatter", "scatter")
    Scatterv_init = persistent("Scatterv", "scatter")
    Allgather_init = persistent("Allgather", "all_gather")
    Allgatherv_init = persistent("Allgatherv", "all_gather")
    Alltoall_init = persistent("Alltoall", "all_to_all")
    Alltoallv_init = persistent("Alltoallv", "all_to_all")
    Alltoallw_init = persistent("Alltoallw", "all_to_all", exact=True)
    Allreduce_init = persistent("Allreduce", "all_reduce", operator_at=2)
    Reduce_init = persistent("Reduce", "reduce", operator_at=2)
    Reduce_scatter_init = persistent("Reduce_scatter", "reduce_scatter", operator_at=3)
    Reduce_scatter_block_init = persistent("Reduce_scatter_block", "reduce_scatter", operator_at=2)
    Scan_init = persistent("Scan", "scan", exact=True, operator_at=2)
    Exscan_init = persistent("Exscan", "exscan", exact=True, operator_at=2)
    Barrier_init = persistent("Barrier", "barrier", exact=True)

    plan_allreduce = plans.plan_allreduce
    plan_reduce_scatter_block = plans.plan_reduce_scatter_block
    plan_allgather = plans.plan_allgather
    plan_bcast = plans.plan_bcast

    # -- other communicators -------------------------------------------------------------------------

    def Dup(self, info: MPI.Info | None = None) -> Self:
        """Make a communicator of the same ranks, policy and axis, with statistics and memory of its own."""
        self._await_ranks("dup")
        made: Self = Communicator(self.session.p2p, self.policy, self.axis, timeout=self.timeout)  # type: ignore[assignment]
        if info is not None and info != MPI.INFO_NULL:
            made.Set_info(info)
        return made

    def Clone(self) -> Self:
        """Make a communicator as :meth:`Dup` does."""
        return self.Dup()

    def Dup_with_info(self, info: MPI.Info) -> Self:
        """Make a communicator as :meth:`Dup` does, with other hints for MPI."""
        return self.Dup(info)

    def Idup(self, info: MPI.Info | None = None) -> tuple[Self, MPI.Request]:
        """Make a communicator as :meth:`Dup` does, which has ended when this returns: so has the request."""
        return self.Dup(info), _ended()

    def Idup_with_info(self, info: MPI.Info) -> tuple[Self, MPI.Request]:
        """Make a communicator as :meth:`Idup` does, with other hints for MPI."""
        return self.Idup(info)

    def Split(self, color: int = 0, key: int = 0) -> Any:
        """Make a communicator of the ranks of the same color; return ``MPI.COMM_NULL`` for ``MPI.UNDEFINED``."""
        self._await_ranks("split")
        return self._made("split", lambda: self.session.p2p.Split(color, key))

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> Any:
        """Make a communicator of the ranks of one kind, such as those that share memory."""
        self._await_ranks("split_type")
        return self._made("split_type", lambda: self.session.p2p.Split_type(split_type, key, info))

    def Create(self, group: MPI.Group) -> Any:
        """Make a communicator of a group's ranks; return ``MPI.COMM_NULL`` on the others."""
        self._await_ranks("create")
        return self._made("create", lambda: self.session.p2p.Create(group))

    def Create_group(self, group: MPI.Group, tag: int = 0) -> Any:
        """Make a communicator as :meth:`Create` does, called by the group's ranks alone."""
        return self._made("create_group", lambda: self.session.p2p.Create_group(group, tag))

    def Create_cart(self, dims: Any, periods: Any = None, reorder: bool = False) -> Any:
        """Make a :class:`CartCommunicator` of a grid; the arguments are mpi4py's."""
        self._await_ranks("create_cart")
        return self._made("create_cart", lambda: self.session.p2p.Create_cart(dims, periods, reorder))

    def Create_graph(self, index: Any, edges: Any, reorder: bool = False) -> Any:
        """Make a :class:`GraphCommunicator`; the arguments are mpi4py's."""
        self._await_ranks("create_graph")
        return self._made("create_graph", lambda: self.session.p2p.Create_graph(index, edges, reorder))

    def Create_dist_graph_adjacent(
        self,
        sources: Any,
        destinations: Any,
        sourceweights: Any = None,
        destweights: Any = None,
        info: MPI.Info = MPI.INFO_NULL,
        reorder: bool = False,
    ) -> Any:
        """Make a :class:`DistGraphCommunicator` of each rank's own neighbours; the arguments are mpi4py's."""
        self._await_ranks("create_dist_graph_adjacent")
        return self._made(
            "create_dist_graph_adjacent",
            lambda: self.session.p2p.Create_dist_graph_adjacent(
                sources, destinations, sourceweights, destweights, info, reorder
            ),
        )

    def Create_dist_graph(
        self,
        sources: Any,
        degrees: Any,
        destinations: Any,
        weights: Any = None,
        info: MPI.Info = MPI.INFO_NULL,
        reorder: bool = False,
    ) -> Any:
        """Make a :class:`DistGraphCommunicator` of edges that any rank may name; the arguments are mpi4py's."""
        self._await_ranks("create_dist_graph")
        return self._made(
            "create_dist_graph",
            lambda: self.session.p2p.Create_dist_graph(
                sources, degrees, destinations, weights, info, reorder
            ),
        )

    def Shrink(self) -> Any:
        """Make a communicator of the ranks that have not failed, where MPI can tell."""
        return self._made("shrink", self.session.p2p.Shrink)

    def Ishrink(self) -> tuple[Any, MPI.Request]:
        """Make a communicator as :meth:`Shrink` does, which has ended when this returns: so has the request."""
        return self.Shrink(), _ended()

    def _await_ranks(self, op: str) -> None:
        """Wait until all ranks are here, so that MPI, which knows no timeout, does not wait for an absent rank."""

        def steps() -> Steps:
            with self.session.transport.post_queue.take().held() as ticket:
                yield from native(self.session.mpi.Ibarrier, ticket)

        self.session.start_steps(steps(), self.session.new_plain_call(op, 0, 0), counted=False).wait()

    def _made(self, op: str, work: Callable[[], MPI.Comm]) -> Any:
        """Return a communicator over the MPI communicator that ``work`` makes, which is freed here."""
        if self.session.freed:
            raise self.session.gone(op)
        what = f"{op} on axis {self.axis!r}, rank {self.rank} of {self.size},"
        comm = bounded(work, lambda: what, self.timeout)
        if comm == MPI.COMM_NULL:
            return comm
        made = Communicator(comm, self.policy, self.axis, timeout=self.timeout)
        comm.Free()  # where making failed, it is kept: MPI may still be at work on it
        return made


def _ended() -> MPI.Request:
    """Return a request of MPI's that is no null request, and that has nothing left to wait for."""
    return MPI.COMM_SELF.Ibarrier()


class TopologyCommunicator(Communicator):
    """:class:`Communicator` whose ranks have neighbours."""

    @functools.cached_property
    def neighborhood(self) -> Neighborhood:
        """Return the neighbours of this rank, for this package's own use."""
        return Neighborhood(self.session.mpi)

    Neighbor_allgather = neighbors.Neighbor_allgather
    Ineighbor_allgather = neighbors.Ineighbor_allgather
    Neighbor_allgatherv = neighbors.Neighbor_allgatherv
    Ineighbor_allgatherv = neighbors.Ineighbor_allgatherv
    Neighbor_alltoall = neighbors.Neighbor_alltoall
    Ineighbor_alltoall = neighbors.Ineighbor_alltoall
    Neighbor_alltoallv = neighbors.Neighbor_alltoallv
    Ineighbor_alltoallv = neighbors.Ineighbor_alltoallv
    Neighbor_alltoallw = neighbors.Neighbor_alltoallw
    Ineighbor_alltoallw = neighbors.Ineighbor_alltoallw

    Neighbor_allgather_init = persistent("Neighbor_allgather", "all_gather", MPI.Topocomm)
    Neighbor_allgatherv_init = persistent("Neighbor_allgatherv", "all_gather", MPI.Topocomm)
    Neighbor_alltoall_init = persistent(
        "Neighbor_alltoall", "all_to_all", MPI.Topocomm, wrong=attrgetter("neighborhood.disordered")
    )
    Neighbor_alltoallv_init = persistent(
        "Neighbor_alltoallv", "all_to_all", MPI.Topocomm, wrong=attrgetter("neighborhood.disordered")
    )
    Neighbor_alltoallw_init = persistent("Neighbor_alltoallw", "all_to_all", MPI.Topocomm, exact=True)


class CartCommunicator(TopologyCommunicator, MPI.Cartcomm):
    """:class:`Communicator` whose ranks form a grid, with the methods of ``MPI.Cartcomm``."""

    def Sub(self, remain_dims: Any) -> Any:
        """Make the communicator of this rank's part of the grid; the argument is mpi4py's."""
        self._await_ranks("sub")
        return self._made("sub", lambda: MPI.Cartcomm(self.session.p2p).Sub(remain_dims))


class GraphCommunicator(TopologyCommunicator, MPI.Graphcomm):
    """:class:`Communicator` whose ranks form a graph, with the methods of ``MPI.Graphcomm``."""


class DistGraphCommunicator(TopologyCommunicator, MPI.Distgraphcomm):
    """:class:`Communicator` whose ranks form a graph that no rank knows whole, as ``MPI.Distgraphcomm``."""


_TOPOLOGIES: dict[int, type[Communicator]] = {
    MPI.CART: CartCommunicator,
    MPI.GRAPH: GraphCommunicator,
    MPI.DIST_GRAPH: DistGraphCommunicator,
}

"""A communicator with mpi4py's upper-case methods, whose messages a policy compresses.

A program written for ``MPI.Comm`` changes one constructor. The methods, by kind:

*   :mod:`~.operations.reductions`: Allreduce, Reduce, Reduce_scatter, Reduce_scatter_block, Scan, Exscan.
*   :mod:`~.operations.gather_scatter`: Allgather, Allgatherv, Alltoall, Alltoallv, Alltoallw, Bcast, Barrier.
*   :mod:`~hybridcomp.collectives.operations.rooted`: Gather, Gatherv, Scatter, Scatterv.
*   :mod:`~.operations.p2p`: Send, Ssend, Rsend, Bsend, Recv, Sendrecv, Sendrecv_replace, Probe, Mprobe;
    and Send_array with Recv_array, which needs not know the length.
*   :mod:`~.operations.prequests`: Send_init, Recv_init, Allreduce_init and their kin, persistent requests.
*   :mod:`~.operations.persistent`: ``plan_allreduce`` and its kin, operations that are started again and again on
    their own arrays.
*   :mod:`~.operations.neighbors`: Neighbor_allgather, Neighbor_allgatherv, Neighbor_alltoall, Neighbor_alltoallv,
    Neighbor_alltoallw, of communicators with a topology.
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

from collections.abc import Callable
from typing import Any, Self

from mpi4py import MPI

from hybridcomp.collectives.agreement.making import Founding, bounded
from hybridcomp.collectives.execution.mpi_collectives import native
from hybridcomp.collectives.execution.steps import Steps
from hybridcomp.collectives.operations import persistent as plans
from hybridcomp.collectives.operations.gather_scatter import GatherScatter
from hybridcomp.collectives.operations.neighbors import Neighbors
from hybridcomp.collectives.operations.p2p import PointToPoint
from hybridcomp.collectives.operations.prequests import message, persistent
from hybridcomp.collectives.operations.reductions import Reductions
from hybridcomp.collectives.operations.rooted import Rooted


class Communicator(Reductions, GatherScatter, Rooted, PointToPoint):
    """Compressed collectives over a duplicate of an MPI communicator. Making one is collective.

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

    Raises:
        PolicyError: the policy cannot be read.
        MismatchError: the ranks' policies differ.
        MPI.Exception: ``comm`` is no intracommunicator, or the null communicator.
    """

    def __new__(cls, comm: MPI.Comm | Founding | None = None, *args: Any, **kwargs: Any) -> Self:
        """Make the null communicator of the class for ``comm``'s topology."""
        chosen: type[Any] = cls
        if cls is Communicator and isinstance(comm, MPI.Comm) and comm != MPI.COMM_NULL:
            chosen = _TOPOLOGIES.get(comm.Get_topology(), cls)
        made: Self = super().__new__(chosen)
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
        if comm is not None:  # mpi4py makes null communicators of a class, to take a handle
            super().__init__(comm, policy, axis, timeout, detail)

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
        made: Self = Communicator(self._p2p, self.policy, self.axis, timeout=self.timeout)  # type: ignore[assignment]
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
        return self._made("split", lambda: self._p2p.Split(color, key))

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> Any:
        """Make a communicator of the ranks of one kind, such as those that share memory."""
        self._await_ranks("split_type")
        return self._made("split_type", lambda: self._p2p.Split_type(split_type, key, info))

    def Create(self, group: MPI.Group) -> Any:
        """Make a communicator of a group's ranks; return ``MPI.COMM_NULL`` on the others."""
        self._await_ranks("create")
        return self._made("create", lambda: self._p2p.Create(group))

    def Create_group(self, group: MPI.Group, tag: int = 0) -> Any:
        """Make a communicator as :meth:`Create` does, called by the group's ranks alone."""
        return self._made("create_group", lambda: self._p2p.Create_group(group, tag))

    def Create_cart(self, dims: Any, periods: Any = None, reorder: bool = False) -> Any:
        """Make a :class:`CartCommunicator` of a grid; the arguments are mpi4py's."""
        self._await_ranks("create_cart")
        return self._made("create_cart", lambda: self._p2p.Create_cart(dims, periods, reorder))

    def Create_graph(self, index: Any, edges: Any, reorder: bool = False) -> Any:
        """Make a :class:`GraphCommunicator`; the arguments are mpi4py's."""
        self._await_ranks("create_graph")
        return self._made("create_graph", lambda: self._p2p.Create_graph(index, edges, reorder))

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
            lambda: self._p2p.Create_dist_graph_adjacent(
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
            lambda: self._p2p.Create_dist_graph(sources, degrees, destinations, weights, info, reorder),
        )

    def Shrink(self) -> Any:
        """Make a communicator of the ranks that have not failed, where MPI can tell."""
        return self._made("shrink", self._p2p.Shrink)

    def Ishrink(self) -> tuple[Any, MPI.Request]:
        """Make a communicator as :meth:`Shrink` does, which has ended when this returns: so has the request."""
        return self.Shrink(), _ended()

    def _await_ranks(self, op: str) -> None:
        """Wait until all ranks are here, so that MPI, which knows no timeout, does not wait for an absent rank."""

        def steps() -> Steps:
            with self.transport.post_queue.take().held() as ticket:
                yield from native(self.mpi.Ibarrier, ticket)

        self.start_steps(steps(), self.new_plain_call(op, 0, 0), counted=False).wait()

    def _made(self, op: str, work: Callable[[], MPI.Comm]) -> Any:
        """Return a communicator over the MPI communicator that ``work`` makes, which is freed here."""
        if self._freed:
            raise self._gone(op)
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


class CartCommunicator(Neighbors, Communicator, MPI.Cartcomm):
    """:class:`Communicator` whose ranks form a grid, with the methods of ``MPI.Cartcomm``."""

    def Sub(self, remain_dims: Any) -> Any:
        """Make the communicator of this rank's part of the grid; the argument is mpi4py's."""
        self._await_ranks("sub")
        return self._made("sub", lambda: MPI.Cartcomm(self._p2p).Sub(remain_dims))


class GraphCommunicator(Neighbors, Communicator, MPI.Graphcomm):
    """:class:`Communicator` whose ranks form a graph, with the methods of ``MPI.Graphcomm``."""


class DistGraphCommunicator(Neighbors, Communicator, MPI.Distgraphcomm):
    """:class:`Communicator` whose ranks form a graph that no rank knows whole, as ``MPI.Distgraphcomm``."""


_TOPOLOGIES: dict[int, type[Communicator]] = {
    MPI.CART: CartCommunicator,
    MPI.GRAPH: GraphCommunicator,
    MPI.DIST_GRAPH: DistGraphCommunicator,
}

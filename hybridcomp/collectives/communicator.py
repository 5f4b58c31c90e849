"""A communicator with mpi4py's upper-case methods, whose messages a policy compresses.

A program written for ``MPI.Comm`` changes one constructor. The methods, by kind:

*   :mod:`~.operations.reductions`: Allreduce, Reduce, Reduce_scatter, Reduce_scatter_block, Scan, Exscan.
*   :mod:`~.operations.gather_scatter`: Allgather, Allgatherv, Alltoall, Alltoallv, Alltoallw, Bcast, Barrier.
*   :mod:`~hybridcomp.collectives.operations.rooted`: Gather, Gatherv, Scatter, Scatterv.
*   :mod:`~.operations.p2p`: Send, Ssend, Rsend, Bsend, Recv, Sendrecv, Sendrecv_replace, Probe, Mprobe;
    and Send_array with Recv_array, which needs not know the length.
*   :mod:`~.operations.persistent`: ``plan_allreduce`` and its kin, operations that are started again and again on
    their own arrays.
*   below: Dup, Clone, Split, Split_type, Create, Create_group, which give a communicator of the same policy; Free.
*   Everything else that ``MPI.Intracomm`` has under a capital letter is MPI's own, uncompressed: the persistent
    ``Allreduce_init`` and ``Send_init``, neighbourhood collectives, groups, names, attributes. Methods that pickle are
    not offered.

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

Operations on one communicator must be started in the same order on all its ranks, as MPI asks. Errors: those of mpi4py
for wrong arguments (``ValueError``, ``TypeError``, ``BufferError``, ``MPI.Exception``);
:class:`~hybridcomp.errors.CodecMismatchError` for a buffer that the codec of the call cannot carry; from ``wait`` and
from every blocking method :class:`~hybridcomp.errors.CollectiveTimeoutError`, :class:`~hybridcomp.errors.WireError` and
:class:`~hybridcomp.errors.MismatchError`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from hybridcomp.collectives.agreement.making import Founding, bounded
from hybridcomp.collectives.execution.mpi_collectives import native
from hybridcomp.collectives.execution.steps import Steps
from hybridcomp.collectives.operations.gather_scatter import GatherScatter
from hybridcomp.collectives.operations.p2p import PointToPoint
from hybridcomp.collectives.operations.persistent import Plans
from hybridcomp.collectives.operations.reductions import Reductions
from hybridcomp.collectives.operations.rooted import Rooted

# Methods whose messages MPI matches by source and tag; MPI's other methods run on the communicator of collectives.
_OF_MESSAGES = frozenset(
    ["Send_init", "Ssend_init", "Bsend_init", "Rsend_init", "Recv_init", "Psend_init", "Precv_init"]
)


class Communicator(Reductions, GatherScatter, Rooted, PointToPoint, Plans):
    """Compressed collectives over a duplicate of an MPI communicator. Making one is collective.

    Args:
        comm: an mpi4py intracommunicator.
        policy: a preset's name, ``auto``, a TOML file, a Policy, or a codec spec; the same on all ranks. None means
            ``auto`` where rank 0 has a calibrated profile, ``hybrid`` elsewhere.
        axis: mesh axis that the communicator spans; selects the policy's section.
        timeout: seconds that any operation may take.
        detail: whether ranks compare their operations before these run (:mod:`.consistency`); None to follow
            ``HYBRIDCOMP_DEBUG``.

    Raises:
        PolicyError: the policy cannot be read.
        MismatchError: the ranks' policies differ.
    """

    def __init__(
        self,
        comm: MPI.Comm | Founding,
        policy: Any = None,
        axis: str = "default",
        *,
        timeout: float = 300.0,
        detail: bool | None = None,
    ) -> None:
        super().__init__(comm, policy, axis, timeout, detail)

    def Get_rank(self) -> int:
        """Return this process's rank."""
        return self.rank

    def Get_size(self) -> int:
        """Return the number of ranks."""
        return self.size

    # -- other communicators -------------------------------------------------------------------------

    def Dup(self) -> Communicator:
        """Make a communicator of the same ranks, policy and axis, with statistics and memory of its own."""
        self._await_ranks("dup")
        return Communicator(self.mpi, self.policy, self.axis, timeout=self.timeout)

    def Clone(self) -> Communicator:
        """Make a communicator as :meth:`Dup` does."""
        return self.Dup()

    def Split(self, color: int = 0, key: int = 0) -> Any:
        """Make a communicator of the ranks of the same color; return ``MPI.COMM_NULL`` for ``MPI.UNDEFINED``."""
        self._await_ranks("split")
        return self._made("split", lambda: self.mpi.Split(color, key))

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> Any:
        """Make a communicator of the ranks of one kind, such as those that share memory."""
        self._await_ranks("split_type")
        return self._made("split_type", lambda: self.mpi.Split_type(split_type, key, info))

    def Create(self, group: MPI.Group) -> Any:
        """Make a communicator of a group's ranks; return ``MPI.COMM_NULL`` on the others."""
        self._await_ranks("create")
        return self._made("create", lambda: self.mpi.Create(group))

    def Create_group(self, group: MPI.Group, tag: int = 0) -> Any:
        """Make a communicator as :meth:`Create` does, called by the group's ranks alone."""
        return self._made("create_group", lambda: self.mpi.Create_group(group, tag))

    def _await_ranks(self, op: str) -> None:
        """Wait until all ranks are here, so that MPI, which knows no timeout, does not wait for an absent rank."""

        def steps() -> Steps:
            with self._transport.post_queue.take().held() as ticket:
                yield from native(self.mpi.Ibarrier, ticket)

        self._start(steps(), self._plain_call(op, 0, 0), counted=False).wait()

    def _made(self, op: str, work: Callable[[], MPI.Comm]) -> Any:
        """Return a communicator over the MPI communicator that ``work`` makes, which is freed here."""
        what = f"{op} on axis {self.axis!r}, rank {self.rank} of {self.size},"
        comm = bounded(work, lambda: what, self.timeout)
        if comm == MPI.COMM_NULL:
            return comm
        made = Communicator(comm, self.policy, self.axis, timeout=self.timeout)
        comm.Free()  # where making failed, it is kept: MPI may still be at work on it
        return made

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class _Own:
    """Method or attribute of MPI's own communicator.

    There is a descriptor for each, since a class with ``__getattr__`` is slow to look up all else.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._communicator = "_p2p" if name in _OF_MESSAGES else "mpi"

    def __get__(self, comm: Communicator | None, owner: type) -> Any:
        return self if comm is None else getattr(getattr(comm, self._communicator), self._name)


for _name in dir(MPI.Intracomm):
    if _name[0].isupper() and not hasattr(Communicator, _name):
        setattr(Communicator, _name, _Own(_name))

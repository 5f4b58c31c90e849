"""A communicator with mpi4py's upper-case methods, whose messages a policy compresses.

Buffers are NumPy arrays, torch tensors (bfloat16 included), CuPy arrays, objects with the buffer interface, or mpi4py's
``[data, count, datatype]`` lists of basic datatypes. Those of one call are all in host memory or all on one device,
where they are encoded and decoded in the order of the stream that their library is using; once a call has returned, or
``wait`` has, that stream's later work sees the result. A method's non-blocking twin (``Iallreduce`` for
``Allreduce``) takes the same arguments and returns a :class:`~hybridcomp.collectives.engine.Request`.

Keyword arguments of ours:

*   ``name``: of the parameter or bucket. Named messages can be excluded by a policy and get error feedback.
*   ``phase``: ``"forward"`` or ``"backward"``.
*   ``codec``: a codec or spec that this call uses whatever the policy says; ``"none"`` for exact.
*   ``algorithm``: of those in :mod:`~hybridcomp.collectives.algorithms`, the one to use if the call is compressed; the
    environment variable ``HYBRIDCOMP_ALGORITHM`` (of rank 0; ``all_reduce=ring,broadcast=tree``) is for all calls.

Operations on one communicator must be started in the same order on all its ranks, as MPI asks. Errors:
``TypeError`` and ``ValueError`` for wrong arguments, :class:`~hybridcomp.errors.CodecMismatchError` for a buffer
that the codec of the call cannot carry; from ``wait`` and from every blocking method
:class:`~hybridcomp.errors.CollectiveTimeoutError`, :class:`~hybridcomp.errors.WireError` and
:class:`~hybridcomp.errors.MismatchError`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from hybridcomp.arrays import Flat
from hybridcomp.collectives.alltoall import Extents
from hybridcomp.collectives.base import CodecLike, Op
from hybridcomp.collectives.buffers import is_in_place, parse
from hybridcomp.collectives.core import Core
from hybridcomp.collectives.engine import Request

Buffer = Any


class Communicator(Core):
    """Compressed collectives over a duplicate of an MPI communicator. Making one is collective.

    Args:
        comm: an mpi4py intracommunicator.
        policy: a preset's name, a TOML file, a Policy, or a codec spec; the same on all ranks.
        axis: the mesh axis that it spans; selects the policy's section.
        timeout: seconds that any operation may take.

    Raises:
        PolicyError: the policy cannot be read.
        MismatchError: the ranks' policies differ.
    """

    def __init__(
        self, comm: MPI.Comm, policy: Any = "hybrid", axis: str = "default", *, timeout: float = 300.0
    ) -> None:
        super().__init__(comm, policy, axis, timeout)

    def Get_rank(self) -> int:
        """This process's rank."""
        return self.rank

    def Get_size(self) -> int:
        """Number of ranks."""
        return self.size

    def Dup(self) -> Communicator:
        """A new communicator of the same ranks, policy and axis, with statistics and memory of its own."""
        return Communicator(self.mpi, self.policy, self.axis, timeout=self.timeout)

    # -- reductions ----------------------------------------------------------------------------------

    def Iallreduce(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        op: Op = MPI.SUM,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
        algorithm: str | None = None,
    ) -> Request:
        """Start :meth:`Allreduce`."""
        recv = parse(recvbuf, writable=True)
        send = recv if is_in_place(sendbuf) else _like(parse(sendbuf), recv, "send", "recv")
        return self.allreduce(send, recv, op, name, phase, codec, algorithm)

    def Allreduce(self, sendbuf: Buffer, recvbuf: Buffer, op: Op = MPI.SUM, **ours: Any) -> None:
        """Reduce over all ranks; every rank gets the same bits.

        Args:
            sendbuf: this rank's values, or ``MPI.IN_PLACE``.
            recvbuf: the result, of the same count and dtype.
            op: an MPI operation, or ``"avg"``. Floats are compressed for ``MPI.SUM`` and ``"avg"`` alone.
            ours: ``name``, ``phase``, ``codec`` (see the module).
        """
        self.Iallreduce(sendbuf, recvbuf, op, **ours).wait()

    def Ireduce_scatter_block(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        op: Op = MPI.SUM,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
        algorithm: str | None = None,
    ) -> Request:
        """Start :meth:`Reduce_scatter_block`."""
        recv = parse(recvbuf, writable=True)
        if is_in_place(sendbuf):
            send, recv = recv, _part(recv, 0, recv.size // self.size)
        else:
            send = _same_dtype(parse(sendbuf), recv)
        return self.reduce_scatter_block(send, recv, op, name, phase, codec, algorithm)

    def Reduce_scatter_block(self, sendbuf: Buffer, recvbuf: Buffer, op: Op = MPI.SUM, **ours: Any) -> None:
        """Reduce ``sendbuf`` (size * n elements) over all ranks; rank r gets block r in ``recvbuf`` (n)."""
        self.Ireduce_scatter_block(sendbuf, recvbuf, op, **ours).wait()

    def Ireduce(self, sendbuf: Buffer, recvbuf: Buffer, op: Op = MPI.SUM, root: int = 0) -> Request:
        """Start :meth:`Reduce`."""
        recv = None if recvbuf is None else parse(recvbuf, writable=True)
        if is_in_place(sendbuf):
            if recv is None:
                raise ValueError("MPI.IN_PLACE needs a receive buffer, and stands only at the root")
            return self.reduce(recv, recv, op, root)
        return self.reduce(parse(sendbuf), recv, op, root)

    def Reduce(self, sendbuf: Buffer, recvbuf: Buffer, op: Op = MPI.SUM, root: int = 0) -> None:
        """Reduce to rank ``root``, uncompressed; ``recvbuf`` may be None elsewhere."""
        self.Ireduce(sendbuf, recvbuf, op, root).wait()

    # -- data movement -------------------------------------------------------------------------------

    def Iallgather(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
        algorithm: str | None = None,
    ) -> Request:
        """Start :meth:`Allgather`."""
        recv = parse(recvbuf, writable=True)
        if is_in_place(sendbuf):
            n = recv.size // self.size
            send = _part(recv, self.rank * n, n)
        else:
            send = _same_dtype(parse(sendbuf), recv)
        return self.allgather(send, recv, name, phase, codec, algorithm)

    def Allgather(self, sendbuf: Buffer, recvbuf: Buffer, **ours: Any) -> None:
        """Gather each rank's ``sendbuf`` (n elements) into ``recvbuf`` (size * n); all ranks get the same bits.

        ``sendbuf`` may be ``MPI.IN_PLACE`` or any part of ``recvbuf``.
        """
        self.Iallgather(sendbuf, recvbuf, **ours).wait()

    def Ialltoall(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
    ) -> Request:
        """Start :meth:`Alltoall`."""
        recv = parse(recvbuf, writable=True)
        send = recv if is_in_place(sendbuf) else _like(parse(sendbuf), recv, "send", "recv")
        if send.size % self.size:
            raise ValueError(
                f"all_to_all of {send.size} elements cannot be split evenly among {self.size} ranks"
            )
        n = send.size // self.size
        extents = [(q * n, n) for q in range(self.size)]
        return self.alltoallv(send, extents, recv, extents, n, name, phase, codec)

    def Alltoall(self, sendbuf: Buffer, recvbuf: Buffer, **ours: Any) -> None:
        """Send equal parts of ``sendbuf`` to all ranks; a rank's own part is copied exactly."""
        self.Ialltoall(sendbuf, recvbuf, **ours).wait()

    def Ialltoallv(
        self,
        sendbuf: Sequence[Any],
        recvbuf: Sequence[Any],
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
    ) -> Request:
        """Start :meth:`Alltoallv`."""
        send, outgoing = self._vector(sendbuf, writable=False)
        recv, incoming = self._vector(recvbuf, writable=True)
        return self.alltoallv(_same_dtype(send, recv), outgoing, recv, incoming, None, name, phase, codec)

    def Alltoallv(self, sendbuf: Sequence[Any], recvbuf: Sequence[Any], **ours: Any) -> None:
        """Send parts of any size: ``[data, counts]``, ``[data, counts, displs]`` or ``[data, (counts, displs)]``.

        An MPI datatype may follow. Parts are compressed whatever their size, since ranks do not know each
        other's totals.
        """
        self.Ialltoallv(sendbuf, recvbuf, **ours).wait()

    def Ibcast(
        self,
        buf: Buffer,
        root: int = 0,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
        algorithm: str | None = None,
    ) -> Request:
        """Start :meth:`Bcast`."""
        return self.bcast(parse(buf, writable=True), root, name, phase, codec, algorithm)

    def Bcast(self, buf: Buffer, root: int = 0, **ours: Any) -> None:
        """Broadcast from ``root``. Where it is compressed, the root, too, ends with the decoded values."""
        self.Ibcast(buf, root, **ours).wait()

    def Igather(self, sendbuf: Buffer, recvbuf: Buffer, root: int = 0) -> Request:
        """Start :meth:`Gather`."""
        return self.gather(parse(sendbuf), None if recvbuf is None else parse(recvbuf, writable=True), root)

    def Gather(self, sendbuf: Buffer, recvbuf: Buffer, root: int = 0) -> None:
        """Gather equal blocks at ``root``, uncompressed; ``recvbuf`` may be None elsewhere."""
        self.Igather(sendbuf, recvbuf, root).wait()

    def Iscatter(self, sendbuf: Buffer, recvbuf: Buffer, root: int = 0) -> Request:
        """Start :meth:`Scatter`."""
        return self.scatter(None if sendbuf is None else parse(sendbuf), parse(recvbuf, writable=True), root)

    def Scatter(self, sendbuf: Buffer, recvbuf: Buffer, root: int = 0) -> None:
        """Scatter equal blocks from ``root``, uncompressed; ``sendbuf`` may be None elsewhere."""
        self.Iscatter(sendbuf, recvbuf, root).wait()

    def Ibarrier(self) -> Request:
        """Start :meth:`Barrier`."""
        return self.barrier()

    def Barrier(self) -> None:
        """Wait until all ranks are here."""
        self.barrier().wait()

    # -- point to point ------------------------------------------------------------------------------

    def Isend(
        self,
        buf: Buffer,
        dest: int,
        tag: int = 0,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
    ) -> Request:
        """Start :meth:`Send`; returns at once. The buffer must stay unchanged until the request is done."""
        return self.send(parse(buf), dest, tag, name, phase, codec)

    def Send(self, buf: Buffer, dest: int, tag: int = 0, **ours: Any) -> None:
        """Send to ``dest``. With ``codec=``, the receiver must give the same."""
        self.Isend(buf, dest, tag, **ours).wait()

    def Irecv(
        self, buf: Buffer, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, *, codec: CodecLike = None
    ) -> Request:
        """Start :meth:`Recv`; returns at once."""
        return self.recv(parse(buf, writable=True), source, tag, codec)

    def Recv(
        self,
        buf: Buffer,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
        *,
        codec: CodecLike = None,
    ) -> None:
        """Receive into ``buf``, which may have room for more; ``status`` is filled with source and tag."""
        request = self.Irecv(buf, source, tag, codec=codec)
        request.wait()
        if status is not None and request.status is not None:
            status.Set_source(request.status.Get_source())
            status.Set_tag(request.status.Get_tag())

    def _vector(self, spec: Sequence[Any], *, writable: bool) -> tuple[Flat, Extents]:
        parts = list(spec)
        datatype = [parts.pop()] if isinstance(parts[-1], MPI.Datatype | str) else []
        if (
            len(parts) == 2
            and isinstance(parts[1], tuple | list)
            and len(parts[1]) == 2
            and _nested(parts[1])
        ):
            parts = [parts[0], *parts[1]]
        if len(parts) not in (2, 3):
            raise TypeError(
                "a vector buffer is [data, counts], [data, counts, displs] or [data, (counts, displs)]"
            )
        flat = parse([parts[0], *datatype] if datatype else parts[0], writable=writable)
        counts = [int(c) for c in parts[1]]
        displs = (
            [int(d) for d in parts[2]]
            if len(parts) == 3
            else [0, *itertools.accumulate(counts)][: len(counts)]
        )
        if len(counts) != self.size or len(displs) != self.size:
            raise ValueError(f"{len(counts)} counts and {len(displs)} displacements for {self.size} ranks")
        for count, displ in zip(counts, displs, strict=True):
            if count < 0 or displ < 0 or displ + count > flat.size:
                raise ValueError(
                    f"elements {displ} to {displ + count} are not within a buffer of {flat.size}"
                )
        return flat, list(zip(displs, counts, strict=True))


def _nested(pair: Sequence[Any]) -> bool:
    return all(hasattr(x, "__len__") for x in pair)


def _part(flat: Flat, start: int, n: int) -> Flat:
    return Flat(flat.data[start : start + n], flat.dtype, (n,), True, flat.is_torch)


def _same_dtype(send: Flat, recv: Flat) -> Flat:
    if send.dtype is not recv.dtype:
        raise TypeError(f"send buffer is {send.dtype.label}, receive buffer {recv.dtype.label}")
    return send


def _like(send: Flat, recv: Flat, a: str, b: str) -> Flat:
    if send.size != recv.size:
        raise ValueError(f"{a} buffer has {send.size} elements, {b} buffer {recv.size}")
    return _same_dtype(send, recv)

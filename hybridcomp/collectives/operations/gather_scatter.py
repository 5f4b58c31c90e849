"""Provide mpi4py's collectives that move data to or from every rank."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from hybridcomp.arrays import Flat
from hybridcomp.collectives.algorithms.schedules import OperationKey
from hybridcomp.collectives.buffers import ForeignBufferError, is_in_place, like, parse, part, same_dtype
from hybridcomp.collectives.choices import CodecLike
from hybridcomp.collectives.execution import progress as engine
from hybridcomp.collectives.operations import flat_gather_scatter, flat_reductions
from hybridcomp.collectives.operations.fast_path import FastPath
from hybridcomp.collectives.operations.fast_path_cache import ForOnceError, Key, Kind
from hybridcomp.collectives.requests import Request
from hybridcomp.collectives.vectors import parse_vector
from hybridcomp.policy import Choice
from hybridcomp.schedules.algorithms.tree import family

Buffer = Any

_BARRIER: Key = ("barrier", 0, None, None, None, None)


class GatherScatter(FastPath):
    """Methods Allgather(v), Alltoall(v, w), Bcast and Barrier of a communicator."""

    # -- all-gather ----------------------------------------------------------------------------------

    def Allgather(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
        algorithm: str | None = None,
    ) -> None:
        """Gather each rank's ``sendbuf`` (n elements) into ``recvbuf`` (size * n); all ranks get the same bits.

        ``sendbuf`` may be ``MPI.IN_PLACE`` or any part of ``recvbuf``.
        """
        key = ("all_gather", 0, name, phase, codec, algorithm)
        if self._done(key, self._gather_scatter, sendbuf, recvbuf):
            return
        return self.start_allgather(sendbuf, recvbuf, name, phase, codec, algorithm).wait()

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
        return Request(self.start_allgather(sendbuf, recvbuf, name, phase, codec, algorithm))

    def start_allgather(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
        algorithm: str | None = None,
    ) -> engine.Request:
        """Start :meth:`Iallgather` as an operation without an MPI request."""
        key = ("all_gather", 0, name, phase, codec, algorithm)
        request = self._begun(key, self._gather_scatter, (sendbuf, recvbuf))
        if request is not None:
            return request
        try:
            recv = parse(recvbuf, writable=True, blocks=self.size)
            if is_in_place(sendbuf):
                n = recv.size // self.size
                send = part(recv, self.rank * n, n)
            else:
                send = same_dtype(parse(sendbuf), recv)
        except ForeignBufferError:
            return self._foreign("all_gather", lambda: self.mpi.Iallgather(sendbuf, recvbuf), codec)
        return flat_gather_scatter.allgather(self, send, recv, name, phase, codec, algorithm)

    def Allgatherv(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
    ) -> None:
        """Gather parts of any size: ``recvbuf`` as in :meth:`Alltoallv`, the same counts on all ranks."""
        self.start_allgatherv(sendbuf, recvbuf, name, phase, codec).wait()

    def Iallgatherv(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
    ) -> Request:
        """Start :meth:`Allgatherv`."""
        return Request(self.start_allgatherv(sendbuf, recvbuf, name, phase, codec))

    def start_allgatherv(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
    ) -> engine.Request:
        """Start :meth:`Iallgatherv` as an operation without an MPI request."""
        try:
            recv, extents = parse_vector(recvbuf, self.size, writable=True)
            mine = part(recv, *extents[self.rank])
            send = mine if is_in_place(sendbuf) else same_dtype(parse(sendbuf), recv)
        except ForeignBufferError:
            return self._foreign("all_gather", lambda: self.mpi.Iallgatherv(sendbuf, recvbuf), codec)
        return flat_gather_scatter.allgatherv(self, send, recv, extents, name, phase, codec)

    # -- all-to-all ----------------------------------------------------------------------------------

    def Alltoall(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
    ) -> None:
        """Send equal parts of ``sendbuf`` to all ranks; a rank's own part is copied exactly."""
        key = ("all_to_all", 0, name, phase, codec, None)
        if self._done(key, self._gather_scatter, sendbuf, recvbuf):
            return
        return self._alltoall(sendbuf, recvbuf, name, phase, codec).wait()

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
        return Request(self._alltoall(sendbuf, recvbuf, name, phase, codec))

    def _alltoall(
        self, sendbuf: Buffer, recvbuf: Buffer, name: str | None, phase: str | None, codec: CodecLike
    ) -> engine.Request:
        key = ("all_to_all", 0, name, phase, codec, None)
        request = self._begun(key, self._gather_scatter, (sendbuf, recvbuf))
        if request is not None:
            return request
        try:
            recv = parse(recvbuf, writable=True, blocks=self.size)
            send = recv if is_in_place(sendbuf) else like(parse(sendbuf, blocks=self.size), recv)
        except ForeignBufferError:
            return self._foreign("all_to_all", lambda: self.mpi.Ialltoall(sendbuf, recvbuf), codec)
        if send.size % self.size:
            raise ValueError(
                f"all_to_all of {send.size} elements cannot be split evenly among {self.size} ranks"
            )
        n = send.size // self.size
        extents = [(q * n, n) for q in range(self.size)]
        return flat_gather_scatter.alltoallv(self, send, extents, recv, extents, n, name, phase, codec)

    def Alltoallv(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
    ) -> None:
        """Send parts of any size: ``[data, counts]``, ``[data, counts, displs]`` or ``[data, (counts, displs)]``.

        An MPI datatype may follow. Parts are compressed whatever their size, since ranks do not know each
        other's totals.
        """
        self.start_alltoallv(sendbuf, recvbuf, name, phase, codec).wait()

    def Ialltoallv(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
    ) -> Request:
        """Start :meth:`Alltoallv`."""
        return Request(self.start_alltoallv(sendbuf, recvbuf, name, phase, codec))

    def start_alltoallv(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
    ) -> engine.Request:
        """Start :meth:`Ialltoallv` as an operation without an MPI request."""
        try:
            recv, incoming = parse_vector(recvbuf, self.size, writable=True)
            if is_in_place(sendbuf):
                send, outgoing = recv, incoming
            else:
                send, outgoing = parse_vector(sendbuf, self.size, writable=False)
        except ForeignBufferError:
            return self._foreign("all_to_all", lambda: self.mpi.Ialltoallv(sendbuf, recvbuf), codec)
        return flat_gather_scatter.alltoallv(
            self, same_dtype(send, recv), outgoing, recv, incoming, None, name, phase, codec
        )

    def Alltoallw(self, sendbuf: Buffer, recvbuf: Buffer) -> None:
        """Send parts of any size and datatype, by MPI's own operation."""
        self._foreign("all_to_all", lambda: self.mpi.Ialltoallw(sendbuf, recvbuf)).wait()

    def Ialltoallw(self, sendbuf: Buffer, recvbuf: Buffer) -> Request:
        """Start :meth:`Alltoallw`."""
        return Request(self._foreign("all_to_all", lambda: self.mpi.Ialltoallw(sendbuf, recvbuf)))

    # -- broadcast, barrier --------------------------------------------------------------------------

    def Bcast(
        self,
        buf: Buffer,
        root: int = 0,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
        algorithm: str | None = None,
    ) -> None:
        """Broadcast from ``root``. Where the broadcast is compressed, the root, too, ends with the decoded values."""
        key = ("broadcast", root, name, phase, codec, algorithm)
        if self._done(key, self._gather_scatter, buf, buf):
            return
        return self.start_bcast(buf, root, name, phase, codec, algorithm).wait()

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
        return Request(self.start_bcast(buf, root, name, phase, codec, algorithm))

    def start_bcast(
        self,
        buf: Buffer,
        root: int,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
        algorithm: str | None = None,
    ) -> engine.Request:
        """Start :meth:`Ibcast` as an operation without an MPI request."""
        key = ("broadcast", root, name, phase, codec, algorithm)
        request = self._begun(key, self._gather_scatter, (buf, buf))
        if request is not None:
            return request
        try:
            flat = parse(buf, writable=True)
        except ForeignBufferError:
            return self._foreign("broadcast", lambda: self.mpi.Ibcast(buf, root), codec)
        return flat_gather_scatter.bcast(self, flat, root, name, phase, codec, algorithm)

    def Barrier(self) -> None:
        """Wait until all ranks are here."""
        if self._done(_BARRIER, self._barriers):
            return
        return self.start_barrier().wait()

    def Ibarrier(self) -> Request:
        """Start :meth:`Barrier`."""
        return Request(self.start_barrier())

    def start_barrier(self) -> engine.Request:
        """Start :meth:`Ibarrier` as an operation without an MPI request."""
        request = self._begun(_BARRIER, self._barriers)
        return flat_reductions.barrier(self) if request is None else request

    # -- on the fast path ----------------------------------------------------------------------------

    def _barriers(self, *_: Any) -> Kind:
        return self._plain_call("barrier", 0, 0), [self.mpi.handle]

    def _gather_scatter(self, key: Key, send: Any, recv: Any, _op: Any) -> Kind | None:
        """Return the kind of a gather, broadcast or all-to-all of plain arrays; None if MPI cannot do it alone."""
        what, root, name, phase, codec, _ = key
        p = self.size
        try:
            flat = parse(send)
        except ForeignBufferError:
            return None
        if not flat.size or recv.size != flat.size * (p if what == "all_gather" else 1):
            return None
        if what == "broadcast":
            self._check_rank(root, "root")
        elements = flat.size if what == "all_to_all" else None
        choice = self._choose(what, flat, name, phase, codec, elements, ahead=True)
        if choice.once:
            raise ForOnceError
        raw, sent, comm = flat.nbytes, (p - 1) * flat.nbytes, self.mpi.handle
        if choice.compresses:
            return self._compressed_gather_scatter(key, choice, flat)
        if flat.dtype.is_float and flat.dtype.itemsize == 2:
            return None
        if what == "broadcast":
            sent = self._sent_on(root) * flat.nbytes
            return self._call(what, choice, raw, sent), [0, raw, MPI.BYTE.handle, root, comm]
        each = raw
        if what == "all_gather":
            raw *= p
        else:
            if flat.size % p:
                return None
            sent //= p
            each //= p
        part_of = [0, each, MPI.BYTE.handle]
        return self._call(what, choice, raw, sent), [*part_of, *part_of, comm]

    def _compressed_gather_scatter(self, key: Key, choice: Choice, flat: Flat) -> Kind | None:
        """Return the kind of an operation whose messages are compressed; None if the engine does not run it."""
        what, root, _, _, _, algorithm = key
        p, n = self.size, flat.size
        if what == "all_gather":
            operation = OperationKey.of(what, choice, flat.dtype, (n,) * p)
            call = self._call(what, choice, p * flat.nbytes, (p - 1) * flat.nbytes)
        elif what == "all_to_all" and n % p == 0:
            parts = tuple((q * (n // p), n // p) for q in range(p))
            operation = OperationKey.of(what, choice, flat.dtype, (), sends=parts, receives=parts)
            call = self._call(what, choice, flat.nbytes, (p - 1) * flat.nbytes // p)
        elif what == "broadcast":
            operation = OperationKey.of(what, choice, flat.dtype, (n,), root=root)
            call = self._call(what, choice, flat.nbytes, self._sent_on(root) * flat.nbytes)
        else:
            return None
        program = None if self._programs is None else self._programs.find(operation, algorithm, alone=True)
        return None if program is None else (call, program)

    def _sent_on(self, root: int) -> int:
        """Return the number of ranks that get a broadcast from this one, by MPI's usual algorithm."""
        return len(family(root, self.rank, self.size)[1])

"""Provide mpi4py's collectives that move data to or from every rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from hybridcomp.arrays import Flat
from hybridcomp.collectives.algorithms.schedules import OperationKey
from hybridcomp.collectives.buffers import (
    in_memory,
    is_in_place,
    like,
    parse,
    part,
    same_dtype,
    units,
)
from hybridcomp.collectives.choices import CodecLike
from hybridcomp.collectives.datatypes import ForeignBufferError
from hybridcomp.collectives.execution import progress as engine
from hybridcomp.collectives.memory import copied
from hybridcomp.collectives.operations import flat_gather_scatter, flat_reductions
from hybridcomp.collectives.operations.fast_path_cache import ForOnceError, Key, Kind
from hybridcomp.collectives.operations.uncompressed import Uncompressed, brief, stored, told
from hybridcomp.collectives.requests import Request
from hybridcomp.collectives.vectors import parse_vector
from hybridcomp.policy import Choice
from hybridcomp.schedules.algorithms.tree import family

Buffer = Any

_BARRIER: Key = ("barrier", 0, None, None, None, None)


class GatherScatter(Uncompressed):
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
        if (nbytes := self._passes_allgather(sendbuf, recvbuf, codec)) >= 0:
            return self._run_by_mpi(
                "all_gather", self.mpi.Iallgather, (sendbuf, recvbuf), nbytes * self.size, copies=self._others
            )
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
        if brief(nbytes := self._passes_allgather(sendbuf, recvbuf, codec)):
            return self._begin_by_mpi(
                "all_gather", self.mpi.Iallgather, (sendbuf, recvbuf), nbytes * self.size, copies=self._others
            )
        return Request(self.start_allgather(sendbuf, recvbuf, name, phase, codec, algorithm))

    def _passes_allgather(self, sendbuf: Buffer, recvbuf: Buffer, codec: CodecLike) -> int:
        if is_in_place(sendbuf):
            return self._passes("all_gather", codec, recvbuf, blocks=self.size) // self.size
        return self._passes("all_gather", codec, sendbuf, recvbuf)

    @property
    def _others(self) -> float:
        """Return the share of a gathered or scattered buffer that this rank sends to others."""
        return (self.size - 1) / self.size

    @told
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
        return stored(flat_gather_scatter.allgather(self, send, recv, name, phase, codec, algorithm), recv)

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
        if (nbytes := self._passes("all_gather", codec, recvbuf, sendbuf, times=0)) >= 0:
            return self._run_by_mpi(
                "all_gather", self.mpi.Iallgatherv, (sendbuf, recvbuf), nbytes, copies=self._others
            )
        return self.start_allgatherv(sendbuf, recvbuf, name, phase, codec).wait()

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
        if (nbytes := self._passes("all_gather", codec, recvbuf, sendbuf, times=0)) >= 0:
            return self._begin_by_mpi(
                "all_gather", self.mpi.Iallgatherv, (sendbuf, recvbuf), nbytes, copies=self._others
            )
        return Request(self.start_allgatherv(sendbuf, recvbuf, name, phase, codec))

    @told
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
        return stored(flat_gather_scatter.allgatherv(self, send, recv, extents, name, phase, codec), recv)

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
        if (nbytes := self._passes("all_to_all", codec, recvbuf, sendbuf, self.size, self.size)) >= 0:
            return self._run_by_mpi(
                "all_to_all", self.mpi.Ialltoall, (sendbuf, recvbuf), nbytes, copies=self._others
            )
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
        if brief(nbytes := self._passes("all_to_all", codec, recvbuf, sendbuf, self.size, self.size)):
            return self._begin_by_mpi(
                "all_to_all", self.mpi.Ialltoall, (sendbuf, recvbuf), nbytes, copies=self._others
            )
        return Request(self._alltoall(sendbuf, recvbuf, name, phase, codec))

    @told
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
        request = flat_gather_scatter.alltoallv(self, send, extents, recv, extents, n, name, phase, codec)
        return stored(request, recv)

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
        if (nbytes := self._passes("all_to_all", codec, sendbuf, recvbuf, times=0)) >= 0:
            return self._run_by_mpi(
                "all_to_all", self.mpi.Ialltoallv, (sendbuf, recvbuf), nbytes, copies=self._others
            )
        return self.start_alltoallv(sendbuf, recvbuf, name, phase, codec).wait()

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
        if (nbytes := self._passes("all_to_all", codec, sendbuf, recvbuf, times=0)) >= 0:
            return self._begin_by_mpi(
                "all_to_all", self.mpi.Ialltoallv, (sendbuf, recvbuf), nbytes, copies=self._others
            )
        return Request(self.start_alltoallv(sendbuf, recvbuf, name, phase, codec))

    @told
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
        request = flat_gather_scatter.alltoallv(
            self, same_dtype(send, recv), outgoing, recv, incoming, None, name, phase, codec
        )
        return stored(request, recv)

    def Alltoallw(self, sendbuf: Buffer, recvbuf: Buffer) -> None:
        """Send parts of any size and datatype, by MPI's own operation."""
        self._alltoallw(sendbuf, recvbuf).wait()

    def Ialltoallw(self, sendbuf: Buffer, recvbuf: Buffer) -> Request:
        """Start :meth:`Alltoallw`."""
        return Request(self._alltoallw(sendbuf, recvbuf))

    @told
    def _alltoallw(self, sendbuf: Buffer, recvbuf: Buffer) -> engine.Request:
        return self._foreign("all_to_all", lambda: self.mpi.Ialltoallw(sendbuf, recvbuf))

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
        if (nbytes := self._passes("broadcast", codec, buf)) >= 0:
            copies = self._sent_on(root)
            return self._run_by_mpi("broadcast", self.mpi.Ibcast, (buf, root), nbytes, copies=copies)
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
        if brief(nbytes := self._passes("broadcast", codec, buf)):
            copies = self._sent_on(root)
            return self._begin_by_mpi("broadcast", self.mpi.Ibcast, (buf, root), nbytes, copies=copies)
        return Request(self.start_bcast(buf, root, name, phase, codec, algorithm))

    @told
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
            self.check_rank(root, "root")
            flat = self._given_by_root(buf) if root == self.rank else parse(buf, writable=True)
        except ForeignBufferError:
            return self._foreign("broadcast", lambda: self.mpi.Ibcast(buf, root), codec)
        request = flat_gather_scatter.bcast(self, flat, root, name, phase, codec, algorithm)
        return stored(request, flat)

    @staticmethod
    def _given_by_root(buf: Buffer) -> Flat:
        """View the root's buffer of a broadcast, which may be read-only: then it keeps its values."""
        flat = parse(buf)
        if flat.shares:
            fixed = isinstance(flat.data, np.ndarray) and not flat.data.flags.writeable
            return copied(flat) if fixed else flat
        try:
            return parse(buf, writable=True)
        except BufferError:
            return flat

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
        return self.new_plain_call("barrier", 0, 0), [self.mpi.handle]

    def _gather_scatter(self, key: Key, send: Any, recv: Any, _op: Any) -> Kind | None:
        """Return the kind of a gather, broadcast or all-to-all of plain arrays; None if MPI cannot do it alone."""
        what, root, name, phase, codec, _ = key
        p = self.size
        in_place = is_in_place(send)
        try:
            into = in_memory(recv, 1 if what == "broadcast" else p)
            flat = into if in_place else in_memory(send, p if what == "all_to_all" else 1)
        except ForeignBufferError:
            return None
        n = into.size // p if in_place and what == "all_gather" else flat.size
        if not n or into.dtype is not flat.dtype or into.size != n * (p if what == "all_gather" else 1):
            return None
        if what == "broadcast":
            self.check_rank(root, "root")
        elements = n if what == "all_to_all" else None
        choice = self.choose(what, part(flat, 0, n), name, phase, codec, elements, ahead=True)
        if choice.once:
            raise ForOnceError
        raw, comm = n * flat.dtype.itemsize, self.mpi.handle
        sent = (p - 1) * raw
        if choice.compresses:
            return None if in_place else self._compressed_gather_scatter(key, choice, flat)
        if what == "all_gather" and self._programs is not None:
            operation = OperationKey.of(what, choice, flat.dtype, (n,) * p)
            program = self._programs.sparing(operation)
            if program is not None:
                return None if in_place else (self.new_call(what, choice, p * raw, sent), program)
        count, datatype = units(flat.dtype, n)
        if what == "broadcast":
            sent = self._sent_on(root) * raw
            return self.new_call(what, choice, raw, sent), [0, count, datatype, root, comm]
        if what == "all_gather":
            raw *= p
        elif n % p:
            return None
        else:
            sent //= p
            count //= p
        part_of = [0, count, datatype]
        return self.new_call(what, choice, raw, sent), [*part_of, *part_of, comm]

    def _compressed_gather_scatter(self, key: Key, choice: Choice, flat: Flat) -> Kind | None:
        """Return the kind of an operation whose messages are compressed; None if the engine does not run it."""
        what, root, _, _, _, algorithm = key
        p, n = self.size, flat.size
        if what == "all_gather":
            operation = OperationKey.of(what, choice, flat.dtype, (n,) * p)
            call = self.new_call(what, choice, p * flat.nbytes, (p - 1) * flat.nbytes)
        elif what == "all_to_all" and n % p == 0:
            parts = tuple((q * (n // p), n // p) for q in range(p))
            operation = OperationKey.of(what, choice, flat.dtype, (), sends=parts, receives=parts)
            call = self.new_call(what, choice, flat.nbytes, (p - 1) * flat.nbytes // p)
        elif what == "broadcast":
            operation = OperationKey.of(what, choice, flat.dtype, (n,), root=root)
            call = self.new_call(what, choice, flat.nbytes, self._sent_on(root) * flat.nbytes)
        else:
            return None
        program = None if self._programs is None else self._programs.find(operation, algorithm, alone=True)
        return None if program is None else (call, program)

    def _sent_on(self, root: int) -> int:
        """Return the number of ranks that get a broadcast from this one, by MPI's usual algorithm."""
        return len(family(root, self.rank, self.size)[1]) if 0 <= root < self.size else 0

"""Provide mpi4py's collectives that gather at one rank, or scatter from it."""

from __future__ import annotations

from typing import Any

from hybridcomp.collectives.buffers import is_in_place, parse, part, same_dtype
from hybridcomp.collectives.choices import CodecLike
from hybridcomp.collectives.datatypes import ForeignBufferError
from hybridcomp.collectives.execution import progress as engine
from hybridcomp.collectives.operations import flat_gather_scatter
from hybridcomp.collectives.operations.uncompressed import Uncompressed, brief, stored, told
from hybridcomp.collectives.requests import Request
from hybridcomp.collectives.vectors import parse_vector

Buffer = Any


class Rooted(Uncompressed):
    """Methods Gather(v) and Scatter(v): exact unless the policy names them. A rank's own part is copied exactly."""

    # -- gather --------------------------------------------------------------------------------------

    def Gather(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        root: int = 0,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
    ) -> None:
        """Gather equal parts at ``root``, which may send in place; ``recvbuf`` is used there alone."""
        if (nbytes := self._passes_gather(sendbuf, recvbuf, root, codec)) >= 0:
            copies = int(self.rank != root)
            return self._run_by_mpi(
                "gather", self.mpi.Igather, (sendbuf, recvbuf, root), nbytes, copies=copies
            )
        return self.start_gather(sendbuf, recvbuf, root, name, phase, codec).wait()

    def Igather(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        root: int = 0,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
    ) -> Request:
        """Start :meth:`Gather`."""
        if brief(nbytes := self._passes_gather(sendbuf, recvbuf, root, codec)):
            copies = int(self.rank != root)
            return self._begin_by_mpi(
                "gather", self.mpi.Igather, (sendbuf, recvbuf, root), nbytes, copies=copies
            )
        return Request(self.start_gather(sendbuf, recvbuf, root, name, phase, codec))

    def _passes_gather(self, sendbuf: Buffer, recvbuf: Buffer, root: int, codec: CodecLike) -> int:
        if self.rank != root:
            return self._passes("gather", codec, sendbuf, times=self.size)
        if is_in_place(sendbuf):
            return self._passes("gather", codec, recvbuf, None, self.size, self.size)
        return self._passes("gather", codec, sendbuf, recvbuf, times=self.size)

    @told
    def start_gather(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        root: int,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
    ) -> engine.Request:
        """Start :meth:`Igather` as an operation without an MPI request."""
        try:
            recv = parse(recvbuf, writable=True, blocks=self.size) if self.rank == root else None
            if recv is not None and is_in_place(sendbuf):
                n = recv.size // self.size
                send = part(recv, root * n, n)
            else:
                send = parse(sendbuf)
        except ForeignBufferError:
            return self._foreign("gather", lambda: self.mpi.Igather(sendbuf, recvbuf, root), codec)
        if recv is not None:
            same_dtype(send, recv)
        return stored(flat_gather_scatter.gather(self, send, recv, None, root, name, phase, codec), recv)

    def Gatherv(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        root: int = 0,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
    ) -> None:
        """Gather parts of any size at ``root``; ``recvbuf`` as in ``Alltoallv``.

        Parts are compressed whatever their size, since ranks know their own alone.
        """
        other = recvbuf if self.rank == root else None
        if (nbytes := self._passes("gather", codec, sendbuf, other, times=0)) >= 0:
            copies = int(self.rank != root)
            return self._run_by_mpi(
                "gather", self.mpi.Igatherv, (sendbuf, recvbuf, root), nbytes, copies=copies
            )
        return self._gatherv(sendbuf, recvbuf, root, name, phase, codec).wait()

    def Igatherv(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        root: int = 0,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
    ) -> Request:
        """Start :meth:`Gatherv`."""
        other = recvbuf if self.rank == root else None
        if (nbytes := self._passes("gather", codec, sendbuf, other, times=0)) >= 0:
            copies = int(self.rank != root)
            return self._begin_by_mpi(
                "gather", self.mpi.Igatherv, (sendbuf, recvbuf, root), nbytes, copies=copies
            )
        return Request(self._gatherv(sendbuf, recvbuf, root, name, phase, codec))

    @told
    def _gatherv(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        root: int,
        name: str | None,
        phase: str | None,
        codec: CodecLike,
    ) -> engine.Request:
        recv = None
        extents = [(0, 0)] * self.size
        try:
            if self.rank == root:
                recv, extents = parse_vector(recvbuf, self.size, writable=True)
            own = part(recv, *extents[root]) if recv is not None and is_in_place(sendbuf) else None
            send = parse(sendbuf) if own is None else own
        except ForeignBufferError:
            return self._foreign("gather", lambda: self.mpi.Igatherv(sendbuf, recvbuf, root), codec)
        if recv is not None:
            same_dtype(send, recv)
        request = flat_gather_scatter.gather(self, send, recv, extents, root, name, phase, codec)
        return stored(request, recv)

    # -- scatter -------------------------------------------------------------------------------------

    def Scatter(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        root: int = 0,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
    ) -> None:
        """Scatter equal parts from ``root``, which may receive in place; ``sendbuf`` is used there alone."""
        if (nbytes := self._passes_scatter(sendbuf, recvbuf, root, codec)) >= 0:
            copies = self.size - 1 if self.rank == root else 0
            return self._run_by_mpi(
                "scatter", self.mpi.Iscatter, (sendbuf, recvbuf, root), nbytes, copies=copies
            )
        return self.start_scatter(sendbuf, recvbuf, root, name, phase, codec).wait()

    def Iscatter(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        root: int = 0,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
    ) -> Request:
        """Start :meth:`Scatter`."""
        if brief(nbytes := self._passes_scatter(sendbuf, recvbuf, root, codec)):
            copies = self.size - 1 if self.rank == root else 0
            return self._begin_by_mpi(
                "scatter", self.mpi.Iscatter, (sendbuf, recvbuf, root), nbytes, copies=copies
            )
        return Request(self.start_scatter(sendbuf, recvbuf, root, name, phase, codec))

    def _passes_scatter(self, sendbuf: Buffer, recvbuf: Buffer, root: int, codec: CodecLike) -> int:
        if self.rank != root:
            return self._passes("scatter", codec, recvbuf, times=self.size)
        if is_in_place(recvbuf):
            return self._passes("scatter", codec, sendbuf, None, self.size, self.size)
        return self._passes("scatter", codec, recvbuf, sendbuf, times=self.size)

    @told
    def start_scatter(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        root: int,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
    ) -> engine.Request:
        """Start :meth:`Iscatter` as an operation without an MPI request."""
        try:
            send = parse(sendbuf, blocks=self.size) if self.rank == root else None
            if send is not None and is_in_place(recvbuf):
                n = send.size // self.size
                recv = part(send, root * n, n)
            else:
                recv = parse(recvbuf, writable=True)
        except ForeignBufferError:
            return self._foreign("scatter", lambda: self.mpi.Iscatter(sendbuf, recvbuf, root), codec)
        if send is not None:
            same_dtype(send, recv)
        return stored(flat_gather_scatter.scatter(self, send, recv, None, root, name, phase, codec), recv)

    def Scatterv(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        root: int = 0,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
    ) -> None:
        """Scatter parts of any size from ``root``; ``sendbuf`` as in ``Alltoallv``, sizes as in :meth:`Gatherv`."""
        other = sendbuf if self.rank == root else None
        if (nbytes := self._passes("scatter", codec, recvbuf, other, times=0)) >= 0:
            return self._run_by_mpi("scatter", self.mpi.Iscatterv, (sendbuf, recvbuf, root), nbytes, copies=0)
        return self._scatterv(sendbuf, recvbuf, root, name, phase, codec).wait()

    def Iscatterv(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        root: int = 0,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
    ) -> Request:
        """Start :meth:`Scatterv`."""
        other = sendbuf if self.rank == root else None
        if (nbytes := self._passes("scatter", codec, recvbuf, other, times=0)) >= 0:
            return self._begin_by_mpi(
                "scatter", self.mpi.Iscatterv, (sendbuf, recvbuf, root), nbytes, copies=0
            )
        return Request(self._scatterv(sendbuf, recvbuf, root, name, phase, codec))

    @told
    def _scatterv(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        root: int,
        name: str | None,
        phase: str | None,
        codec: CodecLike,
    ) -> engine.Request:
        send = None
        extents = [(0, 0)] * self.size
        try:
            if self.rank == root:
                send, extents = parse_vector(sendbuf, self.size, writable=False)
            own = part(send, *extents[root]) if send is not None and is_in_place(recvbuf) else None
            recv = parse(recvbuf, writable=True) if own is None else own
        except ForeignBufferError:
            return self._foreign("scatter", lambda: self.mpi.Iscatterv(sendbuf, recvbuf, root), codec)
        if send is not None:
            same_dtype(send, recv)
        request = flat_gather_scatter.scatter(self, send, recv, extents, root, name, phase, codec)
        return stored(request, recv)

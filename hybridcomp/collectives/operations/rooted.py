"""Provide mpi4py's collectives that gather at one rank, or scatter from it: Gather(v) and Scatter(v).

They are exact unless the policy names them. A rank's own part is copied exactly.
"""

from __future__ import annotations

from typing import Any

from hybridcomp.collectives.buffers import is_in_place, parse, part, same_dtype
from hybridcomp.collectives.choices import CodecLike
from hybridcomp.collectives.datatypes import ForeignBufferError
from hybridcomp.collectives.execution import progress
from hybridcomp.collectives.operations import flat_gather_scatter
from hybridcomp.collectives.operations.uncompressed import Operates, brief, told
from hybridcomp.collectives.requests import Request, stored
from hybridcomp.collectives.vectors import parse_vector

Buffer = Any


# -- gather ----------------------------------------------------------------------------------------------


def Gather(
    comm: Operates,
    sendbuf: Buffer,
    recvbuf: Buffer,
    root: int = 0,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
) -> None:
    """Gather equal parts at ``root``, which may send in place; ``recvbuf`` is used there alone."""
    if (nbytes := _passes_gather(comm, sendbuf, recvbuf, root, codec)) >= 0:
        copies = int(comm.session.rank != root)
        return comm.pass_through.run(
            "gather", comm.session.mpi.Igather, (sendbuf, recvbuf, root), nbytes, copies=copies
        )
    return start_gather(comm, sendbuf, recvbuf, root, name, phase, codec).wait()


def Igather(
    comm: Operates,
    sendbuf: Buffer,
    recvbuf: Buffer,
    root: int = 0,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
) -> Request:
    """Start :meth:`Gather`."""
    if brief(nbytes := _passes_gather(comm, sendbuf, recvbuf, root, codec)):
        copies = int(comm.session.rank != root)
        return comm.pass_through.begin(
            "gather", comm.session.mpi.Igather, (sendbuf, recvbuf, root), nbytes, copies=copies
        )
    return Request(start_gather(comm, sendbuf, recvbuf, root, name, phase, codec))


def _passes_gather(comm: Operates, sendbuf: Buffer, recvbuf: Buffer, root: int, codec: CodecLike) -> int:
    if comm.session.rank != root:
        return comm.pass_through.passes("gather", codec, sendbuf, times=comm.session.size)
    if is_in_place(sendbuf):
        return comm.pass_through.passes("gather", codec, recvbuf, None, comm.session.size, comm.session.size)
    return comm.pass_through.passes("gather", codec, sendbuf, recvbuf, times=comm.session.size)


@told
def start_gather(
    comm: Operates,
    sendbuf: Buffer,
    recvbuf: Buffer,
    root: int,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
) -> progress.Request:
    """Start :meth:`Igather` as an operation without an MPI request."""
    try:
        recv = parse(recvbuf, writable=True, blocks=comm.session.size) if comm.session.rank == root else None
        if recv is not None and is_in_place(sendbuf):
            n = recv.size // comm.session.size
            send = part(recv, root * n, n)
        else:
            send = parse(sendbuf)
    except ForeignBufferError:
        return comm.session.start_foreign(
            "gather", lambda: comm.session.mpi.Igather(sendbuf, recvbuf, root), codec
        )
    if recv is not None:
        same_dtype(send, recv)
    return stored(flat_gather_scatter.gather(comm.session, send, recv, None, root, name, phase, codec), recv)


def Gatherv(
    comm: Operates,
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
    other = recvbuf if comm.session.rank == root else None
    if (nbytes := comm.pass_through.passes("gather", codec, sendbuf, other, times=0)) >= 0:
        copies = int(comm.session.rank != root)
        return comm.pass_through.run(
            "gather", comm.session.mpi.Igatherv, (sendbuf, recvbuf, root), nbytes, copies=copies
        )
    return _gatherv(comm, sendbuf, recvbuf, root, name, phase, codec).wait()


def Igatherv(
    comm: Operates,
    sendbuf: Buffer,
    recvbuf: Buffer,
    root: int = 0,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
) -> Request:
    """Start :meth:`Gatherv`."""
    other = recvbuf if comm.session.rank == root else None
    if (nbytes := comm.pass_through.passes("gather", codec, sendbuf, other, times=0)) >= 0:
        copies = int(comm.session.rank != root)
        return comm.pass_through.begin(
            "gather", comm.session.mpi.Igatherv, (sendbuf, recvbuf, root), nbytes, copies=copies
        )
    return Request(_gatherv(comm, sendbuf, recvbuf, root, name, phase, codec))


@told
def _gatherv(
    comm: Operates,
    sendbuf: Buffer,
    recvbuf: Buffer,
    root: int,
    name: str | None,
    phase: str | None,
    codec: CodecLike,
) -> progress.Request:
    recv = None
    extents = [(0, 0)] * comm.session.size
    try:
        if comm.session.rank == root:
            recv, extents = parse_vector(recvbuf, comm.session.size, writable=True)
        own = part(recv, *extents[root]) if recv is not None and is_in_place(sendbuf) else None
        send = parse(sendbuf) if own is None else own
    except ForeignBufferError:
        return comm.session.start_foreign(
            "gather", lambda: comm.session.mpi.Igatherv(sendbuf, recvbuf, root), codec
        )
    if recv is not None:
        same_dtype(send, recv)
    request = flat_gather_scatter.gather(comm.session, send, recv, extents, root, name, phase, codec)
    return stored(request, recv)


# -- scatter ---------------------------------------------------------------------------------------------


def Scatter(
    comm: Operates,
    sendbuf: Buffer,
    recvbuf: Buffer,
    root: int = 0,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
) -> None:
    """Scatter equal parts from ``root``, which may receive in place; ``sendbuf`` is used there alone."""
    if (nbytes := _passes_scatter(comm, sendbuf, recvbuf, root, codec)) >= 0:
        copies = comm.session.size - 1 if comm.session.rank == root else 0
        return comm.pass_through.run(
            "scatter", comm.session.mpi.Iscatter, (sendbuf, recvbuf, root), nbytes, copies=copies
        )
    return start_scatter(comm, sendbuf, recvbuf, root, name, phase, codec).wait()


def Iscatter(
    comm: Operates,
    sendbuf: Buffer,
    recvbuf: Buffer,
    root: int = 0,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
) -> Request:
    """Start :meth:`Scatter`."""
    if brief(nbytes := _passes_scatter(comm, sendbuf, recvbuf, root, codec)):
        copies = comm.session.size - 1 if comm.session.rank == root else 0
        return comm.pass_through.begin(
            "scatter", comm.session.mpi.Iscatter, (sendbuf, recvbuf, root), nbytes, copies=copies
        )
    return Request(start_scatter(comm, sendbuf, recvbuf, root, name, phase, codec))


def _passes_scatter(comm: Operates, sendbuf: Buffer, recvbuf: Buffer, root: int, codec: CodecLike) -> int:
    if comm.session.rank != root:
        return comm.pass_through.passes("scatter", codec, recvbuf, times=comm.session.size)
    if is_in_place(recvbuf):
        return comm.pass_through.passes("scatter", codec, sendbuf, None, comm.session.size, comm.session.size)
    return comm.pass_through.passes("scatter", codec, recvbuf, sendbuf, times=comm.session.size)


@told
def start_scatter(
    comm: Operates,
    sendbuf: Buffer,
    recvbuf: Buffer,
    root: int,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
) -> progress.Request:
    """Start :meth:`Iscatter` as an operation without an MPI request."""
    try:
        send = parse(sendbuf, blocks=comm.session.size) if comm.session.rank == root else None
        if send is not None and is_in_place(recvbuf):
            n = send.size // comm.session.size
            recv = part(send, root * n, n)
        else:
            recv = parse(recvbuf, writable=True)
    except ForeignBufferError:
        return comm.session.start_foreign(
            "scatter", lambda: comm.session.mpi.Iscatter(sendbuf, recvbuf, root), codec
        )
    if send is not None:
        same_dtype(send, recv)
    return stored(flat_gather_scatter.scatter(comm.session, send, recv, None, root, name, phase, codec), recv)


def Scatterv(
    comm: Operates,
    sendbuf: Buffer,
    recvbuf: Buffer,
    root: int = 0,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
) -> None:
    """Scatter parts of any size from ``root``; ``sendbuf`` as in ``Alltoallv``, sizes as in :meth:`Gatherv`."""
    other = sendbuf if comm.session.rank == root else None
    if (nbytes := comm.pass_through.passes("scatter", codec, recvbuf, other, times=0)) >= 0:
        return comm.pass_through.run(
            "scatter", comm.session.mpi.Iscatterv, (sendbuf, recvbuf, root), nbytes, copies=0
        )
    return _scatterv(comm, sendbuf, recvbuf, root, name, phase, codec).wait()


def Iscatterv(
    comm: Operates,
    sendbuf: Buffer,
    recvbuf: Buffer,
    root: int = 0,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
) -> Request:
    """Start :meth:`Scatterv`."""
    other = sendbuf if comm.session.rank == root else None
    if (nbytes := comm.pass_through.passes("scatter", codec, recvbuf, other, times=0)) >= 0:
        return comm.pass_through.begin(
            "scatter", comm.session.mpi.Iscatterv, (sendbuf, recvbuf, root), nbytes, copies=0
        )
    return Request(_scatterv(comm, sendbuf, recvbuf, root, name, phase, codec))


@told
def _scatterv(
    comm: Operates,
    sendbuf: Buffer,
    recvbuf: Buffer,
    root: int,
    name: str | None,
    phase: str | None,
    codec: CodecLike,
) -> progress.Request:
    send = None
    extents = [(0, 0)] * comm.session.size
    try:
        if comm.session.rank == root:
            send, extents = parse_vector(sendbuf, comm.session.size, writable=False)
        own = part(send, *extents[root]) if send is not None and is_in_place(recvbuf) else None
        recv = parse(recvbuf, writable=True) if own is None else own
    except ForeignBufferError:
        return comm.session.start_foreign(
            "scatter", lambda: comm.session.mpi.Iscatterv(sendbuf, recvbuf, root), codec
        )
    if send is not None:
        same_dtype(send, recv)
    request = flat_gather_scatter.scatter(comm.session, send, recv, extents, root, name, phase, codec)
    return stored(request, recv)

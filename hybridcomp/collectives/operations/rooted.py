"""Provide mpi4py's collectives that gather at one rank, or scatter from it: Gather(v) and Scatter(v).

They are exact unless the policy names them. A rank's own part is copied exactly.
"""

from __future__ import annotations

from typing import Any

from hybridcomp.collectives.buffers import is_in_place, parse, part, same_dtype
from hybridcomp.collectives.choices import NO_OPTIONS, CodecLike, OperationOptions
from hybridcomp.collectives.datatypes import ForeignBufferError
from hybridcomp.collectives.execution import progress
from hybridcomp.collectives.operations import flat_gather_scatter
from hybridcomp.collectives.operations.uncompressed import ByMpi, Operates, brief, told
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
    if by_mpi := _gather_by_mpi(comm, sendbuf, recvbuf, root, codec):
        return comm.pass_through.run(*by_mpi)
    return start_gather(comm, sendbuf, recvbuf, root, OperationOptions(name, phase, codec)).wait()


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
    if brief(by_mpi := _gather_by_mpi(comm, sendbuf, recvbuf, root, codec)):
        return comm.pass_through.begin(*by_mpi)
    return Request(start_gather(comm, sendbuf, recvbuf, root, OperationOptions(name, phase, codec)))


def _gather_by_mpi(
    comm: Operates, sendbuf: Buffer, recvbuf: Buffer, root: int, codec: CodecLike
) -> ByMpi | None:
    session, passes = comm.session, comm.pass_through.passes
    if session.rank != root:
        nbytes = passes("gather", codec, sendbuf, times=session.size)
    elif is_in_place(sendbuf):
        nbytes = passes("gather", codec, recvbuf, None, session.size, session.size)
    else:
        nbytes = passes("gather", codec, sendbuf, recvbuf, times=session.size)
    if nbytes < 0:
        return None
    copies = int(session.rank != root)
    return "gather", session.mpi.Igather, (sendbuf, recvbuf, root), nbytes, copies


@told
def start_gather(
    comm: Operates, sendbuf: Buffer, recvbuf: Buffer, root: int, options: OperationOptions = NO_OPTIONS
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
            "gather", lambda: comm.session.mpi.Igather(sendbuf, recvbuf, root), options.codec
        )
    if recv is not None:
        same_dtype(send, recv)
    return stored(flat_gather_scatter.gather(comm.session, send, recv, None, root, options), recv)


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
    if by_mpi := _gatherv_by_mpi(comm, sendbuf, recvbuf, root, codec):
        return comm.pass_through.run(*by_mpi)
    return _gatherv(comm, sendbuf, recvbuf, root, OperationOptions(name, phase, codec)).wait()


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
    if by_mpi := _gatherv_by_mpi(comm, sendbuf, recvbuf, root, codec):
        return comm.pass_through.begin(*by_mpi)
    return Request(_gatherv(comm, sendbuf, recvbuf, root, OperationOptions(name, phase, codec)))


def _gatherv_by_mpi(
    comm: Operates, sendbuf: Buffer, recvbuf: Buffer, root: int, codec: CodecLike
) -> ByMpi | None:
    session, other = comm.session, recvbuf if comm.session.rank == root else None
    nbytes = comm.pass_through.passes("gather", codec, sendbuf, other, times=0)
    if nbytes < 0:
        return None
    return "gather", session.mpi.Igatherv, (sendbuf, recvbuf, root), nbytes, int(session.rank != root)


@told
def _gatherv(
    comm: Operates, sendbuf: Buffer, recvbuf: Buffer, root: int, options: OperationOptions
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
            "gather", lambda: comm.session.mpi.Igatherv(sendbuf, recvbuf, root), options.codec
        )
    if recv is not None:
        same_dtype(send, recv)
    request = flat_gather_scatter.gather(comm.session, send, recv, extents, root, options)
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
    if by_mpi := _scatter_by_mpi(comm, sendbuf, recvbuf, root, codec):
        return comm.pass_through.run(*by_mpi)
    return start_scatter(comm, sendbuf, recvbuf, root, OperationOptions(name, phase, codec)).wait()


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
    if brief(by_mpi := _scatter_by_mpi(comm, sendbuf, recvbuf, root, codec)):
        return comm.pass_through.begin(*by_mpi)
    return Request(start_scatter(comm, sendbuf, recvbuf, root, OperationOptions(name, phase, codec)))


def _scatter_by_mpi(
    comm: Operates, sendbuf: Buffer, recvbuf: Buffer, root: int, codec: CodecLike
) -> ByMpi | None:
    session, passes = comm.session, comm.pass_through.passes
    if session.rank != root:
        nbytes = passes("scatter", codec, recvbuf, times=session.size)
    elif is_in_place(recvbuf):
        nbytes = passes("scatter", codec, sendbuf, None, session.size, session.size)
    else:
        nbytes = passes("scatter", codec, recvbuf, sendbuf, times=session.size)
    if nbytes < 0:
        return None
    copies = session.size - 1 if session.rank == root else 0
    return "scatter", session.mpi.Iscatter, (sendbuf, recvbuf, root), nbytes, copies


@told
def start_scatter(
    comm: Operates, sendbuf: Buffer, recvbuf: Buffer, root: int, options: OperationOptions = NO_OPTIONS
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
            "scatter", lambda: comm.session.mpi.Iscatter(sendbuf, recvbuf, root), options.codec
        )
    if send is not None:
        same_dtype(send, recv)
    return stored(flat_gather_scatter.scatter(comm.session, send, recv, None, root, options), recv)


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
    if by_mpi := _scatterv_by_mpi(comm, sendbuf, recvbuf, root, codec):
        return comm.pass_through.run(*by_mpi)
    return _scatterv(comm, sendbuf, recvbuf, root, OperationOptions(name, phase, codec)).wait()


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
    if by_mpi := _scatterv_by_mpi(comm, sendbuf, recvbuf, root, codec):
        return comm.pass_through.begin(*by_mpi)
    return Request(_scatterv(comm, sendbuf, recvbuf, root, OperationOptions(name, phase, codec)))


def _scatterv_by_mpi(
    comm: Operates, sendbuf: Buffer, recvbuf: Buffer, root: int, codec: CodecLike
) -> ByMpi | None:
    session, other = comm.session, sendbuf if comm.session.rank == root else None
    nbytes = comm.pass_through.passes("scatter", codec, recvbuf, other, times=0)
    if nbytes < 0:
        return None
    return "scatter", session.mpi.Iscatterv, (sendbuf, recvbuf, root), nbytes, 0


@told
def _scatterv(
    comm: Operates, sendbuf: Buffer, recvbuf: Buffer, root: int, options: OperationOptions
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
            "scatter", lambda: comm.session.mpi.Iscatterv(sendbuf, recvbuf, root), options.codec
        )
    if send is not None:
        same_dtype(send, recv)
    request = flat_gather_scatter.scatter(comm.session, send, recv, extents, root, options)
    return stored(request, recv)

"""Provide mpi4py's collectives that move data to or from every rank: Allgather(v), Alltoall(v, w), Bcast, Barrier."""

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
from hybridcomp.collectives.choices import NO_OPTIONS, CodecLike, OperationOptions
from hybridcomp.collectives.datatypes import ForeignBufferError
from hybridcomp.collectives.execution import progress
from hybridcomp.collectives.fast_path_cache import ForOnceError, Key, Kind
from hybridcomp.collectives.memory import copied
from hybridcomp.collectives.operations import flat_gather_scatter, flat_reductions
from hybridcomp.collectives.operations.uncompressed import ByMpi, Operates, brief, told
from hybridcomp.collectives.requests import Request, stored
from hybridcomp.collectives.session import Session
from hybridcomp.collectives.vectors import parse_vector
from hybridcomp.policy import Choice
from hybridcomp.schedules.algorithms.tree import family

Buffer = Any

_BARRIER: Key = ("barrier", 0, None, None, None, None)


# -- all-gather ------------------------------------------------------------------------------------------


def Allgather(
    comm: Operates,
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
    if comm.fast_path.done(key, _gather_scatter, sendbuf, recvbuf):
        return
    if by_mpi := _allgather_by_mpi(comm, sendbuf, recvbuf, codec):
        return comm.pass_through.run(*by_mpi)
    return start_allgather(comm, sendbuf, recvbuf, OperationOptions(name, phase, codec, algorithm)).wait()


def Iallgather(
    comm: Operates,
    sendbuf: Buffer,
    recvbuf: Buffer,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
    algorithm: str | None = None,
) -> Request:
    """Start :meth:`Allgather`."""
    if brief(by_mpi := _allgather_by_mpi(comm, sendbuf, recvbuf, codec)):
        return comm.pass_through.begin(*by_mpi)
    key = ("all_gather", 0, name, phase, codec, algorithm)
    begun = comm.fast_path.begun(key, _gather_scatter, (sendbuf, recvbuf))
    if begun is None:
        begun = _start_allgather(comm, sendbuf, recvbuf, OperationOptions(name, phase, codec, algorithm))
    return Request(begun)


def _allgather_by_mpi(comm: Operates, sendbuf: Buffer, recvbuf: Buffer, codec: CodecLike) -> ByMpi | None:
    session, passes = comm.session, comm.pass_through.passes
    if is_in_place(sendbuf):
        nbytes = passes("all_gather", codec, recvbuf, blocks=session.size)
    else:
        nbytes = passes("all_gather", codec, sendbuf, recvbuf) * session.size
    if nbytes < 0:
        return None
    return "all_gather", session.mpi.Iallgather, (sendbuf, recvbuf), nbytes, _others(session)


def _others(session: Session) -> float:
    """Return the share of a gathered or scattered buffer that this rank sends to others."""
    return (session.size - 1) / session.size


def start_allgather(
    comm: Operates, sendbuf: Buffer, recvbuf: Buffer, options: OperationOptions = NO_OPTIONS
) -> progress.Request:
    """Start :meth:`Iallgather` as an operation without an MPI request."""
    key = ("all_gather", 0, *options)
    request = comm.fast_path.begun(key, _gather_scatter, (sendbuf, recvbuf))
    return request or _start_allgather(comm, sendbuf, recvbuf, options)


@told
def _start_allgather(
    comm: Operates, sendbuf: Buffer, recvbuf: Buffer, options: OperationOptions
) -> progress.Request:
    try:
        recv = parse(recvbuf, writable=True, blocks=comm.session.size)
        if is_in_place(sendbuf):
            n = recv.size // comm.session.size
            send = part(recv, comm.session.rank * n, n)
        else:
            send = same_dtype(parse(sendbuf), recv)
    except ForeignBufferError:
        return comm.session.start_foreign(
            "all_gather", lambda: comm.session.mpi.Iallgather(sendbuf, recvbuf), options.codec
        )
    return stored(flat_gather_scatter.allgather(comm.session, send, recv, options), recv)


def Allgatherv(
    comm: Operates,
    sendbuf: Buffer,
    recvbuf: Buffer,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
) -> None:
    """Gather parts of any size: ``recvbuf`` as in :meth:`Alltoallv`, the same counts on all ranks."""
    if by_mpi := _allgatherv_by_mpi(comm, sendbuf, recvbuf, codec):
        return comm.pass_through.run(*by_mpi)
    return start_allgatherv(comm, sendbuf, recvbuf, OperationOptions(name, phase, codec)).wait()


def Iallgatherv(
    comm: Operates,
    sendbuf: Buffer,
    recvbuf: Buffer,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
) -> Request:
    """Start :meth:`Allgatherv`."""
    if by_mpi := _allgatherv_by_mpi(comm, sendbuf, recvbuf, codec):
        return comm.pass_through.begin(*by_mpi)
    return Request(start_allgatherv(comm, sendbuf, recvbuf, OperationOptions(name, phase, codec)))


def _allgatherv_by_mpi(comm: Operates, sendbuf: Buffer, recvbuf: Buffer, codec: CodecLike) -> ByMpi | None:
    nbytes = comm.pass_through.passes("all_gather", codec, recvbuf, sendbuf, times=0)
    if nbytes < 0:
        return None
    session = comm.session
    return "all_gather", session.mpi.Iallgatherv, (sendbuf, recvbuf), nbytes, _others(session)


@told
def start_allgatherv(
    comm: Operates, sendbuf: Buffer, recvbuf: Buffer, options: OperationOptions = NO_OPTIONS
) -> progress.Request:
    """Start :meth:`Iallgatherv` as an operation without an MPI request."""
    try:
        recv, extents = parse_vector(recvbuf, comm.session.size, writable=True)
        mine = part(recv, *extents[comm.session.rank])
        send = mine if is_in_place(sendbuf) else same_dtype(parse(sendbuf), recv)
    except ForeignBufferError:
        return comm.session.start_foreign(
            "all_gather", lambda: comm.session.mpi.Iallgatherv(sendbuf, recvbuf), options.codec
        )
    return stored(flat_gather_scatter.allgatherv(comm.session, send, recv, extents, options), recv)


# -- all-to-all ------------------------------------------------------------------------------------------


def Alltoall(
    comm: Operates,
    sendbuf: Buffer,
    recvbuf: Buffer,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
) -> None:
    """Send equal parts of ``sendbuf`` to all ranks; a rank's own part is copied exactly."""
    key = ("all_to_all", 0, name, phase, codec, None)
    if comm.fast_path.done(key, _gather_scatter, sendbuf, recvbuf):
        return
    if by_mpi := _alltoall_by_mpi(comm, sendbuf, recvbuf, codec):
        return comm.pass_through.run(*by_mpi)
    return _start_alltoall(comm, sendbuf, recvbuf, OperationOptions(name, phase, codec)).wait()


def Ialltoall(
    comm: Operates,
    sendbuf: Buffer,
    recvbuf: Buffer,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
) -> Request:
    """Start :meth:`Alltoall`."""
    if brief(by_mpi := _alltoall_by_mpi(comm, sendbuf, recvbuf, codec)):
        return comm.pass_through.begin(*by_mpi)
    key = ("all_to_all", 0, name, phase, codec, None)
    begun = comm.fast_path.begun(key, _gather_scatter, (sendbuf, recvbuf))
    if begun is None:
        begun = _start_alltoall(comm, sendbuf, recvbuf, OperationOptions(name, phase, codec))
    return Request(begun)


def _alltoall_by_mpi(comm: Operates, sendbuf: Buffer, recvbuf: Buffer, codec: CodecLike) -> ByMpi | None:
    session = comm.session
    nbytes = comm.pass_through.passes("all_to_all", codec, recvbuf, sendbuf, session.size, session.size)
    if nbytes < 0:
        return None
    return "all_to_all", session.mpi.Ialltoall, (sendbuf, recvbuf), nbytes, _others(session)


@told
def _start_alltoall(
    comm: Operates, sendbuf: Buffer, recvbuf: Buffer, options: OperationOptions
) -> progress.Request:
    try:
        recv = parse(recvbuf, writable=True, blocks=comm.session.size)
        send = recv if is_in_place(sendbuf) else like(parse(sendbuf, blocks=comm.session.size), recv)
    except ForeignBufferError:
        return comm.session.start_foreign(
            "all_to_all", lambda: comm.session.mpi.Ialltoall(sendbuf, recvbuf), options.codec
        )
    if send.size % comm.session.size:
        raise ValueError(
            f"all_to_all of {send.size} elements cannot be split evenly among {comm.session.size} ranks"
        )
    n = send.size // comm.session.size
    extents = [(q * n, n) for q in range(comm.session.size)]
    request = flat_gather_scatter.alltoallv(comm.session, send, extents, recv, extents, n, options)
    return stored(request, recv)


def Alltoallv(
    comm: Operates,
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
    if by_mpi := _alltoallv_by_mpi(comm, sendbuf, recvbuf, codec):
        return comm.pass_through.run(*by_mpi)
    return start_alltoallv(comm, sendbuf, recvbuf, OperationOptions(name, phase, codec)).wait()


def Ialltoallv(
    comm: Operates,
    sendbuf: Buffer,
    recvbuf: Buffer,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
) -> Request:
    """Start :meth:`Alltoallv`."""
    if by_mpi := _alltoallv_by_mpi(comm, sendbuf, recvbuf, codec):
        return comm.pass_through.begin(*by_mpi)
    return Request(start_alltoallv(comm, sendbuf, recvbuf, OperationOptions(name, phase, codec)))


def _alltoallv_by_mpi(comm: Operates, sendbuf: Buffer, recvbuf: Buffer, codec: CodecLike) -> ByMpi | None:
    nbytes = comm.pass_through.passes("all_to_all", codec, sendbuf, recvbuf, times=0)
    if nbytes < 0:
        return None
    session = comm.session
    return "all_to_all", session.mpi.Ialltoallv, (sendbuf, recvbuf), nbytes, _others(session)


@told
def start_alltoallv(
    comm: Operates, sendbuf: Buffer, recvbuf: Buffer, options: OperationOptions = NO_OPTIONS
) -> progress.Request:
    """Start :meth:`Ialltoallv` as an operation without an MPI request."""
    try:
        recv, incoming = parse_vector(recvbuf, comm.session.size, writable=True)
        if is_in_place(sendbuf):
            send, outgoing = recv, incoming
        else:
            send, outgoing = parse_vector(sendbuf, comm.session.size, writable=False)
    except ForeignBufferError:
        return comm.session.start_foreign(
            "all_to_all", lambda: comm.session.mpi.Ialltoallv(sendbuf, recvbuf), options.codec
        )
    request = flat_gather_scatter.alltoallv(
        comm.session, same_dtype(send, recv), outgoing, recv, incoming, None, options
    )
    return stored(request, recv)


def Alltoallw(comm: Operates, sendbuf: Buffer, recvbuf: Buffer) -> None:
    """Send parts of any size and datatype, by MPI's own operation."""
    _alltoallw(comm, sendbuf, recvbuf).wait()


def Ialltoallw(comm: Operates, sendbuf: Buffer, recvbuf: Buffer) -> Request:
    """Start :meth:`Alltoallw`."""
    return Request(_alltoallw(comm, sendbuf, recvbuf))


@told
def _alltoallw(comm: Operates, sendbuf: Buffer, recvbuf: Buffer) -> progress.Request:
    return comm.session.start_foreign("all_to_all", lambda: comm.session.mpi.Ialltoallw(sendbuf, recvbuf))


# -- broadcast, barrier ----------------------------------------------------------------------------------


def Bcast(
    comm: Operates,
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
    if comm.fast_path.done(key, _gather_scatter, buf, buf):
        return
    if by_mpi := _bcast_by_mpi(comm, buf, root, codec):
        return comm.pass_through.run(*by_mpi)
    return start_bcast(comm, buf, root, OperationOptions(name, phase, codec, algorithm)).wait()


def Ibcast(
    comm: Operates,
    buf: Buffer,
    root: int = 0,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
    algorithm: str | None = None,
) -> Request:
    """Start :meth:`Bcast`."""
    if brief(by_mpi := _bcast_by_mpi(comm, buf, root, codec)):
        return comm.pass_through.begin(*by_mpi)
    key = ("broadcast", root, name, phase, codec, algorithm)
    begun = comm.fast_path.begun(key, _gather_scatter, (buf, buf))
    if begun is None:
        begun = _start_bcast(comm, buf, root, OperationOptions(name, phase, codec, algorithm))
    return Request(begun)


def _bcast_by_mpi(comm: Operates, buf: Buffer, root: int, codec: CodecLike) -> ByMpi | None:
    nbytes = comm.pass_through.passes("broadcast", codec, buf)
    if nbytes < 0:
        return None
    return "broadcast", comm.session.mpi.Ibcast, (buf, root), nbytes, _sent_on(comm.session, root)


def start_bcast(
    comm: Operates, buf: Buffer, root: int, options: OperationOptions = NO_OPTIONS
) -> progress.Request:
    """Start :meth:`Ibcast` as an operation without an MPI request."""
    key = ("broadcast", root, *options)
    request = comm.fast_path.begun(key, _gather_scatter, (buf, buf))
    return request or _start_bcast(comm, buf, root, options)


@told
def _start_bcast(comm: Operates, buf: Buffer, root: int, options: OperationOptions) -> progress.Request:
    try:
        comm.session.check_rank(root, "root")
        flat = _given_by_root(buf) if root == comm.session.rank else parse(buf, writable=True)
    except ForeignBufferError:
        return comm.session.start_foreign(
            "broadcast", lambda: comm.session.mpi.Ibcast(buf, root), options.codec
        )
    request = flat_gather_scatter.bcast(comm.session, flat, root, options)
    return stored(request, flat)


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


def Barrier(comm: Operates) -> None:
    """Wait until all ranks are here."""
    if comm.fast_path.done(_BARRIER, _barriers):
        return
    return start_barrier(comm).wait()


def Ibarrier(comm: Operates) -> Request:
    """Start :meth:`Barrier`."""
    return Request(start_barrier(comm))


def start_barrier(comm: Operates) -> progress.Request:
    """Start :meth:`Ibarrier` as an operation without an MPI request."""
    request = comm.fast_path.begun(_BARRIER, _barriers)
    return flat_reductions.barrier(comm.session) if request is None else request


# -- on the fast path ------------------------------------------------------------------------------------


def _barriers(session: Session, *_: Any) -> Kind:
    return session.new_plain_call("barrier", 0, 0), [session.mpi.handle]


def _gather_scatter(session: Session, key: Key, send: Any, recv: Any, _op: Any) -> Kind | None:
    """Return the kind of a gather, broadcast or all-to-all of plain arrays; None if MPI cannot do it alone."""
    what, root, *options = key
    p = session.size
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
        session.check_rank(root, "root")
    elements = n if what == "all_to_all" else None
    choice = session.choose(what, part(flat, 0, n), OperationOptions(*options), elements, ahead=True)
    if choice.once:
        raise ForOnceError
    raw, comm = n * flat.dtype.itemsize, session.mpi.handle
    sent = (p - 1) * raw
    if choice.compresses:
        return None if in_place else _compressed_gather_scatter(session, key, choice, flat)
    if what == "all_gather" and session.programs is not None:
        operation = OperationKey.of(what, choice, flat.dtype, (n,) * p)
        program = session.programs.sparing(operation)
        if program is not None:
            return None if in_place else (session.new_call(what, choice, p * raw, sent), program)
    count, datatype = units(flat.dtype, n)
    if what == "broadcast":
        sent = _sent_on(session, root) * raw
        return session.new_call(what, choice, raw, sent), [0, count, datatype, root, comm]
    if what == "all_gather":
        raw *= p
    elif n % p:
        return None
    else:
        sent //= p
        count //= p
    part_of = [0, count, datatype]
    return session.new_call(what, choice, raw, sent), [*part_of, *part_of, comm]


def _compressed_gather_scatter(session: Session, key: Key, choice: Choice, flat: Flat) -> Kind | None:
    """Return the kind of an operation whose messages are compressed; None if the engine does not run it."""
    what, root, _, _, _, algorithm = key
    p, n = session.size, flat.size
    if what == "all_gather":
        operation = OperationKey.of(what, choice, flat.dtype, (n,) * p)
        call = session.new_call(what, choice, p * flat.nbytes, (p - 1) * flat.nbytes)
    elif what == "all_to_all" and n % p == 0:
        parts = tuple((q * (n // p), n // p) for q in range(p))
        operation = OperationKey.of(what, choice, flat.dtype, (), sends=parts, receives=parts)
        call = session.new_call(what, choice, flat.nbytes, (p - 1) * flat.nbytes // p)
    elif what == "broadcast":
        operation = OperationKey.of(what, choice, flat.dtype, (n,), root=root)
        call = session.new_call(what, choice, flat.nbytes, _sent_on(session, root) * flat.nbytes)
    else:
        return None
    program = None if session.programs is None else session.programs.find(operation, algorithm, alone=True)
    return None if program is None else (call, program)


def _sent_on(session: Session, root: int) -> int:
    """Return the number of ranks that get a broadcast from this one, by MPI's usual algorithm."""
    return len(family(root, session.rank, session.size)[1]) if 0 <= root < session.size else 0

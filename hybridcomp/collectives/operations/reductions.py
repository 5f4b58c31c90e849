"""Provide mpi4py's reductions: Allreduce, Reduce, Reduce_scatter, Reduce_scatter_block, Scan and Exscan.

``op`` is an MPI operation, or ``"avg"``. Floats are compressed for ``MPI.SUM`` and ``"avg"`` alone.

Of floats, ``MPI.MAX`` and ``MPI.MIN`` are IEEE 754-2019's maximum and minimum: NaN where any rank has one, and of
0.0 and -0.0 the maximum is 0.0, the minimum -0.0. ``MPI.MAXLOC`` and ``MPI.MINLOC`` find a NaN first, and of equal
values the lower index. A NaN in a result has the same bits on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from hybridcomp.arrays import Flat
from hybridcomp.collectives.algorithms.schedules import OperationKey
from hybridcomp.collectives.buffers import (
    datatype_of,
    in_memory,
    is_in_place,
    like,
    parse,
    part,
    same_dtype,
    typed,
)
from hybridcomp.collectives.choices import NO_OPTIONS, CodecLike, OperationOptions
from hybridcomp.collectives.datatypes import ForeignBufferError
from hybridcomp.collectives.execution import progress
from hybridcomp.collectives.execution.mpi_collectives import AVG, reduces_directly, reduction_of
from hybridcomp.collectives.execution.mpi_ops import fold_of, made_anew, same_on_all
from hybridcomp.collectives.fast_path_cache import ForOnceError, Key, Kind
from hybridcomp.collectives.operations import flat_gather_scatter, flat_reductions
from hybridcomp.collectives.operations.uncompressed import ByMpi, Operates, brief, told
from hybridcomp.collectives.requests import Request, stored
from hybridcomp.collectives.session import Op, Session
from hybridcomp.policy import check_feedback

Buffer = Any


# -- all-reduce ------------------------------------------------------------------------------------------


def Allreduce(
    comm: Operates,
    sendbuf: Buffer,
    recvbuf: Buffer,
    op: Op = MPI.SUM,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
    algorithm: str | None = None,
) -> None:
    """Reduce over all ranks; every rank gets the same bits.

    Args:
        sendbuf: values of this rank, or ``MPI.IN_PLACE``.
        recvbuf: buffer of the result, of the same count and dtype.
        op: reduction operator, an MPI operation or ``"avg"``: see :mod:`~hybridcomp.collectives.operations.reductions`.
        name, phase, codec, algorithm: see :mod:`~hybridcomp.collectives.communicator`.
    """
    key = ("all_reduce", id(op), name, phase, codec, algorithm)
    if comm.fast_path.done(key, _sums, sendbuf, recvbuf, op):
        return
    return start_allreduce(comm, sendbuf, recvbuf, op, OperationOptions(name, phase, codec, algorithm)).wait()


def allreduce_immediate(
    comm: Operates,
    sendbuf: Buffer,
    recvbuf: Buffer,
    op: Op,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
    algorithm: str | None = None,
) -> bool:
    """Run :meth:`Allreduce` if that is one native call on plain arrays; else do nothing and return False."""
    key = ("all_reduce", id(op), name, phase, codec, algorithm)
    return comm.fast_path.done(key, _sums, sendbuf, recvbuf, op)


def Iallreduce(
    comm: Operates,
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
    if comm.session.size == 1 and name is phase is algorithm is None and isinstance(op, MPI.Op):
        buffers = (recvbuf,) if is_in_place(sendbuf) else (sendbuf, recvbuf)
        nbytes = comm.pass_through.passes("all_reduce", codec, *buffers)
        if nbytes >= 0:
            return comm.pass_through.begin(
                "all_reduce", comm.session.mpi.Iallreduce, (sendbuf, recvbuf, op), nbytes, 0
            )
    key = ("all_reduce", id(op), name, phase, codec, algorithm)
    begun = comm.fast_path.begun(key, _sums, (sendbuf, recvbuf), op)
    if begun is None:
        begun = _start_allreduce(comm, sendbuf, recvbuf, op, OperationOptions(name, phase, codec, algorithm))
    return Request(begun)


def start_allreduce(
    comm: Operates, sendbuf: Buffer, recvbuf: Buffer, op: Op, options: OperationOptions = NO_OPTIONS
) -> progress.Request:
    """Start :meth:`Iallreduce` as an operation without an MPI request."""
    key = ("all_reduce", id(op), *options)
    request = comm.fast_path.begun(key, _sums, (sendbuf, recvbuf), op)
    return request or _start_allreduce(comm, sendbuf, recvbuf, op, options)


@told
def _start_allreduce(
    comm: Operates, sendbuf: Buffer, recvbuf: Buffer, op: Op, options: OperationOptions
) -> progress.Request:
    """Start an all-reduce that is no single native call."""
    try:
        recv = parse(recvbuf, writable=True)
        send = recv if is_in_place(sendbuf) else like(parse(sendbuf), recv)
    except ForeignBufferError:
        return comm.session.start_foreign(
            "all_reduce",
            lambda: comm.session.mpi.Iallreduce(sendbuf, recvbuf, mpi_operator(op, recvbuf, sums=True)),
            options.codec,
        )
    return stored(flat_reductions.allreduce(comm.session, send, recv, op, options), recv)


# -- reduce-scatter --------------------------------------------------------------------------------------


def Reduce_scatter_block(
    comm: Operates,
    sendbuf: Buffer,
    recvbuf: Buffer,
    op: Op = MPI.SUM,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
    algorithm: str | None = None,
) -> None:
    """Reduce ``sendbuf`` (size * n elements) over all ranks; rank r gets block r in ``recvbuf`` (n).

    With ``MPI.IN_PLACE`` the values are in ``recvbuf``, and the block comes to its beginning.
    """
    key = ("reduce_scatter", id(op), name, phase, codec, algorithm)
    if comm.fast_path.done(key, _sums, sendbuf, recvbuf, op):
        return
    return start_reduce_scatter_block(
        comm, sendbuf, recvbuf, op, OperationOptions(name, phase, codec, algorithm)
    ).wait()


def Ireduce_scatter_block(
    comm: Operates,
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
    key = ("reduce_scatter", id(op), name, phase, codec, algorithm)
    begun = comm.fast_path.begun(key, _sums, (sendbuf, recvbuf), op)
    if begun is None:
        options = OperationOptions(name, phase, codec, algorithm)
        begun = _start_reduce_scatter_block(comm, sendbuf, recvbuf, op, options)
    return Request(begun)


def start_reduce_scatter_block(
    comm: Operates, sendbuf: Buffer, recvbuf: Buffer, op: Op, options: OperationOptions = NO_OPTIONS
) -> progress.Request:
    """Start :meth:`Ireduce_scatter_block` as an operation without an MPI request."""
    key = ("reduce_scatter", id(op), *options)
    request = comm.fast_path.begun(key, _sums, (sendbuf, recvbuf), op)
    return request or _start_reduce_scatter_block(comm, sendbuf, recvbuf, op, options)


@told
def _start_reduce_scatter_block(
    comm: Operates, sendbuf: Buffer, recvbuf: Buffer, op: Op, options: OperationOptions
) -> progress.Request:
    """Start a reduce-scatter that is no single native call."""
    try:
        if is_in_place(sendbuf):
            send = whole = parse(recvbuf, writable=True, blocks=comm.session.size)
            recv = part(send, 0, send.size // comm.session.size)
        else:
            recv = whole = parse(recvbuf, writable=True)
            send = same_dtype(parse(sendbuf, blocks=comm.session.size), recv)
    except ForeignBufferError:
        return comm.session.start_foreign(
            "reduce_scatter",
            lambda: comm.session.mpi.Ireduce_scatter_block(sendbuf, recvbuf, mpi_operator(op, recvbuf)),
            options.codec,
        )
    request = flat_reductions.reduce_scatter_block(comm.session, send, recv, op, options)
    return stored(request, whole)


def Reduce_scatter(
    comm: Operates,
    sendbuf: Buffer,
    recvbuf: Buffer,
    recvcounts: Sequence[int] | None = None,
    op: Op = MPI.SUM,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
) -> None:
    """Reduce ``sendbuf`` over all ranks; rank r gets part r, of ``recvcounts[r]`` elements.

    Without ``recvcounts`` the ranks tell each other the sizes of their receive buffers first.
    """
    start_reduce_scatter(comm, sendbuf, recvbuf, recvcounts, op, OperationOptions(name, phase, codec)).wait()


def Ireduce_scatter(
    comm: Operates,
    sendbuf: Buffer,
    recvbuf: Buffer,
    recvcounts: Sequence[int] | None = None,
    op: Op = MPI.SUM,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
) -> Request:
    """Start :meth:`Reduce_scatter`; waits for the counts if they are not given, as mpi4py does."""
    return Request(
        start_reduce_scatter(comm, sendbuf, recvbuf, recvcounts, op, OperationOptions(name, phase, codec))
    )


@told
def start_reduce_scatter(
    comm: Operates,
    sendbuf: Buffer,
    recvbuf: Buffer,
    recvcounts: Sequence[int] | None,
    op: Op,
    options: OperationOptions = NO_OPTIONS,
) -> progress.Request:
    """Start :meth:`Ireduce_scatter` as an operation without an MPI request."""
    flat_reductions.check_operator(op)  # before the ranks tell each other their counts
    in_place = is_in_place(sendbuf)
    try:
        if in_place and recvcounts is None:
            raise ForeignBufferError("in place, the counts must be given")
        recv = whole = parse(recvbuf, writable=True)
        send = recv if in_place else same_dtype(parse(sendbuf), recv)
    except ForeignBufferError:
        return comm.session.start_foreign(
            "reduce_scatter",
            lambda: comm.session.mpi.Ireduce_scatter(sendbuf, recvbuf, recvcounts, mpi_operator(op, recvbuf)),
            options.codec,
        )
    counts = _counts(comm, recv) if recvcounts is None else [int(n) for n in recvcounts]
    if in_place and len(counts) == comm.session.size and sum(counts) == send.size:
        recv = part(recv, 0, counts[comm.session.rank])
    request = flat_reductions.reduce_scatter(comm.session, send, recv, counts, op, options)
    return stored(request, whole)


def _counts(comm: Operates, recv: Flat) -> list[int]:
    """Gather the number of elements of every rank's receive buffer."""
    counts = np.empty(comm.session.size, np.int64)
    mine, every = parse(np.array([recv.size])), parse(counts, writable=True)
    flat_gather_scatter.allgather(comm.session, mine, every, OperationOptions(codec="none")).wait()
    return counts.tolist()


# -- to one rank -----------------------------------------------------------------------------------------


@told
def Reduce(
    comm: Operates,
    sendbuf: Buffer,
    recvbuf: Buffer,
    op: Op = MPI.SUM,
    root: int = 0,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
    algorithm: str | None = None,
) -> None:
    """Reduce to rank ``root``; exact unless the policy names it. ``recvbuf`` is used at the root alone."""
    if by_mpi := _reduce_by_mpi(comm, sendbuf, recvbuf, op, root, codec):
        return comm.pass_through.run(*by_mpi)
    return start_reduce(
        comm, sendbuf, recvbuf, op, root, OperationOptions(name, phase, codec, algorithm)
    ).wait()


@told
def Ireduce(
    comm: Operates,
    sendbuf: Buffer,
    recvbuf: Buffer,
    op: Op = MPI.SUM,
    root: int = 0,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
    algorithm: str | None = None,
) -> Request:
    """Start :meth:`Reduce`."""
    if brief(by_mpi := _reduce_by_mpi(comm, sendbuf, recvbuf, op, root, codec)):
        return comm.pass_through.begin(*by_mpi)
    return Request(
        start_reduce(comm, sendbuf, recvbuf, op, root, OperationOptions(name, phase, codec, algorithm))
    )


def _reduce_by_mpi(
    comm: Operates, sendbuf: Buffer, recvbuf: Buffer, op: Op, root: int, codec: CodecLike
) -> ByMpi | None:
    if not isinstance(op, MPI.Op):
        return None
    session, passes = comm.session, comm.pass_through.passes
    if session.rank != root:
        nbytes = passes("reduce", codec, sendbuf)
    elif is_in_place(sendbuf):
        nbytes = passes("reduce", codec, recvbuf)
    else:
        nbytes = passes("reduce", codec, sendbuf, recvbuf)
    if nbytes < 0:
        return None
    arguments = (sendbuf, recvbuf, mpi_operator(op, sendbuf, recvbuf), root)
    return "reduce", session.mpi.Ireduce, arguments, nbytes, int(session.rank != root)


@told
def start_reduce(
    comm: Operates,
    sendbuf: Buffer,
    recvbuf: Buffer,
    op: Op,
    root: int,
    options: OperationOptions = NO_OPTIONS,
) -> progress.Request:
    """Start :meth:`Ireduce` as an operation without an MPI request."""
    try:
        recv = parse(recvbuf, writable=True) if root == comm.session.rank else None
        in_place = recv is not None and is_in_place(sendbuf)
        send = recv if recv is not None and in_place else parse(sendbuf)
        if recv is not None:
            like(send, recv)
    except ForeignBufferError:
        return comm.session.start_foreign(
            "reduce",
            lambda: comm.session.mpi.Ireduce(sendbuf, recvbuf, mpi_operator(op, sendbuf, recvbuf), root),
            options.codec,
        )
    request = flat_reductions.reduce(comm.session, send, recv, op, root, options)
    return stored(request, recv)


# -- prefixes --------------------------------------------------------------------------------------------


@told
def Scan(comm: Operates, sendbuf: Buffer, recvbuf: Buffer, op: MPI.Op = MPI.SUM) -> None:
    """Reduce over this rank and the ranks before it, by MPI's own operation."""
    comm.pass_through.run(
        "scan", comm.session.mpi.Iscan, (sendbuf, recvbuf, mpi_operator(op, recvbuf)), _bytes(comm, recvbuf)
    )


@told
def Iscan(comm: Operates, sendbuf: Buffer, recvbuf: Buffer, op: MPI.Op = MPI.SUM) -> Request:
    """Start :meth:`Scan`."""
    arguments = (sendbuf, recvbuf, mpi_operator(op, recvbuf))
    return comm.pass_through.begin("scan", comm.session.mpi.Iscan, arguments, _bytes(comm, recvbuf))


@told
def Exscan(comm: Operates, sendbuf: Buffer, recvbuf: Buffer, op: MPI.Op = MPI.SUM) -> None:
    """Reduce over the ranks before this one, by MPI's own operation."""
    arguments = (sendbuf, recvbuf, mpi_operator(op, recvbuf))
    comm.pass_through.run("exscan", comm.session.mpi.Iexscan, arguments, _bytes(comm, recvbuf))


@told
def Iexscan(comm: Operates, sendbuf: Buffer, recvbuf: Buffer, op: MPI.Op = MPI.SUM) -> Request:
    """Start :meth:`Exscan`."""
    arguments = (sendbuf, recvbuf, mpi_operator(op, recvbuf))
    return comm.pass_through.begin("exscan", comm.session.mpi.Iexscan, arguments, _bytes(comm, recvbuf))


def _bytes(comm: Operates, buf: Buffer) -> int:
    nbytes: int = comm.pass_through.survey(buf, None)
    return max(0, nbytes)


# -- on the fast path ------------------------------------------------------------------------------------


def _sums(session: Session, key: Key, send: Any, recv: Any, op: Any) -> Kind | None:
    """Return the kind of a reduction on plain arrays; None if neither MPI nor the engine does it alone."""
    what, _, *asked = key
    options = OperationOptions(*asked)
    whole, p = what == "all_reduce", session.size
    if not (isinstance(op, MPI.Op) or op == AVG):
        return None
    in_place = is_in_place(send)
    try:
        recv = in_memory(recv, 1 if whole or not in_place else p)
        flat = recv if whole or in_place else in_memory(send, p)  # the array that the policy is asked about
        if whole and not in_place:
            like(in_memory(send), recv)
    except ForeignBufferError:
        return None
    n = recv.size // p if in_place and not whole else recv.size
    if not flat.size or flat.size != n * (1 if whole else p) or flat.dtype is not recv.dtype:
        return None
    choice = flat_reductions.choose_sum(session, what, flat, op, options, ahead=True)
    if choice.once:
        raise ForOnceError
    call = session.new_call(what, choice, flat.nbytes, (1 + whole) * (p - 1) * flat.nbytes // p)
    direct = flat_reductions.uses_schedule(choice, flat, op)
    alone = whole or (direct and not in_place)
    form = None if options.name is None else choice.feedback
    if form is not None:
        check_feedback(what, choice.codec, form)
        alone = alone and choice.codec.at_step(0) is choice.codec  # else each step has a codec of its own
    if session.programs is not None and alone:
        counts = (flat.size,) if whole else (n,) * p
        fold = fold_of(op, flat.dtype) if whole else ""
        operation = OperationKey.of(
            what, choice, flat.dtype, counts, reduction_of(op), fold=fold, feedback=form
        )
        program = session.programs.find(operation, options.algorithm, alone=True)
        if program is not None and form is not None:
            under = (session.axis, str(options.name))
            return call, program, session.feedback.memory(under, flat.size, flat.dtype, form)
        if program is not None:
            return call, program
    elif session.programs is not None and not (whole or in_place or direct):
        operation = OperationKey.of(what, choice, flat.dtype, (n,) * p, reduction_of(op))
        program = session.programs.sparing(operation)
        if program is not None:
            return call, program
    if not isinstance(op, MPI.Op) or direct or choice.codec.linear or not reduces_directly(flat.dtype, 1):
        return None
    datatype = typed(flat.data, flat.dtype)[1]
    own = same_on_all(op, datatype, sums=whole)
    return call, [0, 0, n, datatype.handle, own.handle, session.mpi.handle]


def mpi_operator(op: Op, *specs: Any, sums: bool = False) -> MPI.Op:
    """Return the operator by which MPI reduces buffers; for ``sums`` see :func:`.same_on_all`.

    Raises:
        ForeignBufferError: MPI has no average.
    """
    if not isinstance(op, MPI.Op):
        raise ForeignBufferError(f"op {op!r} needs an array of numbers")
    return same_on_all(op, datatype_of(*specs), sums=sums) if made_anew(op, sums=sums) else op

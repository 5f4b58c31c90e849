"""Start reductions of flat buffers: ask the policy and pick the algorithm.

Buffers of one call are all in host memory, or all on one device of their rank: on all ranks alike.
:class:`~hybridcomp.collectives.communicator.Communicator` offers these functions under mpi4py's interface.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from hybridcomp.arrays import DType, Flat
from hybridcomp.collectives.algorithms.schedules import OperationKey
from hybridcomp.collectives.buffers import datatype
from hybridcomp.collectives.choices import NO_OPTIONS, OperationOptions
from hybridcomp.collectives.data_path.coding import NONE
from hybridcomp.collectives.execution.mpi_collectives import (
    AVG,
    native,
    reduce_native,
    reduces_directly,
    reduction_of,
)
from hybridcomp.collectives.execution.mpi_ops import fold_of, same_on_all
from hybridcomp.collectives.execution.progress import Request
from hybridcomp.collectives.memory import copied, on_device, overlap, same_memory
from hybridcomp.collectives.operations.flat_parts import allreduce_encoded, remembering
from hybridcomp.collectives.session import Op, Session
from hybridcomp.collectives.starting import Operands
from hybridcomp.collectives.stats import Call, allreduce_bytes
from hybridcomp.collectives.vectors import following
from hybridcomp.policy import Choice

_DIRECT_HALF_BYTES = 1 << 16  # uncompressed fp16 and bf16 sums from here on travel as they are, not widened


def check_operator(op: Op) -> None:
    """Raise TypeError for what is neither an operator of MPI nor ``"avg"``."""
    if not isinstance(op, MPI.Op) and op != AVG:
        raise TypeError(f"op must be an MPI.Op or {AVG!r}, not {op!r}")


# -- the policy ----------------------------------------------------------------------------------


def choose_sum(
    session: Session,
    op_name: str,
    data: Flat,
    op: Op,
    options: OperationOptions,
    *,
    ahead: bool = False,
) -> Choice:
    """Choose the codec of a reduction, or ``ahead`` of one; ``none`` for all but sums and averages of floats."""
    check_operator(op)
    if op not in (MPI.SUM, AVG):
        return Choice(NONE, None, "neither sum nor average")
    choice = session.choose(op_name, data, options, ahead=ahead)
    if choice.codec.linear and op_name != "all_reduce":
        return Choice(NONE, None, f"{choice.codec.name} only all-reduces")
    if choice.compresses and not data.dtype.is_float:
        return Choice(NONE, None, f"sums of {data.dtype.label} are MPI's own")
    return choice


def uses_schedule(choice: Choice, data: Flat, op: Op) -> bool:
    """Tell whether an algorithm of this package runs, and not MPI's."""
    half = data.dtype in (DType.FLOAT16, DType.BFLOAT16)
    big_half = half and op in (MPI.SUM, AVG) and data.nbytes >= _DIRECT_HALF_BYTES
    return choice.encodes or (big_half and choice.reason != "one rank")


# -- reductions ----------------------------------------------------------------------------------


def allreduce(
    session: Session,
    send: Flat,
    recv: Flat,
    op: Op,
    options: OperationOptions,
    *,
    step: int | None = None,
    framed: bool = False,
) -> Request:
    """Start an all-reduce of ``send`` into ``recv``.

    Args:
        session: session of the communicator to reduce on.
        send, recv: buffers of one size and dtype; may be the same memory.
        op: reduction operator.
        options: what the caller asks for.
        step: training step, whose codec messages without error feedback use; None leaves the codec as it is.
        framed: whether messages are encoded even by ``none``, and the algorithm decides in which order ranks are
            summed.
    """
    p = session.size
    device = on_device(send, recv)
    if overlap(send, recv) and not same_memory(send.data, recv.data):
        send = copied(send)
    choice = choose_sum(session, "all_reduce", recv, op, options)
    about = {"count": recv.size, "dtype": recv.dtype, "reduction": op, "name": options.name}
    call = session.new_call("all_reduce", choice, recv.nbytes, allreduce_bytes(recv.nbytes, p), **about)
    operands, reduction = Operands(send, recv, device), reduction_of(op)
    request: Request | None
    if framed or choice.codec.linear or uses_schedule(choice, recv, op):
        request = allreduce_encoded(
            session,
            operands,
            choice,
            call,
            reduction,
            name=options.name,
            algorithm=options.algorithm,
            step=step,
            framed=framed,
        )
    else:
        fold = fold_of(op, recv.dtype)
        key = OperationKey.of("all_reduce", choice, recv.dtype, (recv.size,), reduction, fold=fold)
        start = session.find_compiled(key, options.algorithm)
        if start is not None and device:  # MPI may add up there
            call.memory, start = "device", None
        request = None if start is None else start(call, operands)
    sums = not (device and session.cuda_aware.collectives)
    return request or _reduced(session, session.mpi.Iallreduce, op, (), call, operands, sums=sums)


def reduce_scatter_block(
    session: Session, send: Flat, recv: Flat, op: Op, options: OperationOptions
) -> Request:
    """Start a reduce-scatter of equal blocks: rank r gets block r of the sum of ``send`` in ``recv``."""
    p = session.size
    device = on_device(send, recv)
    if send.size != p * recv.size:
        raise ValueError(
            f"reduce_scatter of {send.size} elements on {p} ranks needs {send.size / p:g}, not {recv.size}"
        )
    own = send.data[session.rank * recv.size : (session.rank + 1) * recv.size]
    if overlap(send, recv) and not same_memory(own, recv.data):
        send = copied(send)
    choice = choose_sum(session, "reduce_scatter", send, op, options)
    about = {"count": send.size, "dtype": send.dtype, "reduction": op, "name": options.name}
    call = session.new_call("reduce_scatter", choice, send.nbytes, (p - 1) * recv.nbytes, **about)
    if choice.codec.linear or not uses_schedule(choice, send, op):
        key = OperationKey.of("reduce_scatter", choice, send.dtype, (recv.size,) * p, reduction_of(op))
        request = session.start_sparing(key, call, Operands(send, recv, device))
        if request is not None:
            return request
        if overlap(send, recv):
            send = copied(send)
        return _reduced(
            session, session.mpi.Ireduce_scatter_block, op, (), call, Operands(send, recv, device)
        )
    feedback, form = remembering(session, "reduce_scatter", choice, options.name, send.size)
    counts = (recv.size,) * p
    key = OperationKey.of("reduce_scatter", choice, send.dtype, counts, reduction_of(op), feedback=form)
    return session.start_scheduled(
        key, call, Operands(send, recv, device), algorithm=options.algorithm, feedback=feedback
    )


def reduce_scatter(
    session: Session, send: Flat, recv: Flat, counts: Sequence[int], op: Op, options: OperationOptions
) -> Request:
    """Start a reduce-scatter of parts of any size: rank r gets part r of the sum of ``send`` in ``recv``."""
    if len(counts) != session.size or send.size != sum(counts) or recv.size != counts[session.rank]:
        raise ValueError(
            f"reduce_scatter of {send.size} elements into {recv.size} on rank {session.rank} of {session.size} does "
            f"not fit the counts {', '.join(map(str, counts))}"
        )
    if len(set(counts)) == 1:
        return reduce_scatter_block(session, send, recv, op, options)
    device = on_device(send, recv)
    if overlap(send, recv) or not recv.size:  # MPI checks the address of an empty buffer, too
        send = copied(send)
    choice = choose_sum(session, "reduce_scatter", send, op, options)
    about = {"counts": counts, "dtype": send.dtype, "reduction": op, "name": options.name}
    call = session.new_call("reduce_scatter", choice, send.nbytes, send.nbytes - recv.nbytes, **about)
    extents = tuple(following(counts))
    key = OperationKey.of(
        "reduce_scatter", choice, send.dtype, tuple(counts), reduction_of(op), sends=extents
    )
    if choice.codec.linear or not uses_schedule(choice, send, op):
        request = session.start_sparing(key, call, Operands(send, recv, device))
        if request is not None:
            return request

        def post(a: Any, b: Any, mpi_op: MPI.Op) -> MPI.Request:
            return session.mpi.Ireduce_scatter(a, b, counts, mpi_op)

        return _reduced(session, post, op, (), call, Operands(send, recv, device))
    feedback, form = remembering(session, "reduce_scatter", choice, options.name, send.size)
    key = key._replace(feedback=form)
    return session.start_scheduled(key, call, Operands(send, recv, device), feedback=feedback)


def reduce(
    session: Session, send: Flat, recv: Flat | None, op: Op, root: int, options: OperationOptions = NO_OPTIONS
) -> Request:
    """Start a reduction to ``root``; elsewhere ``recv`` is not used."""
    session.check_rank(root, "root")
    recv = recv if session.rank == root else None
    device = on_device(send, recv)
    if recv is not None and overlap(send, recv) and not same_memory(send.data, recv.data):
        send = copied(send)
    about = {"count": send.size, "dtype": send.dtype, "reduction": op, "root": root}
    choice = choose_sum(session, "reduce", send, op, options)
    call = session.new_call(
        "reduce", choice, send.nbytes, 0 if session.rank == root else send.nbytes, **about
    )
    if not choice.compresses:
        return _reduced(session, session.mpi.Ireduce, op, (root,), call, Operands(send, recv, device))
    if session.rank == root and (recv is None or (recv.size, recv.dtype) != (send.size, send.dtype)):
        what = "none" if recv is None else f"{recv.size} {recv.dtype.label}"
        raise ValueError(
            f"reduce of {send.size} {send.dtype.label} needs as much room at the root, not {what}"
        )
    key = OperationKey.of("reduce", choice, send.dtype, (send.size,), reduction_of(op), root=root)
    return session.start_scheduled(key, call, Operands(send, recv, device), algorithm=options.algorithm)


def barrier(session: Session) -> Request:
    """Start a barrier."""
    return session.start_native(
        lambda _s, _r, ticket, events: native(session.mpi.Ibarrier, ticket, events),
        session.new_plain_call("barrier", 0, 0),
        Operands(),
    )


def _reduced(
    session: Session,
    post: Any,
    op: Op,
    extra: tuple[int, ...],
    call: Call,
    operands: Operands,
    *,
    sums: bool = False,
) -> Request:
    """Start one of MPI's reductions; for ``sums`` see :func:`.same_on_all`."""
    by = session.size if op == AVG else 1
    assert operands.send is not None
    dtype = operands.send.dtype
    named = op if isinstance(op, MPI.Op) else MPI.SUM
    mpi_op = same_on_all(named, datatype(dtype.accumulator), sums=sums)
    plain = mpi_op is named and reduces_directly(dtype, by)  # what is not MPI's own reduces on the host
    return session.start_native(
        lambda s, r, ticket, events: reduce_native(
            lambda a, b: post(a, b, mpi_op, *extra), s, r, by, ticket, events
        ),
        call,
        operands,
        direct=None if plain else False,
    )

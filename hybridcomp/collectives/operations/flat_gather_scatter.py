"""Start gathers, scatters, all-gathers and all-to-alls of flat buffers, of equal parts or of any.

``extents`` are the first element and the element count of each rank's part; ranks that know only their own part give
None, and the policy is then asked about a large message, alike on all ranks. Parts below its ``min_bytes``, whose size
both ends know, travel as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from hybridcomp.arrays import Flat
from hybridcomp.collectives.algorithms.schedules import OperationKey
from hybridcomp.collectives.buffers import elements, part
from hybridcomp.collectives.choices import OperationOptions
from hybridcomp.collectives.execution.mpi_collectives import native
from hybridcomp.collectives.execution.progress import Request
from hybridcomp.collectives.memory import copied, on_device, overlap, same_memory
from hybridcomp.collectives.session import MANY, Session
from hybridcomp.collectives.starting import Operands
from hybridcomp.collectives.stats import Call
from hybridcomp.collectives.vectors import byte_extents, following
from hybridcomp.schedules.algorithms.tree import family
from hybridcomp.schedules.placement import Extents


def allgather(session: Session, send: Flat, recv: Flat, options: OperationOptions) -> Request:
    """Start an all-gather of every rank's ``send`` into ``recv``."""
    p, n = session.size, send.size
    device = on_device(send, recv)
    if recv.size != p * n:
        raise ValueError(f"all_gather of {n} elements from {p} ranks needs room for {p * n}, not {recv.size}")
    own = slice(session.rank * n, (session.rank + 1) * n)
    if overlap(send, recv) and not same_memory(send.data, recv.data[own]):
        send = copied(send)
    choice = session.choose("all_gather", send, options)
    about = {"count": n, "dtype": send.dtype, "name": options.name}
    call = session.new_call("all_gather", choice, recv.nbytes, (p - 1) * send.nbytes, **about)

    def post(s: Flat, r: Flat) -> MPI.Request:
        return session.mpi.Iallgather(
            MPI.IN_PLACE if same_memory(s.data, r.data[own]) else elements(s), elements(r)
        )

    key = OperationKey.of("all_gather", choice, send.dtype, (n,) * p)
    operands = Operands(send, recv, device)
    return session.start_sparing(key, call, operands) or _start_exchange(
        session, post, key, call, operands, options.algorithm
    )


def bcast(session: Session, buf: Flat, root: int, options: OperationOptions) -> Request:
    """Start a broadcast of ``buf`` from ``root``."""
    session.check_rank(root, "root")
    device = on_device(buf)
    choice = session.choose("broadcast", buf, options)
    down = len(family(root, session.rank, session.size)[1])
    about = {"count": buf.size, "dtype": buf.dtype, "root": root, "name": options.name}
    call = session.new_call("broadcast", choice, buf.nbytes, down * buf.nbytes, **about)
    loads = session.rank == root
    if not choice.compresses:
        return session.start_native(
            lambda _, r, ticket, events: native(
                lambda: session.mpi.Ibcast(elements(r), root), ticket, events
            ),
            call,
            Operands(None, buf, device, loads=loads),
        )
    key = OperationKey.of("broadcast", choice, buf.dtype, (buf.size,), root=root)
    return session.start_scheduled(key, call, Operands(buf, buf, device), algorithm=options.algorithm)


def allgatherv(
    session: Session, send: Flat, recv: Flat, extents: Extents, options: OperationOptions
) -> Request:
    """Start an all-gather of every rank's ``send`` into its part of ``recv``."""
    device = on_device(send, recv)
    start, n = extents[session.rank]
    if send.size != n:
        raise ValueError(f"rank {session.rank} sends {send.size} elements; its count is {n}")
    if overlap(send, recv) and not same_memory(send.data, recv.data[start : start + n]):
        send = copied(send)
    total = sum(size for _, size in extents)
    choice = session.choose("all_gather", send, options, elements=total // session.size)
    about = {"counts": [size for _, size in extents], "dtype": send.dtype, "name": options.name}
    call = session.new_call("all_gather", choice, recv.nbytes, (session.size - 1) * send.nbytes, **about)

    def written() -> list[tuple[int, int]]:
        return byte_extents(extents, recv.dtype.itemsize)

    def post(s: Flat, r: Flat) -> MPI.Request:
        source = MPI.IN_PLACE if same_memory(s.data, r.data[start : start + n]) else elements(s)
        return session.mpi.Iallgatherv(source, raw_parts(r, extents))

    counts = _counts_of(extents)
    key = OperationKey.of("all_gather", choice, send.dtype, counts, receives=tuple(extents))
    operands = Operands(send, recv, device, written=written)
    return session.start_sparing(key, call, operands) or _start_exchange(session, post, key, call, operands)


def gather(
    session: Session,
    send: Flat,
    recv: Flat | None,
    extents: Extents | None,
    root: int,
    options: OperationOptions,
) -> Request:
    """Start to gather every rank's ``send`` at ``root``; ``extents`` is None for equal parts.

    ``recv`` is used at the root alone; elsewhere the counts of ``extents`` are 0.
    """
    session.check_rank(root, "root")
    at_root = session.rank == root
    equal = extents is None
    device = on_device(send, recv)
    if extents is None:
        extents = following([send.size] * session.size)
    if recv is not None:
        start, n = extents[root]
        if n != send.size or (equal and recv.size != session.size * n):
            raise ValueError(
                f"gather of {send.size} elements from each of {session.size} ranks does not fit {recv.size}"
            )
        if overlap(send, recv) and not same_memory(send.data, recv.data[start : start + n]):
            send = copied(send)
    total = session.size * send.size if equal else MANY
    choice = session.choose("gather", send, options, elements=total)
    about = {"count": send.size if equal else None, "dtype": send.dtype, "root": root, "name": options.name}
    call = session.new_call("gather", choice, send.nbytes, 0 if at_root else send.nbytes, **about)
    parts = extents
    if not equal:
        to_root = tuple(send.size if q == root else 0 for q in range(session.size))
        call.exchanged = (to_root, _counts_of(parts))

    def post(s: Flat, r: Flat | None) -> MPI.Request:
        source: Any = elements(s)
        if r is not None and same_memory(s.data, part(r, *parts[root]).data):
            source = MPI.IN_PLACE
        if equal:
            return session.mpi.Igather(source, None if r is None else elements(r), root)
        return session.mpi.Igatherv(source, None if r is None else raw_parts(r, parts), root)

    def written() -> list[tuple[int, int]]:
        return byte_extents(parts, send.dtype.itemsize)

    counts = _counts_of(parts) if at_root else _own_count(session, send.size)
    receives = tuple(parts) if at_root else None
    least = 0 if equal else choice.min_bytes
    key = OperationKey.of("gather", choice, send.dtype, counts, root=root, receives=receives, least=least)
    return _start_exchange(session, post, key, call, Operands(send, recv, device, written=written))


def scatter(
    session: Session,
    send: Flat | None,
    recv: Flat,
    extents: Extents | None,
    root: int,
    options: OperationOptions,
) -> Request:
    """Start to give each rank its part of the root's ``send``; ``extents`` is None for equal parts.

    ``send`` is used at the root alone; elsewhere the counts of ``extents`` are 0.
    """
    session.check_rank(root, "root")
    equal = extents is None
    device = on_device(send, recv)
    if extents is None:
        extents = following([recv.size] * session.size)
    if send is not None:
        start, n = extents[root]
        if n != recv.size or (equal and send.size != session.size * n):
            raise ValueError(
                f"scatter of {send.size} elements to {session.size} ranks does not give {recv.size} to each"
            )
        if overlap(send, recv) and not same_memory(recv.data, send.data[start : start + n]):
            send = copied(send)
    total = session.size * recv.size if equal else MANY
    choice = session.choose("scatter", recv, options, elements=total)
    sent = 0 if send is None else send.nbytes - recv.nbytes
    about = {"count": recv.size if equal else None, "dtype": recv.dtype, "root": root, "name": options.name}
    call = session.new_call("scatter", choice, recv.nbytes, sent, **about)
    parts = extents
    if not equal:
        from_root = tuple(recv.size if q == root else 0 for q in range(session.size))
        call.exchanged = (_counts_of(parts), from_root)

    def post(s: Flat | None, r: Flat) -> MPI.Request:
        target: Any = elements(r)
        if s is not None and same_memory(r.data, part(s, *parts[root]).data):
            target = MPI.IN_PLACE
        if equal:
            return session.mpi.Iscatter(None if s is None else elements(s), target, root)
        return session.mpi.Iscatterv(None if s is None else raw_parts(s, parts), target, root)

    at_root = session.rank == root
    counts = _counts_of(parts) if at_root else _own_count(session, recv.size)
    sends = tuple(parts) if at_root else None
    least = 0 if equal else choice.min_bytes
    key = OperationKey.of("scatter", choice, recv.dtype, counts, root=root, sends=sends, least=least)
    return _start_exchange(session, post, key, call, Operands(send, recv, device))


def alltoallv(
    session: Session,
    send: Flat,
    outgoing: Extents,
    recv: Flat,
    incoming: Extents,
    largest: int | None,
    options: OperationOptions,
) -> Request:
    """Start an all-to-all; ``outgoing`` and ``incoming`` are (first element, count) per rank.

    The policy is asked about ``session.size`` times the largest part, ``largest`` elements, a number that must be the
    same on all ranks; None counts as large.

    Raises:
        ValueError: the rank sends itself another number of elements than it receives.
    """
    if outgoing[session.rank][1] != incoming[session.rank][1]:
        raise ValueError(
            f"all_to_all: rank {session.rank} sends {outgoing[session.rank][1]} elements to itself, and receives "
            f"{incoming[session.rank][1]}: these must be equal"
        )
    device = on_device(send, recv)
    in_place = send is recv
    away = sum(n for q, (_, n) in enumerate(outgoing) if q != session.rank) * send.dtype.itemsize
    total = MANY if largest is None else largest * session.size
    choice = session.choose("all_to_all", send, options, elements=total)
    call = session.new_call(
        "all_to_all", choice, send.nbytes, away, largest=largest, dtype=send.dtype, name=options.name
    )
    if largest is None:
        call.exchanged = (_counts_of(outgoing), _counts_of(incoming))

    def written() -> list[tuple[int, int]]:
        return byte_extents(incoming, recv.dtype.itemsize)

    def post(s: Flat | None, r: Flat) -> MPI.Request:
        # In place as on other ranks, whose buffers may go to MPI as they are: messages of the two forms do not match.
        if largest is None:
            return session.mpi.Ialltoallv(
                MPI.IN_PLACE if s is None else raw_parts(s, outgoing), raw_parts(r, incoming)
            )
        return session.mpi.Ialltoall(MPI.IN_PLACE if s is None else elements(s), elements(r))

    sends, receives = tuple(outgoing), tuple(incoming)
    least = choice.min_bytes if largest is None else 0
    key = OperationKey.of("all_to_all", choice, send.dtype, (), sends=sends, receives=receives, least=least)
    if in_place and not key.compresses:
        return _start_exchange(
            session, post, key, call, Operands(None, recv, device, loads=True, written=written)
        )
    if overlap(send, recv):
        send = copied(send)
    return _start_exchange(session, post, key, call, Operands(send, recv, device, written=written))


def _counts_of(extents: Extents) -> tuple[int, ...]:
    """Return the element counts of the parts."""
    return tuple(n for _, n in extents)


def _own_count(session: Session, n: int) -> tuple[int, ...]:
    """Return the counts of all ranks where a rank knows only its own count: 0 for the others."""
    return tuple(n if q == session.rank else 0 for q in range(session.size))


def _start_exchange(
    session: Session,
    post: Callable[[Any, Any], MPI.Request],
    key: OperationKey,
    call: Call,
    operands: Operands,
    algorithm: str | None = None,
) -> Request:
    """Start a gather, scatter, all-gather or all-to-all: by MPI with ``post`` if nothing is compressed."""
    if not key.compresses:
        return session.start_native(
            lambda s, r, ticket, events: native(lambda: post(s, r), ticket, events), call, operands
        )
    return session.start_scheduled(key, call, operands, algorithm=algorithm)


def raw_parts(flat: Flat, extents: Extents) -> list[Any]:
    """Return an mpi4py specification of parts."""
    data, datatype = elements(flat)
    parts = byte_extents(extents, flat.dtype.itemsize) if datatype == MPI.BYTE else extents
    return [data, [n for _, n in parts], [start for start, _ in parts], datatype]

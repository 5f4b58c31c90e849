"""Provide mpi4py's collectives among the neighbours of a topology: Neighbor_allgather(v), Neighbor_alltoall(v, w).

They take the policy's rules for ``all_gather`` and ``all_to_all``, and MPI's order of neighbours; blocks of
``MPI.PROC_NULL`` stay as they are. Where a rank is a neighbour several times, the j-th block to it is its j-th from
this rank; in a grid, a block in one direction arrives as the one from the other, as MPI 4 says.

Where the policy may compress an operation of the kind (an all-gather, an all-to-all), each block travels as a message
that says what it is, so that ranks with different neighbours, which know nothing of each other, need not agree on more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from mpi4py import MPI

from hybridcomp.arrays import Flat
from hybridcomp.codecs import get_codec
from hybridcomp.collectives.buffers import elements, parse, same_dtype
from hybridcomp.collectives.choices import CodecLike, OperationOptions
from hybridcomp.collectives.data_path.coding import NONE
from hybridcomp.collectives.data_path.neighbors import Block, exchange
from hybridcomp.collectives.datatypes import ForeignBufferError
from hybridcomp.collectives.execution import progress
from hybridcomp.collectives.execution.mpi_collectives import native
from hybridcomp.collectives.memory import copied, on_device, overlap
from hybridcomp.collectives.operations.flat_gather_scatter import raw_parts
from hybridcomp.collectives.operations.uncompressed import Operates, told
from hybridcomp.collectives.requests import Request, stored
from hybridcomp.collectives.session import MANY
from hybridcomp.collectives.starting import Operands
from hybridcomp.collectives.vectors import byte_extents, following, parse_vector
from hybridcomp.policy import Choice
from hybridcomp.schedules.placement import Extents

Buffer = Any


class _Exchange(NamedTuple):
    """Request of a caller: an all-gather or an all-to-all among neighbours.

    Attributes:
        rules: ``"all_gather"`` or ``"all_to_all"``, whose rules the policy gives it.
        equal: whether all blocks are of one size, of which the policy knows; of others small ones stay exact.
        sendbuf, recvbuf, options: arguments of the call.
    """

    rules: str
    equal: bool
    sendbuf: Buffer
    recvbuf: Buffer
    options: OperationOptions


class Neighborhood:
    """Neighbours of this rank in a topology, and the communicator by which MPI reaches them.

    Attributes:
        comm: communicator of collectives as one of its topology, for MPI's own operations.
        grid: whether the topology is a grid.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Look at the topology of a communicator of collectives."""
        kinds: dict[int, type[MPI.Topocomm]] = {MPI.CART: MPI.Cartcomm, MPI.GRAPH: MPI.Graphcomm}
        self.comm = kinds.get(comm.Get_topology(), MPI.Distgraphcomm)(comm)
        self.grid = isinstance(self.comm, MPI.Cartcomm)

    @functools.cached_property
    def ranks(self) -> tuple[Sequence[int], Sequence[int]]:
        """Return the ranks from which this one receives, and those to which it sends, in MPI's order."""
        sources, destinations = self.comm.inoutedges
        return sources, destinations

    @functools.cached_property
    def disordered(self) -> bool:
        """Tell whether MPI's non-blocking and persistent all-to-all may mix up the two directions of a dimension.

        Open MPI 5's do, unlike its blocking one, in a closed dimension of two ranks or one.
        """
        if not isinstance(self.comm, MPI.Cartcomm) or MPI.get_vendor()[0] != "Open MPI":
            return False
        dims, periods, _ = self.comm.Get_topo()
        return any(period and size <= 2 for size, period in zip(dims, periods, strict=True))


class HasNeighbors(Operates, Protocol):
    """Communicator whose ranks have neighbours."""

    @property
    def neighborhood(self) -> Neighborhood:
        """Return the neighbours of this rank."""


# -- methods of a communicator ---------------------------------------------------------------------------


def Neighbor_allgather(
    comm: HasNeighbors,
    sendbuf: Buffer,
    recvbuf: Buffer,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
) -> None:
    """Send ``sendbuf`` (n elements) to all neighbours, and gather theirs in ``recvbuf`` (neighbours * n)."""
    _run_among(comm, _Exchange("all_gather", True, sendbuf, recvbuf, OperationOptions(name, phase, codec)))


def Ineighbor_allgather(
    comm: HasNeighbors,
    sendbuf: Buffer,
    recvbuf: Buffer,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
) -> Request:
    """Start :meth:`Neighbor_allgather`."""
    return _begin_among(
        comm, _Exchange("all_gather", True, sendbuf, recvbuf, OperationOptions(name, phase, codec))
    )


def Neighbor_allgatherv(
    comm: HasNeighbors,
    sendbuf: Buffer,
    recvbuf: Buffer,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
) -> None:
    """Gather blocks of any size as :meth:`Neighbor_allgather` does: ``recvbuf`` as in ``Allgatherv``."""
    _run_among(comm, _Exchange("all_gather", False, sendbuf, recvbuf, OperationOptions(name, phase, codec)))


def Ineighbor_allgatherv(
    comm: HasNeighbors,
    sendbuf: Buffer,
    recvbuf: Buffer,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
) -> Request:
    """Start :meth:`Neighbor_allgatherv`."""
    return _begin_among(
        comm, _Exchange("all_gather", False, sendbuf, recvbuf, OperationOptions(name, phase, codec))
    )


def Neighbor_alltoall(
    comm: HasNeighbors,
    sendbuf: Buffer,
    recvbuf: Buffer,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
) -> None:
    """Send equal parts of ``sendbuf`` to the neighbours, and gather theirs in ``recvbuf``."""
    _run_among(comm, _Exchange("all_to_all", True, sendbuf, recvbuf, OperationOptions(name, phase, codec)))


def Ineighbor_alltoall(
    comm: HasNeighbors,
    sendbuf: Buffer,
    recvbuf: Buffer,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
) -> Request:
    """Start :meth:`Neighbor_alltoall`."""
    return _begin_among(
        comm, _Exchange("all_to_all", True, sendbuf, recvbuf, OperationOptions(name, phase, codec))
    )


def Neighbor_alltoallv(
    comm: HasNeighbors,
    sendbuf: Buffer,
    recvbuf: Buffer,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
) -> None:
    """Exchange parts of any size with the neighbours: both buffers as in ``Alltoallv``."""
    _run_among(comm, _Exchange("all_to_all", False, sendbuf, recvbuf, OperationOptions(name, phase, codec)))


def Ineighbor_alltoallv(
    comm: HasNeighbors,
    sendbuf: Buffer,
    recvbuf: Buffer,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
) -> Request:
    """Start :meth:`Neighbor_alltoallv`."""
    return _begin_among(
        comm, _Exchange("all_to_all", False, sendbuf, recvbuf, OperationOptions(name, phase, codec))
    )


def Neighbor_alltoallw(comm: HasNeighbors, sendbuf: Buffer, recvbuf: Buffer) -> None:
    """Exchange parts of any size and datatype with the neighbours, by MPI's own operation."""
    _alltoallw_of_neighbors(comm, sendbuf, recvbuf).wait()


def Ineighbor_alltoallw(comm: HasNeighbors, sendbuf: Buffer, recvbuf: Buffer) -> Request:
    """Start :meth:`Neighbor_alltoallw`."""
    return Request(_alltoallw_of_neighbors(comm, sendbuf, recvbuf))


@told
def _alltoallw_of_neighbors(comm: HasNeighbors, sendbuf: Buffer, recvbuf: Buffer) -> progress.Request:
    post = comm.neighborhood.comm.Ineighbor_alltoallw
    return comm.session.start_foreign("neighbor_alltoallw", lambda: post(sendbuf, recvbuf))


# -- shared by them --------------------------------------------------------------------------------------


def _post(comm: HasNeighbors, of: _Exchange) -> Callable[..., MPI.Request]:
    """Return MPI's non-blocking function of an exchange."""
    name = f"Ineighbor_{of.rules.replace('_', '')}{'' if of.equal else 'v'}"
    post: Callable[..., MPI.Request] = getattr(comm.neighborhood.comm, name)
    return post


def _passes_among(comm: HasNeighbors, of: _Exchange) -> int:
    """Tell whether MPI alone does an exchange: see :meth:`_passes`."""
    if of.rules == "all_to_all" and comm.neighborhood.disordered:
        return -1
    return comm.pass_through.passes(of.rules, of.options.codec, of.sendbuf, of.recvbuf, times=0)


def _run_among(comm: HasNeighbors, of: _Exchange) -> None:
    if (nbytes := _passes_among(comm, of)) >= 0:
        return comm.pass_through.run(of.rules, _post(comm, of), (of.sendbuf, of.recvbuf), nbytes)
    return _start_among(comm, of).wait()


def _begin_among(comm: HasNeighbors, of: _Exchange) -> Request:
    if (nbytes := _passes_among(comm, of)) >= 0:
        return comm.pass_through.begin(of.rules, _post(comm, of), (of.sendbuf, of.recvbuf), nbytes)
    return Request(_start_among(comm, of))


@told
def _start_among(comm: HasNeighbors, of: _Exchange) -> progress.Request:
    rules, equal, sendbuf, recvbuf, options = of
    sources, destinations = comm.neighborhood.ranks
    post, op = _post(comm, of), f"neighbor_{rules.replace('_', '')}"
    try:
        recv, incoming = _blocks(recvbuf, len(sources), equal=equal, writable=True)
        if rules == "all_gather":
            send = parse(sendbuf)
            parts: Extents = [(0, send.size)]
        else:
            send, parts = _blocks(sendbuf, len(destinations), equal=equal, writable=False)
        send = same_dtype(send, recv)
    except ForeignBufferError:
        return comm.session.start_foreign(op, lambda: post(sendbuf, recvbuf), options.codec)
    choice = comm.session.choose(rules, send, options, None if equal else MANY)
    peers = [destinations] if rules == "all_gather" else [[peer] for peer in destinations]
    outgoing = [
        Block(start, count, [peer for peer in to if peer != MPI.PROC_NULL])
        for (start, count), to in zip(parts, peers, strict=True)
    ]
    if comm.pass_through.is_mpis(rules, options.codec) and not (
        rules == "all_to_all" and comm.neighborhood.disordered
    ):
        whole = equal or rules == "all_gather"
        by = lambda s, r: post(_spec(s, parts, whole), _spec(r, incoming, equal))  # noqa: E731
        return _move_by_mpi(comm, op, by, choice, send, outgoing, recv, incoming)
    return _exchange(comm, of, op, choice, send, outgoing, recv, incoming)


def _blocks(buf: Buffer, neighbors: int, *, equal: bool, writable: bool) -> tuple[Flat, Extents]:
    """View a buffer of one block for each neighbour."""
    if not equal:
        return parse_vector(buf, neighbors, writable=writable)
    flat = parse(buf, writable=writable, blocks=neighbors)
    if flat.size % max(1, neighbors):
        raise ValueError(f"{flat.size} elements cannot be split evenly among {neighbors} neighbours")
    return flat, following([flat.size // max(1, neighbors)] * neighbors)


def _move_by_mpi(
    comm: HasNeighbors,
    op: str,
    post: Callable[[Flat, Flat], MPI.Request],
    choice: Choice,
    send: Flat,
    outgoing: Sequence[Block],
    recv: Flat,
    incoming: Extents,
) -> progress.Request:
    """Start an exchange that is MPI's, since other ranks give MPI their buffers as they are."""
    device = on_device(send, recv)
    if overlap(send, recv):
        send = copied(send)
    call = comm.session.new_call(op, choice, send.nbytes, _sent(outgoing, send), dtype=send.dtype)
    request = comm.session.start_native(
        lambda s, r, ticket, events: native(lambda: post(s, r), ticket, events),
        call,
        Operands(send, recv, device, written=lambda: byte_extents(incoming, recv.dtype.itemsize)),
    )
    return stored(request, recv)


def _exchange(
    comm: HasNeighbors,
    of: _Exchange,
    op: str,
    choice: Choice,
    send: Flat,
    outgoing: Sequence[Block],
    recv: Flat,
    extents: Extents,
) -> progress.Request:
    """Start an exchange whose blocks are messages that say what they are.

    Args:
        of: what the caller has asked for.
        op: name of the operation.
        choice: codec of what this rank sends.
        send, outgoing: buffer and blocks to send.
        recv, extents: buffer to receive into, and the first element and the count of each neighbour's block.
    """
    if not send.dtype.is_float:
        choice = Choice(NONE, None, f"blocks of {send.dtype.label} are not compressed")
    device = on_device(send, recv)
    if overlap(send, recv):
        send = copied(send)
    sources, _ = comm.neighborhood.ranks
    incoming = [
        Block(*extents[at], [sources[at]])
        for at in _arrivals(comm, len(sources))
        if sources[at] != MPI.PROC_NULL
    ]
    asked = of.options.codec
    if asked is None:
        codecs = comm.session.policy.codecs(comm.session.axis, of.rules)
    else:
        codecs = (asked.codec if isinstance(asked, Choice) else get_codec(asked),)
    call = comm.session.new_call(
        op, choice, send.nbytes, _sent(outgoing, send), dtype=send.dtype, name=of.options.name
    )
    encoded_from = 0 if of.equal else choice.min_bytes
    tag = comm.session.transport.tag()

    def written() -> list[tuple[int, int]]:
        return byte_extents([(start, count) for start, count, _ in incoming], recv.dtype.itemsize)

    request = comm.session.start_carried(
        lambda carrier, s, r, _: exchange(
            carrier,
            s,
            outgoing,
            r,
            incoming,
            codecs,
            tag,
            encoded_from=encoded_from if choice.compresses else None,
        ),
        choice.codec,
        call,
        Operands(send, recv, device, written=written),
        on_host=True,
    )
    return stored(request, recv)


def _arrivals(comm: HasNeighbors, neighbors: int) -> Sequence[int]:
    """Return the neighbours in the order in which blocks of the same rank are received.

    In a grid's dimension of one or two ranks that is closed, both neighbours are one rank: what it sends in the
    negative direction comes first, and is from the neighbour in the positive one.
    """
    in_order = range(neighbors)
    return [at ^ 1 for at in in_order] if comm.neighborhood.grid else in_order


def _sent(outgoing: Sequence[Block], send: Flat) -> int:
    """Return the bytes of all blocks to send."""
    return sum(block.size * len(block.peers) for block in outgoing) * send.dtype.itemsize


def _spec(flat: Flat, extents: Extents, equal: bool) -> list[Any]:
    """Return an mpi4py specification of a buffer of blocks, which say their counts unless they are of one size."""
    return elements(flat) if equal else raw_parts(flat, extents)

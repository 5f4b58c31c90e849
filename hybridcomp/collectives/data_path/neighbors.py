"""Exchange blocks with the neighbours of a topology, each block a message framed as a send is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mpi4py import MPI

from hybridcomp.arrays import Flat, byte_view
from hybridcomp.codecs import Codec
from hybridcomp.collectives.data_path.carrier import Carrier
from hybridcomp.collectives.data_path.framing import room, take_message
from hybridcomp.collectives.execution.steps import Pending, Steps
from hybridcomp.collectives.transport.mailbox import Sealed


class Block(NamedTuple):
    """Part of a buffer that goes to neighbours, or comes from one.

    Attributes:
        start: first element.
        size: number of elements.
        peers: ranks at the other end; none where nobody is there.
    """

    start: int
    size: int
    peers: Sequence[int]


def exchange(
    carrier: Carrier,
    send: Flat,
    outgoing: Iterable[Block],
    recv: Flat,
    incoming: Iterable[Block],
    codecs: Sequence[Codec],
    tag: int,
    *,
    encoded_from: int | None,
) -> Steps:
    """Send blocks to neighbours and receive blocks of theirs.

    The receiver of a block need not know whether it is encoded: see :mod:`.framing`.

    Args:
        carrier: transport, codec and statistics.
        send: buffer of the blocks to send.
        outgoing: blocks to send; those for the same rank in the order in which it takes them.
        recv: buffer to receive into.
        incoming: blocks to receive; those from the same rank in the order in which it sends them.
        codecs: codecs that a sender may use.
        tag: tag of the messages.
        encoded_from: bytes from which a block is encoded; None if none is.

    Raises:
        WireError: a message is damaged.
        MismatchError: a neighbour sent more than there is room for.
    """
    t, mailbox = carrier.transport, carrier.mailbox()
    taken: list[Sealed] = []
    with t.keeping((mailbox, taken, send, recv)):
        arriving = []
        for start, count, peers in incoming:
            block = Flat(recv.data[start : start + count], recv.dtype, (count,), True, False)
            longest = room(codecs, count, recv.dtype) if recv.dtype.is_float else block.nbytes
            for peer in peers:
                message = mailbox.inbox(longest)
                message.peer = peer
                arriving.append((message, block, t.irecv(message.wire(), peer, tag), MPI.Status()))
        sent, to = [], []
        for start, count, peers in outgoing:
            values = send.data[start : start + count]
            data = byte_view(values)
            if encoded_from is not None and count and peers and values.nbytes >= encoded_from:
                taken.append(carrier.encode_odd(Flat(values, send.dtype, (count,), True, False), None))
                data = taken[-1].wire()
            for peer in peers:
                sent.append(t.isend(data, peer, tag))
                to.append(peer)
                carrier.call.wire_bytes += data.nbytes
                carrier.call.between_bytes += data.nbytes * t.away[peer]
        requests, statuses = [request for _, _, request, _ in arriving], [status for *_, status in arriving]
        yield Pending(requests, [message.peer for message, *_ in arriving], statuses)
        for message, block, _, status in arriving:
            take_message(carrier, message, status.Get_count(MPI.BYTE), block, status)
        yield Pending(sent, to, sends=True)
        for sealed in taken:
            carrier.release(sealed)
        yield from mailbox.finish()

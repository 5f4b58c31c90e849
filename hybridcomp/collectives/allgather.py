"""All-gather by a codec: each rank encodes its block once and sends the message to all.

Every rank, the sender too, decodes the same message, so all ranks end with the same bits.
"""

from __future__ import annotations

from hybridcomp.arrays import Flat
from hybridcomp.collectives.carry import Carrier
from hybridcomp.collectives.engine import Steps
from hybridcomp.collectives.shards import Shards
from hybridcomp.collectives.transport import Incoming, Mailbox, arrival


def allgather(carrier: Carrier, send: Flat, recv: Flat, tag: int) -> Steps:
    """Gather every rank's ``send`` into ``recv``, in rank order.

    Args:
        carrier: codec, transport and statistics.
        send: one block; may be this rank's part of ``recv``.
        recv: ``size * send.size`` elements of the same dtype.
        tag: this operation's tag.

    Raises:
        WireError, MismatchError: from a peer's message.
    """
    t = carrier.transport
    mailbox = Mailbox(t)
    shards = Shards.fixed(recv.size, t.size, send.size, send.dtype.itemsize)
    blocks: list[list[Incoming]] = []
    with t.keeping((mailbox, blocks)):
        for k in range(shards.count):
            own = shards.span(t.rank, k)
            nbytes = carrier.inbox_bytes(own.stop - own.start)
            blocks.append([mailbox.receive(nbytes, q, tag) for q in t.others])
            start = own.start - t.rank * send.size
            buffer, length = carrier.encode(send.data[start : start + own.stop - own.start])
            carrier.call.wire_bytes += length * len(t.others)
            mailbox.send(buffer, length, t.others, tag)
            carrier.decode(buffer[:length], recv.data[own], t.rank)
        for k, block in enumerate(blocks):
            yield arrival(block)
            for message in block:
                carrier.decode(message.buffer, recv.data[shards.span(message.peer, k)], message.peer)
        yield mailbox.sent()
    mailbox.close()

"""All-gather by a codec: each rank encodes its block once and sends the message to all.

Every rank, the sender too, decodes the same message, so all ranks end with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridcomp.arrays import Flat
from hybridcomp.collectives.data_path.carrier import Carrier
from hybridcomp.collectives.execution.progress import Steps
from hybridcomp.collectives.transport.mailbox import Incoming
from hybridcomp.schedules.shards import Shards


def allgather(carrier: Carrier, send: Flat, recv: Flat, tags: Sequence[int]) -> Steps:
    """Gather every rank's ``send`` into ``recv``, in rank order.

    Args:
        carrier: codec, transport and statistics.
        send: one block; may be this rank's part of ``recv``.
        recv: ``size * send.size`` elements of the same dtype.
        tags: one.

    Raises:
        WireError, MismatchError: from a peer's message.
    """
    t = carrier.transport
    (tag,) = tags
    mailbox = carrier.mailbox()
    shards = Shards.fixed(recv.size, t.size, send.size, send.dtype.itemsize, carrier.chunk_bytes)
    blocks: list[list[Incoming]] = []
    with t.keeping((mailbox, blocks)):
        for k in range(shards.count):
            own = shards.span(t.rank, k)
            nbytes = carrier.inbox_bytes(own.stop - own.start)
            blocks.append([mailbox.receive(nbytes, q, tag) for q in t.others])
            start = own.start - t.rank * send.size
            message = carrier.encode(send.data[start : start + own.stop - own.start])
            mailbox.send(message, t.others, tag)
            carrier.decode_own(message, recv.data[own])
        for k, block in enumerate(blocks):
            yield mailbox.arrival(block)
            carrier.decode_many(block, [recv.data[shards.span(message.peer, k)] for message in block])
        yield from mailbox.finish()

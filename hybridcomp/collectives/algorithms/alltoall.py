"""All-to-all by a codec: a message for each other rank; a rank's own part is copied exactly."""

from __future__ import annotations

from hybridcomp.arrays import Flat
from hybridcomp.collectives.data_path.carrier import Carrier
from hybridcomp.collectives.execution.progress import Steps
from hybridcomp.collectives.vectors import Extents


def alltoallv(
    carrier: Carrier, send: Flat, outgoing: Extents, recv: Flat, incoming: Extents, tag: int
) -> Steps:
    """Send a part of ``send`` to each rank, and receive a part of ``recv`` from each.

    Args:
        carrier: codec, transport and statistics.
        send, recv: of the same dtype, with no memory in common.
        outgoing, incoming: per rank, the first element and the number of elements of its part.
        tag: this operation's tag.

    Raises:
        WireError, MismatchError: from a peer's message.
    """
    t = carrier.transport
    mailbox = carrier.mailbox()
    messages = [
        mailbox.receive(carrier.inbox_bytes(incoming[q][1]), q, tag) for q in t.others if incoming[q][1]
    ]
    with t.keeping((mailbox, messages)):
        for q in t.others:
            start, n = outgoing[q]
            if n:
                mailbox.send(carrier.encode(send.data[start : start + n]), [q], tag)
        (source, n), (target, _) = outgoing[t.rank], incoming[t.rank]
        carrier.copy(send.data[source : source + n], recv.data[target : target + n])
        yield mailbox.arrival(messages)
        for message in messages:
            start, n = incoming[message.peer]
            carrier.decode(message, recv.data[start : start + n])
        yield from mailbox.finish()

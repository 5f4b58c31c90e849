"""Gather, scatter and all-gather of parts of any size by a codec.

A part is encoded once, by its owner, in chunks whose size both ends know; a rank's own part is copied exactly where
nobody else gets it.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridcomp.arrays import Flat
from hybridcomp.collectives.data_path.carrier import Carrier
from hybridcomp.collectives.execution.progress import Steps
from hybridcomp.collectives.transport.mailbox import Incoming
from hybridcomp.collectives.vectors import Extents
from hybridcomp.schedules.shards import Shards


def allgatherv(carrier: Carrier, send: Flat, recv: Flat, incoming: Extents, tags: Sequence[int]) -> Steps:
    """Gather every rank's ``send``; all ranks, the sender too, get what the messages say.

    Args:
        carrier: codec, transport and statistics.
        send: this rank's part; may be the one in ``recv``.
        recv: all parts, of the same dtype.
        incoming: per rank, the first element and the number of elements of its part of ``recv``.
        tags: one.

    Raises:
        WireError, MismatchError: from a peer's message.
    """
    t = carrier.transport
    (tag,) = tags
    mailbox = carrier.mailbox()
    messages: list[tuple[Incoming, slice]] = []
    with t.keeping((mailbox, messages)):
        for q in t.others:
            for span in _spans(carrier, *incoming[q]):
                nbytes = carrier.inbox_bytes(span.stop - span.start)
                messages.append((mailbox.receive(nbytes, q, tag), span))
        first = incoming[t.rank][0]
        for span in _spans(carrier, *incoming[t.rank]):
            message = carrier.encode(send.data[span.start - first : span.stop - first])
            mailbox.send(message, t.others, tag)
            carrier.decode_own(message, recv.data[span])
        for arriving, span in messages:
            yield mailbox.arrival([arriving])
            carrier.decode(arriving, recv.data[span])
        yield from mailbox.finish()


def gatherv(
    carrier: Carrier, send: Flat, recv: Flat | None, incoming: Extents, root: int, tags: Sequence[int]
) -> Steps:
    """Gather every rank's ``send`` at ``root``.

    Args:
        carrier: codec, transport and statistics.
        send: this rank's part.
        recv: all parts at the root, of the same dtype; None elsewhere.
        incoming: at the root, as in :func:`allgatherv`.
        root: who gathers.
        tags: one.

    Raises:
        WireError, MismatchError: from a peer's message.
    """
    t = carrier.transport
    (tag,) = tags
    mailbox = carrier.mailbox()
    messages: list[tuple[Incoming, slice]] = []
    with t.keeping((mailbox, messages)):
        if recv is None:
            for span in _spans(carrier, 0, send.size):
                mailbox.send(carrier.encode(send.data[span]), [root], tag)
        else:
            for q in t.others:
                for span in _spans(carrier, *incoming[q]):
                    nbytes = carrier.inbox_bytes(span.stop - span.start)
                    messages.append((mailbox.receive(nbytes, q, tag), span))
            start, n = incoming[root]
            carrier.copy(send.data, recv.data[start : start + n])
            for arriving, span in messages:
                yield mailbox.arrival([arriving])
                carrier.decode(arriving, recv.data[span])
        yield from mailbox.finish()


def scatterv(
    carrier: Carrier, send: Flat | None, recv: Flat, outgoing: Extents, root: int, tags: Sequence[int]
) -> Steps:
    """Send each rank its part of the root's ``send``.

    Args:
        carrier: codec, transport and statistics.
        send: all parts at the root; None elsewhere.
        recv: this rank's part, of the same dtype.
        outgoing: at the root, per rank, the first element and the number of elements of its part of ``send``.
        root: who scatters.
        tags: one.

    Raises:
        WireError, MismatchError: from the root's message.
    """
    t = carrier.transport
    (tag,) = tags
    mailbox = carrier.mailbox()
    messages: list[tuple[Incoming, slice]] = []
    with t.keeping((mailbox, messages)):
        if send is None:
            for span in _spans(carrier, 0, recv.size):
                nbytes = carrier.inbox_bytes(span.stop - span.start)
                messages.append((mailbox.receive(nbytes, root, tag), span))
            for arriving, span in messages:
                yield mailbox.arrival([arriving])
                carrier.decode(arriving, recv.data[span])
        else:
            for q in t.others:
                for span in _spans(carrier, *outgoing[q]):
                    mailbox.send(carrier.encode(send.data[span]), [q], tag)
            start, n = outgoing[root]
            carrier.copy(send.data[start : start + n], recv.data)
        yield from mailbox.finish()


def _spans(carrier: Carrier, start: int, n: int) -> list[slice]:
    """Return the chunks of a part of ``n`` elements that begins at ``start``."""
    shards = Shards.fixed(n, 1, n, carrier.dtype.itemsize, carrier.chunk_bytes)
    spans = (shards.span(0, k) for k in range(shards.count))
    return [slice(start + s.start, start + s.stop) for s in spans]

"""Broadcast by a codec: the root encodes once, ranks forward the messages, everybody decodes them.

``tree``: down a binomial tree: log2(p) steps, and as many times the data out of the root's link.
``direct``: from the root to each rank: one step, p - 1 times the data.
``scatter``: a shard to each other rank, which forwards it to the rest: two steps, and the data out of each link once
(after van de Geijn's scatter and all-gather). For bulk.

The root, too, takes the decoded values, so that all ranks end with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridcomp.arrays import Flat
from hybridcomp.collectives.data_path.carrier import Carrier
from hybridcomp.collectives.execution.progress import Steps
from hybridcomp.collectives.transport.mailbox import Incoming
from hybridcomp.schedules.shards import Shards


def bcast(carrier: Carrier, buf: Flat, root: int, tags: Sequence[int]) -> Steps:
    """Broadcast ``buf`` of rank ``root`` down a binomial tree, chunk by chunk.

    Args:
        carrier: codec, transport and statistics.
        buf: the same count and dtype on all ranks.
        root: who has the values.
        tags: one.

    Raises:
        WireError, MismatchError: from the parent's message.
    """
    t = carrier.transport
    parent, children = binomial_tree((t.rank - root) % t.size, t.size)
    source = None if parent is None else (parent + root) % t.size
    yield from _downward(carrier, buf, source, [(c + root) % t.size for c in children], tags)


def direct_bcast(carrier: Carrier, buf: Flat, root: int, tags: Sequence[int]) -> Steps:
    """Broadcast ``buf`` of rank ``root`` from there to every rank, chunk by chunk. The bits of :func:`bcast`.

    Args:
        carrier, buf, root, tags: as of :func:`bcast`.

    Raises:
        WireError, MismatchError: from the root's message.
    """
    t = carrier.transport
    mine = t.rank == root
    yield from _downward(carrier, buf, None if mine else root, t.others if mine else [], tags)


def scatter_bcast(carrier: Carrier, buf: Flat, root: int, tags: Sequence[int]) -> Steps:
    """Broadcast ``buf`` of rank ``root``: a shard to each other rank, and from there to the rest, chunk by chunk.

    Args:
        carrier, buf, root, tags: as of :func:`bcast`.

    Raises:
        WireError, MismatchError: from a peer's message.
    """
    t = carrier.transport
    (tag,) = tags
    mailbox = carrier.mailbox()
    owners = [(root + i) % t.size for i in range(1, t.size)]
    shards = Shards.of(buf.size, len(owners), buf.dtype.itemsize, carrier.chunk_bytes)
    # In this order the root sends them, and so does every owner its own.
    chunks = [(i, k) for k in range(shards.count) for i in range(len(owners)) if shards.size(i, k)]
    if t.rank == root:
        with t.keeping(mailbox):
            for i, k in chunks:
                message = carrier.encode(buf.data[shards.span(i, k)])
                mailbox.send(message, [owners[i]], tag)
                carrier.decode_own(message, buf.data[shards.span(i, k)])
            yield from mailbox.finish()
        return
    coming: list[tuple[slice, list[int], Incoming]] = []
    rest = [q for q in t.others if q != root]
    for i, k in sorted(chunks, key=lambda chunk: (chunk[1] + (owners[chunk[0]] != t.rank), *chunk)):
        mine = (
            owners[i] == t.rank
        )  # a chunk before the others', so that it is on its way while this rank waits for them
        nbytes = carrier.inbox_bytes(shards.size(i, k))
        incoming = mailbox.receive(nbytes, root if mine else owners[i], tag)
        coming.append((shards.span(i, k), rest if mine else [], incoming))
    with t.keeping((mailbox, coming)):
        for span, onward, incoming in coming:
            yield mailbox.arrival([incoming])
            if onward:
                mailbox.forward(carrier.checked(incoming, span.stop - span.start), onward, tag)
            carrier.decode(incoming, buf.data[span])
        yield from mailbox.finish()


def _downward(carrier: Carrier, buf: Flat, source: int | None, down: list[int], tags: Sequence[int]) -> Steps:
    """Receive ``buf`` from rank ``source``, or encode it if that is None, and send it to ranks ``down``."""
    t = carrier.transport
    (tag,) = tags
    mailbox = carrier.mailbox()
    shards = Shards.fixed(buf.size, 1, buf.size, buf.dtype.itemsize, carrier.chunk_bytes)
    spans = [shards.span(0, k) for k in range(shards.count)]
    if source is None:
        with t.keeping(mailbox):
            for span in spans:
                message = carrier.encode(buf.data[span])
                mailbox.send(message, down, tag)
                carrier.decode_own(message, buf.data[span])
            yield from mailbox.finish()
    else:
        messages = [mailbox.receive(carrier.inbox_bytes(s.stop - s.start), source, tag) for s in spans]
        with t.keeping((mailbox, messages)):
            for span, incoming in zip(spans, messages, strict=True):
                yield mailbox.arrival([incoming])
                if down:
                    mailbox.forward(carrier.checked(incoming, span.stop - span.start), down, tag)
                carrier.decode(incoming, buf.data[span])
            yield from mailbox.finish()


def binomial_tree(rank: int, size: int) -> tuple[int | None, list[int]]:
    """Return parent and children, largest subtree first, in the binomial tree rooted at 0."""
    low = rank & -rank if rank else 1 << (size - 1).bit_length()
    children = []
    bit = low >> 1
    while bit:
        if rank + bit < size:
            children.append(rank + bit)
        bit >>= 1
    return (rank - low if rank else None), children

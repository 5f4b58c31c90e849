"""Broadcast by a codec: the root encodes once, a binomial tree forwards the message, everybody decodes it.

The root, too, takes the decoded values, so that all ranks end with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridcomp.arrays import Flat
from hybridcomp.collectives.carry import Carrier
from hybridcomp.collectives.engine import Steps
from hybridcomp.collectives.shards import Shards


def bcast(carrier: Carrier, buf: Flat, root: int, tags: Sequence[int]) -> Steps:
    """Broadcast ``buf`` of rank ``root``, chunk by chunk.

    Args:
        carrier: codec, transport and statistics.
        buf: the same count and dtype on all ranks.
        root: who has the values.
        tags: one.

    Raises:
        WireError, MismatchError: from the parent's message.
    """
    t = carrier.transport
    (tag,) = tags
    parent, children = binomial_tree((t.rank - root) % t.size, t.size)
    down = [(c + root) % t.size for c in children]
    mailbox = carrier.mailbox()
    shards = Shards.fixed(buf.size, 1, buf.size, buf.dtype.itemsize, carrier.chunk_bytes)
    spans = [shards.span(0, k) for k in range(shards.count)]
    if parent is None:
        with t.keeping(mailbox):
            for span in spans:
                message = carrier.encode(buf.data[span])
                mailbox.send(message, down, tag)
                carrier.decode_own(message, buf.data[span])
            yield from mailbox.finish()
    else:
        source = (parent + root) % t.size
        messages = [mailbox.receive(carrier.inbox_bytes(s.stop - s.start), source, tag) for s in spans]
        with t.keeping((mailbox, messages)):
            for span, incoming in zip(spans, messages, strict=True):
                yield mailbox.arrival([incoming])
                mailbox.forward(carrier.checked(incoming, span.stop - span.start), down, tag)
                carrier.decode(incoming, buf.data[span])
            yield from mailbox.finish()


def binomial_tree(rank: int, size: int) -> tuple[int | None, list[int]]:
    """Parent and children, largest subtree first, in the binomial tree rooted at 0."""
    low = rank & -rank if rank else 1 << (size - 1).bit_length()
    children = []
    bit = low >> 1
    while bit:
        if rank + bit < size:
            children.append(rank + bit)
        bit >>= 1
    return (rank - low if rank else None), children

"""All-reduce by a sparse codec: all ranks gather the messages of all ranks.

1. Each rank encodes its data once and sends the messages to all others.
2. Every rank adds the messages of all ranks, its own too, in rank order to zeros: all end with the same bits.

The sum is not encoded again, so what few elements a rank sends is all that is lost, and an error-feedback memory keeps
all of it. A rank receives the messages of all others, where :mod:`~.allreduce` and :mod:`~.oktopk` receive
2 (p - 1) / p of one: this is for few ranks, or few elements. Steps overlap chunk by chunk, and the result is written
once, while its chunk is in the cache.

After Renggli et al., "SparCML", arXiv:1802.08021 (sparse all-gather for sums that stay sparse).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridcomp.arrays import Flat
from hybridcomp.codecs import Memory
from hybridcomp.collectives.data_path.carrier import Carrier
from hybridcomp.collectives.execution.progress import Steps
from hybridcomp.collectives.transport.mailbox import Incoming
from hybridcomp.schedules.shards import Shards

_AHEAD = 4  # chunks sent before the first one is summed


def sparse_allreduce(
    carrier: Carrier,
    send: Flat,
    recv: Flat,
    tags: Sequence[int],
    *,
    mean: bool = False,
    memory: Memory | None = None,
) -> Steps:
    """Sum what the codec sends of ``send`` over all ranks into ``recv``.

    Args:
        carrier: a sparse codec, transport and statistics.
        send, recv: the same count and dtype; either the same memory or none in common.
        tags: one.
        mean: divide the sum by the number of ranks.
        memory: error feedback of as many elements, that does not track; its step has begun.

    Raises:
        WireError, MismatchError: from a peer's message.
    """
    t = carrier.transport
    (tag,) = tags
    mailbox = carrier.mailbox()
    shards = Shards.fixed(send.size, 1, send.size, send.dtype.itemsize, carrier.chunk_bytes)
    dtype = send.dtype if memory is None else send.dtype.accumulator
    parts: dict[int, list[Incoming]] = {}
    own: dict[int, Any] = {}

    def share(k: int) -> None:
        span = shards.span(0, k)
        nbytes = carrier.inbox_bytes(span.stop - span.start, dtype)
        parts[k] = [mailbox.receive(nbytes, q, tag) for q in sorted(t.others)]
        if memory is None:
            message = carrier.encode(send.data[span])
        else:
            message = carrier.encode_with_feedback(send.data[span], memory, span)
        own[k] = carrier.own_message(message, span.stop - span.start, dtype)
        mailbox.send(message, t.others, tag, keep=True)

    with t.keeping((mailbox, parts)):
        for k in range(shards.count):
            for ahead in range(_AHEAD) if k == 0 else (k + _AHEAD - 1,):
                if ahead < shards.count:
                    share(ahead)
            arrival = mailbox.arrival(parts[k])
            yield arrival._replace(events=[*arrival.events, *own[k].events])
            out = recv.data[shards.span(0, k)]
            total = carrier.total(parts.pop(k), own.pop(k), out, dtype)
            carrier.store(total, out, t.size if mean else 1)
        yield from mailbox.finish()

"""Reduce-scatter of floats by a codec: steps 1 and 2 of :mod:`.allreduce`, with shards of the caller's size."""

from __future__ import annotations

from hybridcomp.arrays import Flat
from hybridcomp.codecs import Memory
from hybridcomp.collectives.carry import Carrier, narrow
from hybridcomp.collectives.engine import Steps
from hybridcomp.collectives.shards import Shards
from hybridcomp.collectives.transport import Incoming, Mailbox, arrival

_AHEAD = 3


def reduce_scatter_block(
    carrier: Carrier, send: Flat, recv: Flat, tag: int, *, mean: bool = False, memory: Memory | None = None
) -> Steps:
    """Sum ``send`` over all ranks; rank r gets block r.

    Args:
        carrier: codec, transport and statistics.
        send: ``size * recv.size`` elements.
        recv: one block; may be a part of ``send``.
        tag: this operation's tag.
        mean: divide the sum by the number of ranks.
        memory: error feedback of ``send.size`` elements; its step has begun. This rank's own block is added
            uncompressed and leaves nothing in it, but under ``dgc``, as in an all-reduce, as if it were sent.

    Raises:
        WireError, MismatchError: from a peer's message.
    """
    t = carrier.transport
    mailbox = Mailbox(t)
    shards = Shards.fixed(send.size, t.size, recv.size, send.dtype.itemsize)
    dtype = send.dtype if memory is None else send.dtype.accumulator
    parts: dict[int, list[Incoming]] = {}

    def scatter(k: int) -> None:
        nbytes = carrier.inbox_bytes(shards.size(t.rank, k), dtype)
        parts[k] = [mailbox.receive(nbytes, q, tag) for q in sorted(t.others)]
        for q in t.others:
            span = shards.span(q, k)
            if memory is None:
                buffer, length = carrier.encode(send.data[span])
            else:
                buffer, length = carrier.encode_with_feedback(send.data[span], memory, span)
            carrier.call.wire_bytes += length
            mailbox.send(buffer, length, [q], tag)

    with t.keeping((mailbox, parts)):
        for k in range(shards.count):
            for ahead in range(_AHEAD) if k == 0 else (k + _AHEAD - 1,):
                if ahead < shards.count:
                    scatter(ahead)
            yield arrival(parts[k])
            own = shards.span(t.rank, k)
            acc = carrier.own(send.data[own], memory, own)
            for message in parts.pop(k):
                carrier.decode_add(message.buffer, acc, message.peer, dtype)
            if mean:
                acc /= t.size
            start = own.start - t.rank * recv.size
            recv.data[start : start + acc.size] = narrow(acc, recv.dtype)
        yield mailbox.sent()
    mailbox.close()

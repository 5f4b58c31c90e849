"""Reduce-scatter of floats by a codec: steps 1 and 2 of :mod:`~.allreduce`, with shards of the caller's size."""

from __future__ import annotations

from collections.abc import Sequence

from hybridcomp.arrays import Flat
from hybridcomp.codecs import Memory
from hybridcomp.collectives.data_path.carrier import Carrier
from hybridcomp.collectives.execution.progress import Steps
from hybridcomp.collectives.transport.mailbox import Incoming
from hybridcomp.schedules.shards import Shards

_AHEAD = 3


def reduce_scatter_block(
    carrier: Carrier,
    send: Flat,
    recv: Flat,
    tags: Sequence[int],
    *,
    mean: bool = False,
    memory: Memory | None = None,
) -> Steps:
    """Sum ``send`` over all ranks; rank r gets block r.

    Args:
        carrier: codec, transport and statistics.
        send: ``size * recv.size`` elements.
        recv: one block; may be a part of ``send``.
        tags: one.
        mean: divide the sum by the number of ranks.
        memory: error feedback of ``send.size`` elements; its step has begun. This rank's own block is added
            uncompressed and leaves nothing in it, but under ``dgc``, as in an all-reduce, as if it were sent.

    Raises:
        WireError, MismatchError: from a peer's message.
    """
    t = carrier.transport
    (tag,) = tags
    mailbox = carrier.mailbox()
    shards = Shards.fixed(send.size, t.size, recv.size, send.dtype.itemsize, carrier.chunk_bytes)
    dtype = send.dtype if memory is None else send.dtype.accumulator
    parts: dict[int, list[Incoming]] = {}

    def scatter(k: int) -> None:
        nbytes = carrier.inbox_bytes(shards.size(t.rank, k), dtype)
        parts[k] = [mailbox.receive(nbytes, q, tag) for q in sorted(t.others)]
        spans = [shards.span(q, k) for q in t.others]
        for q, message in zip(t.others, carrier.encode_parts(send.data, spans, memory), strict=True):
            mailbox.send(message, [q], tag)

    with t.keeping((mailbox, parts)):
        for k in range(shards.count):
            for ahead in range(_AHEAD) if k == 0 else (k + _AHEAD - 1,):
                if ahead < shards.count:
                    scatter(ahead)
            yield mailbox.arrival(parts[k])
            own = shards.span(t.rank, k)
            start, ranks = own.start - t.rank * recv.size, t.size if mean else 1
            out = recv.data[start : start + own.stop - own.start]
            carrier.sum_parts(send.data, own, parts.pop(k), memory, dtype, ranks, out)
        yield from mailbox.finish()

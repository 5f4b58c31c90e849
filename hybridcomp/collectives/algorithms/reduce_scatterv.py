"""Reduce-scatter by a codec of parts whose sizes differ: as :mod:`~.reduce_scatter`, with parts of any size."""

from __future__ import annotations

from collections.abc import Sequence

from hybridcomp.arrays import Flat
from hybridcomp.codecs import Memory
from hybridcomp.collectives.data_path.carrier import Carrier
from hybridcomp.collectives.execution.progress import Steps
from hybridcomp.collectives.transport.mailbox import Incoming
from hybridcomp.collectives.vectors import following
from hybridcomp.schedules.shards import Shards

_AHEAD = 3


def reduce_scatterv(
    carrier: Carrier,
    send: Flat,
    recv: Flat,
    counts: Sequence[int],
    tags: Sequence[int],
    *,
    mean: bool = False,
    memory: Memory | None = None,
) -> Steps:
    """Sum ``send`` over all ranks; rank r gets part r, of ``counts[r]`` elements.

    Args:
        carrier: codec, transport and statistics.
        send: all parts, one after the other.
        recv: this rank's part; may be a part of ``send``.
        counts: elements of each rank's part.
        tags: one.
        mean: divide the sum by the number of ranks.
        memory: as of :func:`~hybridcomp.collectives.algorithms.reduce_scatter.reduce_scatter_block`.

    Raises:
        WireError, MismatchError: from a peer's message.
    """
    t = carrier.transport
    (tag,) = tags
    mailbox = carrier.mailbox()
    dtype = send.dtype if memory is None else send.dtype.accumulator
    chunks = [
        [slice(start + s.start, start + s.stop) for s in map(cut.span, [0] * cut.count, range(cut.count))]
        for start, n in following(counts)
        for cut in [Shards.fixed(n, 1, n, send.dtype.itemsize, carrier.chunk_bytes)]
    ]
    mine = chunks[t.rank]
    first = mine[0].start if mine else 0
    parts: dict[int, list[Incoming]] = {}

    def scatter(k: int) -> None:
        if k < len(mine):
            nbytes = carrier.inbox_bytes(mine[k].stop - mine[k].start, dtype)
            parts[k] = [mailbox.receive(nbytes, q, tag) for q in sorted(t.others)]
        owners = [q for q in t.others if k < len(chunks[q])]
        messages = carrier.encode_parts(send.data, [chunks[q][k] for q in owners], memory)
        for q, message in zip(owners, messages, strict=True):
            mailbox.send(message, [q], tag)

    rounds = max(map(len, chunks))
    with t.keeping((mailbox, parts)):
        for k in range(rounds):
            for ahead in range(min(_AHEAD, rounds)) if k == 0 else (k + _AHEAD - 1,):
                scatter(ahead)
            if k < len(mine):
                yield mailbox.arrival(parts[k])
                out = recv.data[mine[k].start - first : mine[k].stop - first]
                ranks = t.size if mean else 1
                carrier.sum_parts(send.data, mine[k], parts.pop(k), memory, dtype, ranks, out)
        yield from mailbox.finish()

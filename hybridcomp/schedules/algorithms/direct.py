"""All-reduce and its kin by one exchange of encoded shards with every other rank.

1. Each rank owns a shard. It encodes every other rank's shard of its own data and sends it there.
2. The owner adds the others' messages to its own shard in rank order.
3. The owner encodes the sum once and sends it to all.
4. Every rank, the owner too, takes the decoded message: all ranks end with the same bits.
"""

from __future__ import annotations

from hybridcomp.schedules.schedule import Buffer, Operation, Recorder, Schedule, Span
from hybridcomp.schedules.shards import Shards
from hybridcomp.schedules.topology import Topology
from hybridcomp.schedules.window import Slots, Stage, pipelined

_AHEAD = 3  # chunks sent before the first one is summed
_BEHIND = 2  # chunks summed before the first result is decoded
_PARTS, _RESULTS = 0, 1  # channels


def all_reduce(operation: Operation, topology: Topology, rank: int) -> Schedule:
    """Sum ``SEND`` over all ranks into ``RECV``."""
    r = Recorder(operation, topology, rank)
    (n,) = operation.counts
    shards = Shards.of(n, r.ranks, operation.itemsize, operation.chunk_bytes)
    part, total = operation.part_wide, operation.sum_wide
    outgoing = {q: Slots(r, _AHEAD, shards.chunk, wide=part) for q in r.others}
    incoming = {q: Slots(r, _AHEAD, shards.chunk, wide=part) for q in r.others}
    result = Slots(r, _BEHIND, shards.chunk, wide=total)
    results = {q: Slots(r, _AHEAD + _BEHIND, shards.chunk, wide=total) for q in r.others}

    def span(buffer: Buffer, q: int, k: int) -> Span:
        cut = shards.span(q, k)
        return Span(buffer, cut.start, cut.stop - cut.start)

    def memory(q: int, k: int) -> int:
        return shards.span(q, k).start if operation.feedback else -1

    def scatter(k: int) -> None:
        own = shards.size(rank, k)
        for q in sorted(r.others):
            if own:
                r.recv(incoming[q][k], own, q, _PARTS)
            if shards.size(q, k):
                r.recv(results[q][k], shards.size(q, k), q, _RESULTS)
        for q in r.others:
            if shards.size(q, k):
                r.encode(outgoing[q][k], span(Buffer.SEND, q, k), memory=memory(q, k))
                r.send(outgoing[q][k], q, _PARTS)

    def reduce(k: int) -> None:
        own = span(Buffer.SEND, rank, k)
        if own.count:
            parts = [incoming[q][k] for q in sorted(r.others)]
            out = span(Buffer.RECV, rank, k)
            r.sum_encode(parts, own, result[k], out, divide=operation.mean, memory=memory(rank, k))
            for q in r.others:
                r.send(result[k], q, _RESULTS)

    def gather(k: int) -> None:
        for q in r.others:
            if shards.size(q, k):
                tracked = memory(q, k)
                r.decode(results[q][k], span(Buffer.RECV, q, k), memory=tracked)

    pipelined(shards.count, Stage(_AHEAD - 1, scatter), Stage(0, reduce), Stage(-_BEHIND, gather))
    return r.finish()

"""Build an all-reduce of short arrays in one exchange: every rank sends all of its data to all, and sums all messages.

1. Each rank encodes its data once and sends the message to every other rank.
2. Every rank adds the messages of all ranks, its own too, in rank order to zeros: all end with the same bits.

This takes one latency, where an exchange of shards takes two, and p / 2 times the bytes. The sum is not encoded again.
"""

from __future__ import annotations

from hybridcomp.schedules.recorder import Recorder
from hybridcomp.schedules.schedule import Buffer, Operation, Schedule, Span
from hybridcomp.schedules.topology import Topology


def all_reduce(operation: Operation, topology: Topology, rank: int) -> Schedule:
    """Sum ``SEND`` over all ranks into ``RECV``."""
    r = Recorder(operation, topology, rank)
    (n,) = operation.counts
    if not n:
        return r.finish()
    wide = operation.part_wide
    slots = [r.slot(n, wide=wide) for _ in range(r.ranks)]
    for q in sorted(r.others):
        r.recv(slots[q], n, q)
    r.encode(slots[rank], Span(Buffer.SEND, 0, n), memory=0 if operation.feedback else -1)
    for q in r.others:
        r.send(slots[rank], q)
    r.sum(slots, None, Span(Buffer.RECV, 0, n), divide=operation.mean)
    return r.finish()

"""Build an all-reduce by a sparse codec: all ranks gather the messages of all ranks, chunk by chunk.

1. Each rank encodes its data once and sends the messages to all others.
2. Every rank adds the messages of all ranks, its own too, in rank order to zeros: all end with the same bits.

The sum is not encoded again, so only the elements that a rank does not send are lost, and an error-feedback memory
keeps all of them. A rank receives the messages of all others, where ``direct`` receives 2 (p - 1) / p of one: this is
for few ranks, or few elements.

After Renggli et al., "SparCML", arXiv:1802.08021 (sparse all-gather for sums that stay sparse).
"""

from __future__ import annotations

from hybridcomp.schedules.parts import Parts
from hybridcomp.schedules.recorder import Recorder
from hybridcomp.schedules.schedule import Buffer, Operation, Schedule
from hybridcomp.schedules.topology import Topology
from hybridcomp.schedules.window import Slots, Stage, pipelined

_AHEAD = 4  # chunks sent before the first one is summed


def all_reduce(operation: Operation, topology: Topology, rank: int) -> Schedule:
    """Sum the elements of ``SEND`` that the codec selects over all ranks into ``RECV``."""
    r = Recorder(operation, topology, rank)
    parts = Parts.given(operation)
    slots = [Slots(r, _AHEAD, parts.longest(0), wide=operation.part_wide) for _ in range(r.ranks)]

    def share(k: int) -> None:
        for q in sorted(r.others):
            r.recv(slots[q][k], parts.size(0, k), q)
        span = parts.whole(Buffer.SEND, 0, k)
        r.encode(slots[rank][k], span, memory=operation.memory(span.start))
        for q in r.others:
            r.send(slots[rank][k], q)

    def add(k: int) -> None:
        out = parts.whole(Buffer.RECV, 0, k)
        r.sum([pool[k] for pool in slots], None, out, divide=operation.mean)

    pipelined(parts.rounds, Stage(_AHEAD - 1, share), Stage(0, add))
    return r.finish()

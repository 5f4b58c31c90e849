"""Build a broadcast of bulk: the root sends a shard to each other rank, which sends it on to the rest by chunks.

1. The root encodes the chunks of a shard for each other rank, and sends them there. It takes the decoded values, too.
2. That rank checks them, sends them on to all ranks but the root, and decodes them.

This takes two steps, and the data leave each link once. (After van de Geijn's scatter and all-gather: Barnett, Gupta,
Payne, Shuler, van de Geijn and Watts, "Interprocessor collective communication library", 1994.)
"""

from __future__ import annotations

from hybridcomp.schedules.algorithms import direct
from hybridcomp.schedules.parts import Parts
from hybridcomp.schedules.recorder import Recorder
from hybridcomp.schedules.schedule import Buffer, Operation, Schedule
from hybridcomp.schedules.topology import Topology
from hybridcomp.schedules.window import Slots, Stage, pipelined

_AHEAD = 3  # chunks of a shard for which there is room


def broadcast(operation: Operation, topology: Topology, rank: int) -> Schedule:
    """Broadcast the root's ``SEND`` into every rank's ``RECV``."""
    r = Recorder(operation, topology, rank)
    if r.ranks == 1:
        return direct.broadcast(operation, topology, rank)
    root = operation.root
    owners = [(root + i) % r.ranks for i in range(1, r.ranks)]
    parts = Parts.even(operation, len(owners))
    slots = [Slots(r, _AHEAD, parts.longest(i)) for i in range(len(owners))]
    rest = [q for q in r.others if q != root]

    def shards(k: int) -> list[int]:
        return [i for i in range(len(owners)) if parts.size(i, k)]

    def give(k: int) -> None:
        for i in shards(k):
            r.encode(slots[i][k], parts.whole(Buffer.SEND, i, k))
            r.send(slots[i][k], owners[i])
            r.decode(slots[i][k], parts.whole(Buffer.RECV, i, k))

    def receive(k: int) -> None:
        for i in shards(k):
            r.recv(slots[i][k], parts.size(i, k), root if owners[i] == rank else owners[i])

    def send_on(k: int) -> None:
        for i in shards(k):
            if owners[i] == rank and rest:
                r.check(slots[i][k])
                for q in rest:
                    r.send(slots[i][k], q)

    def take(k: int) -> None:
        for i in shards(k):
            r.decode(slots[i][k], parts.whole(Buffer.RECV, i, k))

    if rank == root:
        pipelined(parts.rounds, Stage(0, give))
    else:
        pipelined(parts.rounds, Stage(_AHEAD - 1, receive), Stage(1, send_on), Stage(0, take))
    return r.finish()

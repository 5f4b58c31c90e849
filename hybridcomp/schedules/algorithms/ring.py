"""Build all-reduce, reduce-scatter and all-gather that load every link evenly, with the bits of ``direct``.

*   Parts go in rounds. In round i a rank sends its part of the shard of rank + i and receives from rank - i, so that
    no rank gets messages from many at once. (The pairwise exchange of Thakur, Rabenseifner and Gropp, "Optimization of
    Collective Communication Operations in MPICH", 2005.)
*   Results go around: a rank sends the message that it encoded to the next rank alone, which checks it, sends it on and
    decodes it. (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009, also
    send partial sums around; encoded again at each hop their error would grow.)

Every part and every sum is encoded once, in the same chunks as by ``direct``, and added in the same order: the bits are
the same, with error feedback too. A result takes p - 1 steps, so this is for bulk.

The results of each rank have their own channel. On one channel for all, a message that waits until it may be written
over (where ranks read in place: until it has been around) would hold up the very messages that it waits for.
"""

from __future__ import annotations

from hybridcomp.schedules.parts import Parts
from hybridcomp.schedules.recorder import Recorder
from hybridcomp.schedules.schedule import Buffer, Operation, Schedule
from hybridcomp.schedules.topology import Topology
from hybridcomp.schedules.window import Slots, Stage, pipelined

_CHUNKS = 2  # chunks of each shard for whose parts there is room
_TURNS = 2  # turns of results for which there is room
_PARTS, _RESULTS = 0, 1  # channels: of parts, and the first one of results


def all_reduce(operation: Operation, topology: Topology, rank: int) -> Schedule:
    """Sum ``SEND`` over all ranks into ``RECV``."""
    r = Recorder(operation, topology, rank)
    parts = Parts.even(operation, r.ranks)
    rounds = _Rounds(r, parts)
    relay = _Relay(r, parts, _RESULTS, wide=operation.sum_wide)
    result = Slots(r, _TURNS, parts.longest(rank), wide=operation.sum_wide)

    def reduce(k: int) -> None:
        if parts.size(rank, k):
            own, out = parts.whole(Buffer.SEND, rank, k), parts.whole(Buffer.RECV, rank, k)
            memory = operation.memory(own.start)
            r.sum_encode(rounds.messages(k), own, result[k], out, divide=operation.mean, memory=memory)
            relay.send(result[k], rank)

    stages = Stage(1, rounds.exchange), Stage(1, relay.receive), Stage(0, reduce), Stage(0, relay.pass_on)
    pipelined(relay.turns, *stages)
    return r.finish()


def reduce_scatter(operation: Operation, topology: Topology, rank: int) -> Schedule:
    """Sum ``SEND`` over all ranks; this rank's part goes to ``RECV``. Parts may be of any size, and go in rounds."""
    r = Recorder(operation, topology, rank)
    parts = Parts.given(operation)
    rounds = _Rounds(r, parts)

    def reduce(k: int) -> None:
        if parts.size(rank, k):
            own, out = parts.whole(Buffer.SEND, rank, k), parts.alone(Buffer.RECV, rank, k)
            memory = operation.memory(own.start)
            r.sum(rounds.messages(k), own, out, divide=operation.mean, memory=memory)

    pipelined(parts.rounds, Stage(1, rounds.exchange), Stage(0, reduce))
    return r.finish()


def all_gather(operation: Operation, topology: Topology, rank: int) -> Schedule:
    """Gather every rank's ``SEND`` into ``RECV``, in rank order, around the ring; parts may be of any size."""
    r = Recorder(operation, topology, rank)
    parts = Parts.given(operation)
    relay = _Relay(r, parts, 0, wide=False)
    own = Slots(r, _TURNS, parts.longest(rank))

    def give(k: int) -> None:
        if parts.size(rank, k):
            r.encode(own[k], parts.alone(Buffer.SEND, rank, k))
            relay.send(own[k], rank)
            r.decode(own[k], parts.whole(Buffer.RECV, rank, k))

    pipelined(relay.turns, Stage(1, relay.receive), Stage(0, give), Stage(0, relay.pass_on))
    return r.finish()


class _Rounds:
    """Pairwise exchange of parts: other ranks' parts are encoded and sent in rounds, this rank's shard is received."""

    def __init__(self, r: Recorder, parts: Parts) -> None:
        self._r, self._parts = r, parts
        wide = r.operation.part_wide
        self._outgoing = {q: Slots(r, _CHUNKS, parts.longest(q), wide=wide) for q in r.others}
        self._incoming = {q: Slots(r, _CHUNKS, parts.longest(r.rank), wide=wide) for q in r.others}

    def exchange(self, k: int) -> None:
        """Record all rounds of the chunks ``k``."""
        r, parts = self._r, self._parts
        for i in range(1, r.ranks):
            source, to = (r.rank - i) % r.ranks, (r.rank + i) % r.ranks
            if parts.size(r.rank, k):
                r.recv(self._incoming[source][k], parts.size(r.rank, k), source, _PARTS)
            if parts.size(to, k):
                span, slot = parts.whole(Buffer.SEND, to, k), self._outgoing[to][k]
                r.encode(slot, span, memory=r.operation.memory(span.start))
                r.send(slot, to, _PARTS)

    def messages(self, k: int) -> list[int]:
        """Return the slots of the others' parts of chunk ``k`` of this rank's shard, in rank order."""
        return [self._incoming[q][k] for q in sorted(self._r.others)]


class _Relay:
    """Encoded chunks of all ranks' shards on their way around the ring.

    In turn k a rank first sends chunk k of its own shard, then takes the messages that the rank before it sent in turn
    k - 1: chunk k - h of the shard of rank - h, for each h from 1 up, to be sent on unless it has been around.

    Attributes:
        turns: number of turns.
    """

    def __init__(self, r: Recorder, parts: Parts, channel: int, *, wide: bool) -> None:
        """Relay messages of elements that are ``wide`` or not, on channels from ``channel`` on."""
        self._r, self._parts, self._channel = r, parts, channel
        self.turns = parts.rounds + r.ranks - 1 if parts.rounds else 0
        self._slots = {q: Slots(r, _TURNS + 1, parts.longest(q), wide=wide) for q in reversed(r.others)}

    def send(self, slot: int, owner: int) -> None:
        """Send a message of an owner's shard to the next rank, if there is one."""
        if self._r.ranks > 1:
            self._r.send(slot, self._r.others[0], self._channel + owner)

    def receive(self, k: int) -> None:
        """Receive the messages of turn ``k``."""
        for chunk, owner in self._coming(k):
            count, channel = self._parts.size(owner, chunk), self._channel + owner
            self._r.recv(self._slots[owner][chunk], count, self._r.others[-1], channel)

    def pass_on(self, k: int) -> None:
        """Send on and decode the messages of turn ``k``."""
        r = self._r
        for chunk, owner in self._coming(k):
            slot = self._slots[owner][chunk]
            if owner != r.others[0]:
                r.check(slot)
                self.send(slot, owner)
            out = self._parts.whole(Buffer.RECV, owner, chunk)
            r.decode(slot, out, memory=r.operation.memory(out.start))

    def _coming(self, k: int) -> list[tuple[int, int]]:
        """Return chunk and owner of each message of turn ``k``."""
        r = self._r
        coming = [(k - hops, (r.rank - hops) % r.ranks) for hops in range(1, min(r.ranks, k + 1))]
        return [(chunk, owner) for chunk, owner in coming if self._parts.size(owner, chunk)]

"""Build reductions and an all-gather over hosts with several ranks: compressed across, inside a host exact or not.

Every rank owns a part of the result. On each other host one rank *leads* that part: the ranks of a host lead about
equally many, so that they share the crossing.

1. Inside a host: each rank hands its own data of a part, as they are, to the part's leader, which adds them in rank
   order, in float32 (float64 for float64).
2. Across: leaders encode these sums and send them to the owner, which adds them in the order of the hosts.
3. In an all-reduce, the owner encodes the sum once and sends it to the leaders of the other hosts and to the ranks of
   its own host.
4. Leaders pass that message on inside their host. Every rank decodes it: all end with the same bits.

A host's link carries as much as one rank's in a direct all-reduce between the hosts: 2 (h - 1) / h of the encoded
buffer for h hosts. Error feedback corrects the sums that leaders encode in step 2 and owners in step 3.

In two-level reductions step 1 is encoded, too, as in LoCo (Xie et al., arXiv 2407.04480), and error feedback also
corrects that step: a rank hands a part over, leads it or owns it, so that one memory has room for all three.
"""

from __future__ import annotations

from functools import partial

from hybridcomp.schedules.parts import Parts
from hybridcomp.schedules.recorder import Recorder
from hybridcomp.schedules.schedule import Buffer, Operation, Schedule, Span
from hybridcomp.schedules.topology import Topology
from hybridcomp.schedules.window import Slots, Stage, pipelined

_AHEAD = 1  # chunks handed to their leaders before the first one is summed there
_CROSSING = 2  # chunks sent across before the first one is summed by its owner
_BEHIND = 2  # chunks summed by their owners before the first result is decoded
_HANDED, _CROSSED, _RESULTS, _PASSED = range(4)  # channels
_ROOM = _AHEAD + _CROSSING + 1  # chunks whose receives are posted and that their owner has not summed
_LONG_ROOM = _ROOM + _BEHIND + 1  # chunks whose receives are posted and whose results are not decoded


def refuses(topology: Topology) -> str | None:
    """Say why a hierarchy is of no use on these hosts; None if it is of use."""
    if topology.count == 1:
        return "all ranks are on one host"
    return "each rank has a host of its own" if topology.largest == 1 else None


def all_reduce(operation: Operation, topology: Topology, rank: int, *, twice: bool = False) -> Schedule:
    """Sum ``SEND`` over all ranks into ``RECV``; with ``twice`` step 1 is encoded, too."""
    r = Recorder(operation, topology, rank)
    parts = Parts.even(operation, r.ranks)
    crossing = _Crossing(r, parts, twice=twice)
    result = Slots(r, _BEHIND, parts.longest(rank), wide=operation.sum_wide)
    spread = _Spread(r, parts, crossing.roles, (_RESULTS, _PASSED), wide=operation.sum_wide)

    def hand_over(k: int) -> None:
        crossing.hand_over(k)
        spread.receive(k)

    def reduce(k: int) -> None:
        if parts.size(rank, k):
            own, slots = crossing.addends(k)
            span, out = parts.whole(Buffer.SEND, rank, k), parts.whole(Buffer.RECV, rank, k)
            memory = operation.memory(span.start)
            r.sum_encode(slots, own, result[k], out, divide=operation.mean, memory=memory)
            spread.send(result[k])

    pipelined(
        parts.rounds,
        Stage(_AHEAD, hand_over),
        Stage(0, crossing.cross),
        Stage(-_CROSSING, reduce),
        Stage(-_CROSSING - _BEHIND, spread.pass_on),
        Stage(-_CROSSING - _BEHIND - 1, spread.take),
    )
    return r.finish()


def reduce_scatter(operation: Operation, topology: Topology, rank: int, *, twice: bool = False) -> Schedule:
    """Sum ``SEND`` over all ranks by steps 1 and 2; this rank's part goes to ``RECV``. Parts may be of any size."""
    r = Recorder(operation, topology, rank)
    parts = Parts.given(operation)
    crossing = _Crossing(r, parts, twice=twice)

    def reduce(k: int) -> None:
        if parts.size(rank, k):
            own, slots = crossing.addends(k)
            start, out = parts.start(rank, k), parts.alone(Buffer.RECV, rank, k)
            r.sum(slots, own, out, divide=operation.mean, memory=operation.memory(start))

    stages = Stage(_AHEAD, crossing.hand_over), Stage(0, crossing.cross), Stage(-_CROSSING, reduce)
    pipelined(parts.rounds, *stages)
    return r.finish()


all_reduce_twice = partial(all_reduce, twice=True)
reduce_scatter_twice = partial(reduce_scatter, twice=True)


def all_gather(operation: Operation, topology: Topology, rank: int) -> Schedule:
    """Gather every rank's ``SEND`` into ``RECV``, in rank order; each message crosses to a host once.

    1. Each rank encodes its part and sends it to its own host's ranks and to its leader on each other host.
    2. Leaders pass it on inside their host. Every rank, the sender too, decodes the same messages.
    """
    r = Recorder(operation, topology, rank)
    parts = Parts.given(operation)
    spread = _Spread(r, parts, Roles(topology, rank), (0, 1), wide=False)
    own = Slots(r, _BEHIND, parts.longest(rank))

    def give(k: int) -> None:
        spread.receive(k)
        if parts.size(rank, k):
            r.encode(own[k], parts.alone(Buffer.SEND, rank, k))
            spread.send(own[k])
            r.decode(own[k], parts.whole(Buffer.RECV, rank, k))

    pipelined(parts.rounds, Stage(_AHEAD, give), Stage(0, spread.pass_on), Stage(-1, spread.take))
    return r.finish()


class Roles:
    """Roles of ranks, as one rank sees them: the leader of each part.

    Attributes:
        local: other ranks of this host, in order.
        led: ranks whose parts this rank leads on its host, its own part first.
        handed: each rank of ``local``, with the ranks whose parts it leads, in the order in which it leads them.
        peers: leaders of this rank's part on the other hosts, in the order of the hosts.
    """

    def __init__(self, topology: Topology, rank: int) -> None:
        host = topology.hosts[rank]
        ranks = [topology.ranks(h) for h in range(topology.count)]
        self._mine = ranks[host]
        self._place = [ranks[h].index(q) for q, h in enumerate(topology.hosts)]
        self.local = [q for q in self._mine if q != rank]
        self.led = self._led_by(rank)
        self.handed = [(p, self._led_by(p)) for p in self.local]
        self.peers = [of[self._place[rank] % len(of)] for h, of in enumerate(ranks) if h != host]

    def leader(self, owner: int) -> int:
        """Return the rank that leads an owner's part on this host; the owner itself if it is on this host."""
        return self._mine[self._place[owner] % len(self._mine)]

    def _led_by(self, rank: int) -> list[int]:
        size = len(self._place)
        return [q for q in ((rank + i) % size for i in range(size)) if self.leader(q) == rank]


class _Crossing:
    """Recorder of steps 1 and 2 of a reduction over hosts, on one rank, chunk by chunk."""

    def __init__(self, r: Recorder, parts: Parts, *, twice: bool) -> None:
        self._r, self._parts, self._twice = r, parts, twice
        self.roles = roles = Roles(r.topology, r.rank)
        given = [(p, q) for p, led in roles.handed for q in led]
        taken = [(q, p) for q in roles.led for p in roles.local]
        plain, wide = (None, r.operation.part_wide) if twice else (True, False)
        self._giving = {
            (p, q): Slots(r, _AHEAD + 1, parts.longest(q), wide=wide, plain=plain) for p, q in given
        }
        self._taking = {(q, p): Slots(r, _ROOM, parts.longest(q), wide=wide, plain=plain) for q, p in taken}
        self._crossing = {q: Slots(r, _CROSSING, parts.longest(q), wide=True) for q in roles.led}
        self._arriving = {p: Slots(r, _ROOM, parts.longest(r.rank), wide=True) for p in roles.peers}
        # Error-feedback memory corrects the sum of a host, not each rank's part: the sum needs its own place.
        self._rooms: dict[tuple[int, int], Span] = {}

    def hand_over(self, k: int) -> None:
        """Record step 1 for chunk ``k`` of every part, and the receives for it and for step 2."""
        r, parts = self._r, self._parts
        for q in self._led(k):
            for p in self.roles.local:
                r.recv(self._taking[q, p][k], parts.size(q, k), p, _HANDED)
        if parts.size(r.rank, k):
            for p in self.roles.peers:
                r.recv(self._arriving[p][k], parts.size(r.rank, k), p, _CROSSED)
        for p, led in self.roles.handed:
            for q in led:
                if parts.size(q, k):
                    slot = self._giving[p, q][k]
                    span = parts.whole(Buffer.SEND, q, k)
                    r.encode(slot, span, memory=r.operation.memory(span.start) if self._twice else -1)
                    r.send(slot, p, _HANDED)

    def cross(self, k: int) -> None:
        """Encode the sums of step 1, and send them to their owners."""
        r = self._r
        for q in self._led(k):
            if q == r.rank:
                continue
            span, slot = self._parts.whole(Buffer.SEND, q, k), self._crossing[q][k]
            if r.operation.feedback:
                r.encode(slot, self._host_sum(q, k), memory=r.operation.memory(span.start))
            else:
                r.sum_encode(self._handed(q, k), span, slot, None)
            r.send(slot, q, _CROSSED)

    def addends(self, k: int) -> tuple[Span, list[int]]:
        """Return the addends of the sum of this rank's chunk ``k``: a span, and messages that are added to it."""
        rank, crossed = self._r.rank, [self._arriving[p][k] for p in self.roles.peers]
        if self._r.operation.feedback and self.roles.local:
            return self._host_sum(rank, k), crossed
        return self._parts.whole(Buffer.SEND, rank, k), self._handed(rank, k) + crossed

    def _led(self, k: int) -> list[int]:
        return [q for q in self.roles.led if self._parts.size(q, k)]

    def _handed(self, q: int, k: int) -> list[int]:
        return [self._taking[q, p][k] for p in self.roles.local]

    def _host_sum(self, q: int, k: int) -> Span:
        """Sum this host's elements of a chunk."""
        key = q, k % _CROSSING
        if key not in self._rooms:
            self._rooms[key] = self._r.scratch(self._parts.longest(q))
        room = self._rooms[key]
        out = Span(room.buffer, room.start, self._parts.size(q, k))
        self._r.sum(self._handed(q, k), self._parts.whole(Buffer.SEND, q, k), out)
        return out


class _Spread:
    """Recorder of steps 3 and 4 on one rank, which send encoded chunks of all ranks to all."""

    def __init__(
        self, r: Recorder, parts: Parts, roles: Roles, channels: tuple[int, int], *, wide: bool
    ) -> None:
        """Spread messages of elements that are ``wide`` or not, on the ``channels`` of steps 3 and 4."""
        self._r, self._parts, self._roles = r, parts, roles
        self._direct, self._passed = channels
        others = sorted(r.others)
        self._slots = {q: Slots(r, _LONG_ROOM, parts.longest(q), wide=wide) for q in others}
        self._from_owner = [q for q in others if roles.leader(q) in (q, r.rank)]
        self._from_leader = [q for q in others if roles.leader(q) not in (q, r.rank)]

    def send(self, slot: int) -> None:
        """Send this rank's own message."""
        for q in [*self._roles.peers, *self._roles.local]:
            self._r.send(slot, q, self._direct)

    def receive(self, k: int) -> None:
        """Receive the chunks ``k``, from their owners or from the ranks that lead them here."""
        for q in sorted(self._r.others):
            if self._parts.size(q, k):
                leader = self._roles.leader(q)
                source, channel = (q, self._direct) if q in self._from_owner else (leader, self._passed)
                self._r.recv(self._slots[q][k], self._parts.size(q, k), source, channel)

    def pass_on(self, k: int) -> None:
        """Send on the chunks that this rank leads, and decode messages from owners."""
        for q in self._from_owner:
            if self._parts.size(q, k) and self._roles.leader(q) == self._r.rank and self._roles.local:
                self._r.check(self._slots[q][k])
                for p in self._roles.local:
                    self._r.send(self._slots[q][k], p, self._passed)
        self._decode(self._from_owner, k)

    def take(self, k: int) -> None:
        """Decode messages from leaders."""
        self._decode(self._from_leader, k)

    def _decode(self, owners: list[int], k: int) -> None:
        for q in owners:
            if self._parts.size(q, k):
                out = self._parts.whole(Buffer.RECV, q, k)
                self._r.decode(self._slots[q][k], out, memory=self._r.operation.memory(out.start))

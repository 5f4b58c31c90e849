"""Build schedules in which every message goes directly from its sender to its receiver.

The reductions exchange encoded parts once:

1. Each rank owns a part of the result. It encodes every other rank's part of its own data and sends it there.
2. The owner adds the others' messages to its own part in rank order.
3. In an all-reduce, the owner encodes the sum once and sends it to all.
4. Every rank, the owner too, takes the decoded message: all ranks end with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hybridcomp.schedules.parts import Parts
from hybridcomp.schedules.recorder import Recorder
from hybridcomp.schedules.schedule import Buffer, Operation, Schedule, Span
from hybridcomp.schedules.topology import Topology
from hybridcomp.schedules.window import Slots, Stage, pipelined

_AHEAD = 3  # chunks sent before the first one is summed
_BEHIND = 2  # chunks summed before the first result is decoded
_PARTS, _RESULTS = 0, 1  # channels


def all_reduce(operation: Operation, topology: Topology, rank: int) -> Schedule:
    """Sum ``SEND`` over all ranks into ``RECV``."""
    r = Recorder(operation, topology, rank)
    parts = Parts.even(operation, r.ranks)
    exchange = _Exchange(r, parts)
    wide = operation.sum_wide
    result = Slots(r, _BEHIND, parts.longest(rank), wide=wide)
    results = {q: Slots(r, _AHEAD + _BEHIND, parts.longest(q), wide=wide) for q in r.others}

    def scatter(k: int) -> None:
        exchange.receive(k)
        for q in r.others:
            if parts.size(q, k):
                r.recv(results[q][k], parts.size(q, k), q, _RESULTS)
        exchange.send(k)

    def reduce(k: int) -> None:
        if parts.size(rank, k):
            own, out = parts.whole(Buffer.SEND, rank, k), parts.whole(Buffer.RECV, rank, k)
            memory = operation.memory(own.start)
            r.sum_encode(exchange.messages(k), own, result[k], out, divide=operation.mean, memory=memory)
            for q in r.others:
                r.send(result[k], q, _RESULTS)

    def gather(k: int) -> None:
        for q in r.others:
            if parts.size(q, k):
                out = parts.whole(Buffer.RECV, q, k)
                r.decode(results[q][k], out, memory=operation.memory(out.start))

    pipelined(parts.rounds, Stage(_AHEAD - 1, scatter), Stage(0, reduce), Stage(-_BEHIND, gather))
    return r.finish()


def reduce_scatter(operation: Operation, topology: Topology, rank: int) -> Schedule:
    """Sum ``SEND`` over all ranks; this rank's part goes to ``RECV``. Parts may be of any size."""
    r = Recorder(operation, topology, rank)
    parts = Parts.given(operation)
    exchange = _Exchange(r, parts)

    def scatter(k: int) -> None:
        exchange.receive(k)
        exchange.send(k)

    def reduce(k: int) -> None:
        if parts.size(rank, k):
            own, out = parts.whole(Buffer.SEND, rank, k), parts.alone(Buffer.RECV, rank, k)
            memory = operation.memory(own.start)
            r.sum(exchange.messages(k), own, out, divide=operation.mean, memory=memory)

    pipelined(parts.rounds, Stage(_AHEAD - 1, scatter), Stage(0, reduce))
    return r.finish()


class _Exchange:
    """Recorder of step 1 of a direct reduction on one rank, chunk by chunk."""

    def __init__(self, r: Recorder, parts: Parts) -> None:
        self._r, self._parts = r, parts
        wide, own = r.operation.part_wide, parts.longest(r.rank)
        self._outgoing = {q: Slots(r, _AHEAD, parts.longest(q), wide=wide) for q in r.others}
        self._incoming = {q: Slots(r, _AHEAD, own, wide=wide) for q in r.others}

    def receive(self, k: int) -> None:
        """Receive the others' parts of this rank's chunk ``k``."""
        if count := self._parts.size(self._r.rank, k):
            for q in sorted(self._r.others):
                self._r.recv(self._incoming[q][k], count, q, _PARTS)

    def send(self, k: int) -> None:
        """Encode chunk ``k`` of the others' parts, and send it to them."""
        for q in self._r.others:
            if self._parts.size(q, k):
                span = self._parts.whole(Buffer.SEND, q, k)
                self._r.encode(self._outgoing[q][k], span, memory=self._r.operation.memory(span.start))
                self._r.send(self._outgoing[q][k], q, _PARTS)

    def messages(self, k: int) -> list[int]:
        """Return the slots of the others' parts of chunk ``k``, in rank order."""
        return [self._incoming[q][k] for q in sorted(self._r.others)]


def all_gather(operation: Operation, topology: Topology, rank: int) -> Schedule:
    """Gather every rank's ``SEND`` into ``RECV``, in rank order; parts may be of any size.

    Every rank encodes its part once and sends the message to all. It takes the decoded message, too, so that all
    ranks end with the same bits.
    """
    r = Recorder(operation, topology, rank)
    parts = Parts.given(operation)
    outgoing = Slots(r, _AHEAD, parts.longest(rank))
    incoming = {q: Slots(r, _AHEAD, parts.longest(q)) for q in r.others}

    def spread(k: int) -> None:
        for q in r.others:
            if parts.size(q, k):
                r.recv(incoming[q][k], parts.size(q, k), q)
        if parts.size(rank, k):
            r.encode(outgoing[k], parts.alone(Buffer.SEND, rank, k))
            for q in r.others:
                r.send(outgoing[k], q)
            r.decode(outgoing[k], parts.whole(Buffer.RECV, rank, k))

    def take(k: int) -> None:
        for q in r.others:
            if parts.size(q, k):
                r.decode(incoming[q][k], parts.whole(Buffer.RECV, q, k))

    pipelined(parts.rounds, Stage(_AHEAD - 1, spread), Stage(0, take))
    return r.finish()


def all_to_all(operation: Operation, topology: Topology, rank: int) -> Schedule:
    """Send part q of ``SEND`` to rank q, and put rank q's message into part q of ``RECV``.

    There is one message for each pair of ranks; a rank's own part is copied. ``counts`` has the count of rank i's part
    for rank j at i * ranks + j; a rank reads its own row and column alone.
    """
    r = Recorder(operation, topology, rank)
    row = operation.counts[rank * r.ranks : (rank + 1) * r.ranks]
    column = operation.counts[rank :: r.ranks]

    def part(buffer: Buffer, counts: tuple[int, ...], q: int) -> Span:
        return Span(buffer, sum(counts[:q]), counts[q])

    incoming = {q: r.slot(column[q], plain=operation.spares(column[q])) for q in r.others if column[q]}
    for q, slot in incoming.items():
        r.recv(slot, column[q], q)
    for q in r.others:
        if row[q]:
            slot = r.slot(row[q], plain=operation.spares(row[q]))
            r.encode(slot, part(Buffer.SEND, row, q))
            r.send(slot, q)
    if row[rank]:
        r.copy(part(Buffer.SEND, row, rank), part(Buffer.RECV, column, rank))
    for q, slot in incoming.items():
        r.decode(slot, part(Buffer.RECV, column, q))
    return r.finish()


def broadcast(operation: Operation, topology: Topology, rank: int) -> Schedule:
    """Broadcast the root's ``SEND`` into every rank's ``RECV``, chunk by chunk.

    The root encodes once and sends the message to every rank. It takes the decoded message, too: all ranks end with
    the same bits. The caller's one buffer is ``SEND`` and ``RECV`` in place.
    """
    r = Recorder(operation, topology, rank)
    parts = Parts.given(operation)
    slots = Slots(r, _AHEAD, parts.longest(0))
    root = operation.root

    def spread(k: int) -> None:
        if rank == root:
            r.encode(slots[k], parts.whole(Buffer.SEND, 0, k))
            for q in r.others:
                r.send(slots[k], q)
        else:
            r.recv(slots[k], parts.size(0, k), root)

    def take(k: int) -> None:
        r.decode(slots[k], parts.whole(Buffer.RECV, 0, k))

    pipelined(parts.rounds, Stage(_AHEAD - 1, spread), Stage(0, take))
    return r.finish()


def reduce(operation: Operation, topology: Topology, rank: int) -> Schedule:
    """Sum ``SEND`` over all ranks into ``RECV`` of the root, which gets every rank's message.

    The result is as exact as the codec allows, but all messages enter by the root's link.
    """
    r = Recorder(operation, topology, rank)
    parts = Parts.given(operation)
    others = sorted(r.others) if rank == operation.root else []
    slots = {q: Slots(r, _AHEAD, parts.longest(0)) for q in others or [rank]}

    def receive(k: int) -> None:
        for q in others:
            r.recv(slots[q][k], parts.size(0, k), q)

    def add(k: int) -> None:
        own = parts.whole(Buffer.SEND, 0, k)
        if rank == operation.root:
            out = parts.whole(Buffer.RECV, 0, k)
            r.sum([slots[q][k] for q in others], own, out, divide=operation.mean)
        else:
            r.encode(slots[rank][k], own)
            r.send(slots[rank][k], operation.root)

    pipelined(parts.rounds, Stage(_AHEAD - 1, receive), Stage(0, add))
    return r.finish()


def gather(operation: Operation, topology: Topology, rank: int) -> Schedule:
    """Gather every rank's ``SEND`` into ``RECV`` of the root, which copies its own part; parts may be of any size."""
    r = Recorder(operation, topology, rank)
    parts = Parts.given(operation)
    root, n = operation.root, operation.counts[rank]
    if rank != root:
        _give(r, parts, {rank: root}, parts.alone)
    else:
        if n:
            r.copy(Span(Buffer.SEND, 0, n), Span(Buffer.RECV, parts.starts[rank], n))
        _take(r, parts, {q: q for q in r.others}, parts.whole)
    return r.finish()


def scatter(operation: Operation, topology: Topology, rank: int) -> Schedule:
    """Send each rank's part of the root's ``SEND`` to its ``RECV``; the root copies its own. Parts of any size."""
    r = Recorder(operation, topology, rank)
    parts = Parts.given(operation)
    root, n = operation.root, operation.counts[rank]
    if rank != root:
        _take(r, parts, {rank: root}, parts.alone)
    else:
        _give(r, parts, {q: q for q in r.others}, parts.whole)
        if n:
            r.copy(Span(Buffer.SEND, parts.starts[rank], n), Span(Buffer.RECV, 0, n))
    return r.finish()


def send(operation: Operation, topology: Topology, rank: int) -> Schedule:
    """Send ``SEND`` of the root, one of two ranks, to ``RECV`` of the other, as one message."""
    r = Recorder(operation, topology, rank)
    (n,) = operation.counts
    if n and r.ranks == 2:
        slot = r.slot(n)
        if rank == operation.root:
            r.encode(slot, Span(Buffer.SEND, 0, n))
            r.send(slot, 1 - rank)
        else:
            r.recv(slot, n, 1 - rank)
            r.decode(slot, Span(Buffer.RECV, 0, n))
    return r.finish()


_Place = Callable[[Buffer, int, int], Span]  # place of a chunk, by buffer, part and chunk number


def _slots(r: Recorder, parts: Parts, of: Iterable[int]) -> dict[int, Slots]:
    """Make room for chunks of the parts of some ranks."""
    spares, counts = r.operation.spares, r.operation.counts
    return {q: Slots(r, _AHEAD, parts.longest(q), plain=spares(counts[q])) for q in of}


def _give(r: Recorder, parts: Parts, peers: dict[int, int], place: _Place) -> None:
    """Encode parts chunk by chunk, and send each to its peer."""
    slots = _slots(r, parts, peers)
    for k in range(parts.rounds):
        for q, peer in peers.items():
            if parts.size(q, k):
                r.encode(slots[q][k], place(Buffer.SEND, q, k))
                r.send(slots[q][k], peer)


def _take(r: Recorder, parts: Parts, peers: dict[int, int], place: _Place) -> None:
    """Receive parts chunk by chunk, each from its peer, and decode them."""
    slots = _slots(r, parts, peers)

    def receive(k: int) -> None:
        for q, peer in peers.items():
            if parts.size(q, k):
                r.recv(slots[q][k], parts.size(q, k), peer)

    def decode(k: int) -> None:
        for q in peers:
            if parts.size(q, k):
                r.decode(slots[q][k], place(Buffer.RECV, q, k))

    pipelined(parts.rounds, Stage(_AHEAD - 1, receive), Stage(0, decode))

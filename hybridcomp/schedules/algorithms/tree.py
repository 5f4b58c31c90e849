"""Build broadcast and reduce along a binomial tree, chunk by chunk.

A broadcast takes log2(p) steps, and sends log2(p) times the data out of the root's link. Every rank checks the messages
of its parent, sends them on to its children and decodes them; the root, too, takes the decoded values.

In a reduction each rank adds its children's partial sums to its own data, in float32 (float64 for float64), and sends
the encoded sum to its parent: data are encoded again at each of up to log2(p) hops, and the error grows with the square
root of their number. Lossless codecs carry partial sums in the accumulator's dtype, and so are exact up to the order of
the sum.
"""

from __future__ import annotations

from hybridcomp.schedules.parts import Parts
from hybridcomp.schedules.recorder import Recorder
from hybridcomp.schedules.schedule import Buffer, Operation, Schedule
from hybridcomp.schedules.topology import Topology
from hybridcomp.schedules.window import Slots, Stage, pipelined

_AHEAD = 3  # chunks for which there is room before they are used


def broadcast(operation: Operation, topology: Topology, rank: int) -> Schedule:
    """Broadcast the root's ``SEND`` into every rank's ``RECV``."""
    r = Recorder(operation, topology, rank)
    parts = Parts.given(operation)
    slots = Slots(r, _AHEAD, parts.longest(0))
    parent, children = family(operation.root, rank, r.ranks)

    def begin(k: int) -> None:
        if parent is None:
            r.encode(slots[k], parts.whole(Buffer.SEND, 0, k))
        else:
            r.recv(slots[k], parts.size(0, k), parent)

    def pass_on(k: int) -> None:
        if parent is not None and children:
            r.check(slots[k])
        for child in children:
            r.send(slots[k], child)
        r.decode(slots[k], parts.whole(Buffer.RECV, 0, k))

    pipelined(parts.rounds, Stage(_AHEAD - 1, begin), Stage(0, pass_on))
    return r.finish()


def reduce(operation: Operation, topology: Topology, rank: int) -> Schedule:
    """Sum ``SEND`` over all ranks into ``RECV`` of the root."""
    r = Recorder(operation, topology, rank)
    parts = Parts.given(operation)
    parent, children = family(operation.root, rank, r.ranks)
    children.reverse()  # the smallest subtree first: it is ready first
    leaves = {child: not family(operation.root, child, r.ranks)[1] for child in children}
    incoming = {child: Slots(r, _AHEAD, parts.longest(0), wide=not leaves[child]) for child in children}
    outgoing = Slots(r, _AHEAD, parts.longest(0), wide=bool(children))

    def receive(k: int) -> None:
        for child in children:
            r.recv(incoming[child][k], parts.size(0, k), child)

    def add(k: int) -> None:
        own, slots = parts.whole(Buffer.SEND, 0, k), [incoming[child][k] for child in children]
        if parent is None:
            r.sum(slots, own, parts.whole(Buffer.RECV, 0, k), divide=operation.mean)
            return
        if children:
            r.sum_encode(slots, own, outgoing[k], None)
        else:
            r.encode(outgoing[k], own)
        r.send(outgoing[k], parent)

    pipelined(parts.rounds, Stage(_AHEAD - 1, receive), Stage(0, add))
    return r.finish()


def family(root: int, rank: int, ranks: int) -> tuple[int | None, list[int]]:
    """Return parent and children, largest subtree first, in the binomial tree that has its root at a rank."""
    place = (rank - root) % ranks
    low = place & -place if place else 1 << (ranks - 1).bit_length()
    bits = [1 << i for i in reversed(range(low.bit_length() - 1))]
    children = [(place + bit + root) % ranks for bit in bits if place + bit < ranks]
    return ((place - low + root) % ranks if place else None), children

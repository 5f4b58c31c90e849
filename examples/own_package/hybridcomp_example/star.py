"""``example.star``: rank 0 sums everything, and sends the sum to all.

1.  Every other rank encodes its array and sends it to rank 0.
2.  Rank 0 adds the messages to its own array, in the order of ranks, and encodes the sum.
3.  It sends that one message to everyone; it keeps the values that the others decode.

Rank 0's link carries everything, so it is for few ranks and short arrays.
"""

from __future__ import annotations

from hybridcomp.schedules.formulas import Case
from hybridcomp.schedules.recorder import Recorder
from hybridcomp.schedules.registry import Algorithm
from hybridcomp.schedules.schedule import Buffer, Operation, Schedule, Span
from hybridcomp.schedules.topology import Topology

_MOST = 64  # ranks


def all_reduce(operation: Operation, topology: Topology, rank: int) -> Schedule:
    """Sum ``SEND`` over all ranks into ``RECV``, at rank 0."""
    r = Recorder(operation, topology, rank)
    (n,) = operation.counts
    if n == 0:
        return r.finish()
    send, recv = Span(Buffer.SEND, 0, n), Span(Buffer.RECV, 0, n)
    part, result = r.slot(n), r.slot(n, wide=operation.sum_wide)
    if rank:
        r.encode(part, send)  # 1
        r.send(part, 0)
        r.recv(result, n, 0)  # 3
        r.decode(result, recv)
        return r.finish()
    parts = [r.slot(n) for _ in r.others]
    for slot, peer in zip(parts, r.others, strict=True):
        r.recv(slot, n, peer)
    r.sum_encode(parts, send, result, recv, divide=operation.mean)  # 2
    for peer in r.others:
        r.send(result, peer)
    return r.finish()


def refuses(topology: Topology) -> str | None:
    """Refuse more ranks than one can serve."""
    ranks = len(topology.hosts)
    return None if ranks <= _MOST else f"there are {ranks} ranks, more than {_MOST}"


def seconds(c: Case) -> float:
    """Return 2 a + E(n) + (p - 1) A(n) + 2 (p - 1) W(n): all of rank 0's work, one message after the other."""
    phase = c.phase(whole=True)
    phase.encode(c.n)
    phase.add(c.n, c.p - 1)
    phase.chain(2, network=c.network)
    phase.send(c.n, near=2 * (c.l - 1), far=2 * (c.p - c.l), own=2 * (c.p - 1))
    return phase.seconds()


STAR = {"all_reduce": Algorithm("example.star", all_reduce, refuses=refuses, formula=seconds)}

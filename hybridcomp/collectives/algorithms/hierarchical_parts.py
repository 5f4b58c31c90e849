"""Reduce-scatter and all-gather over hosts that have several ranks: see :mod:`~.hierarchical`."""

from __future__ import annotations

from collections.abc import Sequence

from hybridcomp.arrays import Flat
from hybridcomp.codecs import Memory
from hybridcomp.collectives.algorithms.hierarchical import AHEAD, CROSSING, Crossing, Stage, pipelined
from hybridcomp.collectives.data_path.carrier import Carrier
from hybridcomp.collectives.execution.progress import Steps
from hybridcomp.collectives.transport.mailbox import Incoming
from hybridcomp.schedules.algorithms.hierarchical import Roles
from hybridcomp.schedules.shards import Shards


def hierarchical_reduce_scatter(
    carrier: Carrier,
    send: Flat,
    recv: Flat,
    tags: Sequence[int],
    *,
    mean: bool = False,
    memory: Memory | None = None,
) -> Steps:
    """Sum ``send`` over all ranks; rank r gets block r: steps 1 and 2 of the all-reduce.

    Args:
        carrier: codec, transport and statistics.
        send: ``size * recv.size`` elements.
        recv: one block; may be a part of ``send``.
        tags: two.
        mean: divide the sum by the number of ranks.
        memory: error feedback of ``send.size`` elements; its step has begun.

    Raises:
        WireError, MismatchError: from a peer's message.
    """
    t = carrier.transport
    shards = Shards.fixed(send.size, t.size, recv.size, send.dtype.itemsize, carrier.chunk_bytes)
    run = Crossing(carrier, send, tags, shards, memory)

    def store(k: int) -> None:
        parts, messages = run.own_parts.pop(k), run.crossed.pop(k)
        span = shards.span(t.rank, k)
        start, ranks = span.start - t.rank * recv.size, t.size if mean else 1
        own, out = send.data[span], recv.data[start : start + span.stop - span.start]
        if memory is None:
            carrier.sum_into(own, messages, run.wide.dtype, ranks, out, parts)
        else:
            acc = run.own_sum(own, parts, span)
            run.wide.add(messages, acc)
            carrier.store(acc, out, ranks)

    with t.keeping(run):
        yield from pipelined(
            shards.count,
            Stage(AHEAD, run.hand_over),
            Stage(0, run.cross, run.parts.__getitem__),
            Stage(-CROSSING, store, run.crossed.__getitem__),
            arrival=run.mailbox.arrival,
        )
        yield from run.mailbox.finish()


def hierarchical_allgather(carrier: Carrier, send: Flat, recv: Flat, tags: Sequence[int]) -> Steps:
    """Gather every rank's ``send`` into ``recv``, in rank order; each message crosses to a host once.

    1. Each rank encodes its block and sends it to its own host's ranks and to its leader on each other host.
    2. Leaders pass it on inside their host. Every rank, the sender too, decodes the same messages.

    Args:
        carrier: codec, transport and statistics.
        send: one block; may be this rank's part of ``recv``.
        recv: ``size * send.size`` elements of the same dtype.
        tags: two.

    Raises:
        WireError, MismatchError: from a peer's message.
    """
    t = carrier.transport
    roles = Roles(t.topology, t.rank)
    mailbox = carrier.mailbox()
    shards = Shards.fixed(recv.size, t.size, send.size, send.dtype.itemsize, carrier.chunk_bytes)
    direct: dict[int, list[Incoming]] = {}
    passed: dict[int, list[Incoming]] = {}
    sources = [(q, roles.leader(q)) for q in range(t.size) if q != t.rank]

    def spread(k: int) -> None:
        own = shards.span(t.rank, k)
        nbytes = carrier.inbox_bytes(own.stop - own.start)
        direct[k] = [mailbox.receive(nbytes, q, tags[0]) for q, leader in sources if leader in (q, t.rank)]
        passed[k] = [
            mailbox.receive(nbytes, leader, tags[1]) for q, leader in sources if leader not in (q, t.rank)
        ]
        start = own.start - t.rank * send.size
        message = carrier.encode(send.data[start : start + own.stop - own.start])
        mailbox.send(message, [*roles.peers, *roles.local], tags[0])
        carrier.decode_own(message, recv.data[own])

    def pass_on(k: int) -> None:
        for incoming in direct.pop(k):
            span = shards.span(incoming.peer, k)
            if roles.leader(incoming.peer) == t.rank and roles.local:
                mailbox.forward(carrier.checked(incoming, span.stop - span.start), roles.local, tags[1])
            carrier.decode(incoming, recv.data[span])

    def take(k: int) -> None:
        owners = [q for q, leader in sources if leader not in (q, t.rank)]
        for q, incoming in zip(owners, passed.pop(k), strict=True):
            carrier.decode(incoming, recv.data[shards.span(q, k)])

    with t.keeping((mailbox, direct, passed)):
        yield from pipelined(
            shards.count,
            Stage(AHEAD, spread),
            Stage(0, pass_on, direct.__getitem__),
            Stage(-1, take, passed.__getitem__),
            arrival=mailbox.arrival,
        )
        yield from mailbox.finish()

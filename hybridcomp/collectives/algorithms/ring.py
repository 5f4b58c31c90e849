"""All-reduce, reduce-scatter and all-gather that load every link evenly, with the bits of ``direct``.

*   Parts go in rounds. In round i a rank sends its part of the shard of rank + i and receives from rank - i; a few
    rounds are under way at a time. No rank is sent to by many at once. (The pairwise exchange of Thakur, Rabenseifner
    and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.)
*   Results go around: a rank sends what it encoded to the next rank alone, which checks it, sends it on and decodes
    it. (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009, who also
    send partial sums around; encoded again at each hop their error would grow.)

Every part and every sum is encoded once, in the same chunks as by ``direct``, and added in the same order: the same
bits, with error feedback too. (But a block of ``loco``'s 8-bit state that lies across two chunks is rounded with each
of them, and the order of chunks is another here.) A result takes p - 1 steps, so this is for bulk.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from hybridcomp.arrays import DType, Flat
from hybridcomp.codecs import Memory
from hybridcomp.collectives.algorithms.allreduce import Run
from hybridcomp.collectives.data_path.carrier import Carrier
from hybridcomp.collectives.execution.progress import Pending, Steps
from hybridcomp.collectives.transport.mailbox import Incoming, Mailbox
from hybridcomp.schedules.shards import Shards

_AHEAD = 4  # rounds under way: what the wire carries while a chunk is summed and encoded


def ring_allreduce(
    carrier: Carrier,
    send: Flat,
    recv: Flat,
    tags: Sequence[int],
    *,
    mean: bool = False,
    memory: Memory | None = None,
) -> Steps:
    """Sum ``send`` over all ranks into ``recv``: parts in rounds, results around the ring.

    Args:
        carrier: codec, transport and statistics.
        send, recv: the same count and dtype; either the same memory or none in common.
        tags: one for the parts, one for the results.
        mean: divide the sum by the number of ranks (before it is encoded).
        memory: error feedback of as many elements; its step has begun.

    Raises:
        WireError, MismatchError: from a peer's message.
    """
    run = Run(carrier, send, recv, tags, mean, memory, None)
    rounds = _Rounds(carrier, run.mailbox, run.shards, tags[0], run.part_dtype, run.part)
    relay = _Relay(carrier, run.mailbox, run.shards, tags[1], run.sum_dtype, run.take)
    with carrier.transport.keeping((run, rounds, relay)):
        for k in range(relay.turns):
            if k < run.shards.count:
                parts = yield from rounds.parts(k)
                run.reduce(k, parts, relay.next)
            yield from relay.turn(k)
        yield from run.mailbox.finish()


def ring_reduce_scatter(
    carrier: Carrier,
    send: Flat,
    recv: Flat,
    tags: Sequence[int],
    *,
    mean: bool = False,
    memory: Memory | None = None,
) -> Steps:
    """Sum ``send`` over all ranks; rank r gets block r. Parts go in rounds.

    Args:
        carrier: codec, transport and statistics.
        send: ``size * recv.size`` elements.
        recv: one block; may be a part of ``send``.
        tags: one.
        mean: divide the sum by the number of ranks.
        memory: error feedback of ``send.size`` elements; its step has begun. As of ``direct``.

    Raises:
        WireError, MismatchError: from a peer's message.
    """
    t = carrier.transport
    mailbox = carrier.mailbox()
    shards = Shards.fixed(send.size, t.size, recv.size, send.dtype.itemsize, carrier.chunk_bytes)
    dtype = send.dtype if memory is None else send.dtype.accumulator

    def part(span: slice) -> Any:
        (message,) = carrier.encode_parts(send.data, [span], memory)
        return message

    rounds = _Rounds(carrier, mailbox, shards, tags[0], dtype, part)
    with t.keeping((mailbox, rounds)):
        for k in range(shards.count):
            parts = yield from rounds.parts(k)
            own = shards.span(t.rank, k)
            first = t.rank * recv.size
            out = recv.data[own.start - first : own.stop - first]
            carrier.sum_parts(send.data, own, parts, memory, dtype, t.size if mean else 1, out)
        yield from mailbox.finish()


def ring_allgather(carrier: Carrier, send: Flat, recv: Flat, tags: Sequence[int]) -> Steps:
    """Gather every rank's ``send`` into ``recv``, in rank order, around the ring.

    Args:
        carrier: codec, transport and statistics.
        send: one block; may be this rank's part of ``recv``.
        recv: ``size * send.size`` elements of the same dtype.
        tags: one.

    Raises:
        WireError, MismatchError: from a peer's message.
    """
    t = carrier.transport
    mailbox = carrier.mailbox()
    shards = Shards.fixed(recv.size, t.size, send.size, send.dtype.itemsize, carrier.chunk_bytes)

    def take(message: Incoming, span: slice) -> None:
        carrier.decode(message, recv.data[span])

    relay = _Relay(carrier, mailbox, shards, tags[0], send.dtype, take)
    with t.keeping((mailbox, relay)):
        for k in range(relay.turns):
            if k < shards.count:
                own = shards.span(t.rank, k)
                start = own.start - t.rank * send.size
                message = carrier.encode(send.data[start : start + own.stop - own.start])
                mailbox.send(message, relay.next, tags[0])
                carrier.decode_own(message, recv.data[own])
            yield from relay.turn(k)
        yield from mailbox.finish()


class _Rounds:
    """The pairwise exchange of parts: the others' are encoded and sent in rounds, this rank's shard is received.

    Args:
        carrier, mailbox: of the operation.
        shards: who owns what.
        tag: of the parts.
        dtype: of their messages.
        part: encodes this rank's part of a span.
    """

    def __init__(
        self,
        carrier: Carrier,
        mailbox: Mailbox,
        shards: Shards,
        tag: int,
        dtype: DType,
        part: Callable[[slice], Any],
    ) -> None:
        self._carrier, self._mailbox, self._shards = carrier, mailbox, shards
        self._tag, self._dtype, self._part = tag, dtype, part
        self._rank, self._size = carrier.transport.rank, carrier.transport.size
        self._rounds = [(k, i) for k in range(shards.count) for i in range(1, self._size)]
        self._started = 0
        self._coming: dict[tuple[int, int], Incoming] = {}

    def parts(self, k: int) -> Generator[Pending, None, list[Incoming]]:
        """Wait for the other ranks' parts of chunk ``k`` of this rank's shard; return them in rank order.

        Called for each k in turn.
        """
        arrived = []
        for i in range(1, self._size):
            self._start(k * (self._size - 1) + i - 1 + _AHEAD)
            message = self._coming.pop((k, i), None)
            if message is not None:
                yield self._mailbox.arrival([message])
                arrived.append(message)
        return sorted(arrived, key=lambda message: message.peer)

    def _start(self, until: int) -> None:
        """Start all rounds before a number."""
        for k, i in self._rounds[self._started : until]:
            own = self._shards.size(self._rank, k)
            if own:
                nbytes = self._carrier.inbox_bytes(own, self._dtype)
                source = (self._rank - i) % self._size
                self._coming[k, i] = self._mailbox.receive(nbytes, source, self._tag)
            to = (self._rank + i) % self._size
            if self._shards.size(to, k):
                self._mailbox.send(self._part(self._shards.span(to, k)), [to], self._tag)
        self._started = max(self._started, until)


class _Relay:
    """Encoded chunks of all ranks' shards on their way around the ring.

    In turn k a rank first sends chunk k of its own shard, then takes from the rank before it what that one sent in
    turn k - 1: chunk k - h of the shard of rank - h, for each h from 1 up, to be sent on unless it has been around.

    Attributes:
        next: the rank to send to, as a list; empty if there is no other.
        turns: how many turns there are.
    """

    def __init__(
        self,
        carrier: Carrier,
        mailbox: Mailbox,
        shards: Shards,
        tag: int,
        dtype: DType,
        take: Callable[[Incoming, slice], None],
    ) -> None:
        """Prepare to relay; arguments are those of :class:`_Rounds`, and ``take`` decodes a message into a span."""
        self._carrier, self._mailbox, self._shards = carrier, mailbox, shards
        self._tag, self._dtype, self._take = tag, dtype, take
        self._rank, self._size = carrier.transport.rank, carrier.transport.size
        self.next = carrier.transport.others[:1]
        self.turns = shards.count + self._size - 1 if shards.count else 0
        self._coming: dict[int, list[tuple[int, slice, Incoming]]] = {}
        self._expect(1)

    def turn(self, k: int) -> Steps:
        """Do round ``k``, after what this rank itself sends in it: wait for its messages, pass them on, decode them."""
        self._expect(k + 1)
        for hops, span, message in self._coming.pop(k, ()):
            yield self._mailbox.arrival([message])
            if hops < self._size - 1:
                sealed = self._carrier.checked(message, span.stop - span.start, self._dtype)
                self._mailbox.forward(sealed, self.next, self._tag)
            self._take(message, span)

    def _expect(self, k: int) -> None:
        """Receive what comes in turn ``k``."""
        before = (self._rank - 1) % self._size
        if k in self._coming:
            return
        coming = self._coming[k] = []
        for hops in range(1, self._size):
            owner = (self._rank - hops) % self._size
            if 0 <= k - hops < self._shards.count and self._shards.size(owner, k - hops):
                span = self._shards.span(owner, k - hops)
                nbytes = self._carrier.inbox_bytes(span.stop - span.start, self._dtype)
                coming.append((hops, span, self._mailbox.receive(nbytes, before, self._tag)))

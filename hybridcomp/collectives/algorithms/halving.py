"""Recursive halving and doubling: few messages, for data so small that their number is what costs.

All-reduce, on 2^k ranks:

1. In each of k steps a rank sends half of what it still sums to a partner, encoded, and adds the partner's encoded
   half to its own, in float32 (float64 for float64). Then it has the sum of one shard of 2^k.
2. It encodes that sum. In each of k steps ranks exchange all encoded sums that they have; every rank, the owner too,
   decodes the same messages, so all ranks end with the same bits.

Of any other number p of ranks, r = p - 2^k pairs fold first: the odd rank of a pair sends its data to the even one,
and in the end gets the result from it. (Rabenseifner, "Optimization of collective reduction operations", 2004. Step 2
goes in the order of Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing
systems", 1997, which suits any number of ranks.)

Partial sums are encoded again at each step. With a codec of relative error e and independent data each of the k steps
adds p / 2 messages' errors to a sum of p terms, and the last encoding adds one of the whole sum: together about
e sqrt(1 + k / 2), where encoding once has e sqrt(2 - 1 / p). Lossless codecs carry partial sums in the accumulator's
type, and so are exact up to the order of the sum. There is no error feedback: partial sums are of no one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hybridcomp.arrays import DType, Flat
from hybridcomp.codecs import Memory
from hybridcomp.collectives.data_path.carrier import Carrier
from hybridcomp.collectives.execution.progress import Steps
from hybridcomp.collectives.transport.mailbox import Incoming, Mailbox
from hybridcomp.schedules.algorithms.halving import Places
from hybridcomp.schedules.shards import Shards


def halving_allreduce(
    carrier: Carrier,
    send: Flat,
    recv: Flat,
    tags: Sequence[int],
    *,
    mean: bool = False,
    memory: Memory | None = None,
) -> Steps:
    """Sum ``send`` over all ranks into ``recv`` by recursive halving and doubling.

    Args:
        carrier: codec, transport and statistics.
        send, recv: the same count and dtype; either the same memory or none in common.
        tags: one for partial sums, one for results.
        mean: divide the sum by the number of ranks (before it is encoded).
        memory: None.

    Raises:
        WireError, MismatchError: from a peer's message.
    """
    t = carrier.transport
    mailbox = carrier.mailbox()
    places = Places(t.size)
    shards = Shards.of(send.size, places.count, send.dtype.itemsize, carrier.chunk_bytes)
    edges = [min(v * shards.length, send.size) for v in range(places.count + 1)]
    dtype = send.dtype if carrier.codec.lossless else send.dtype.accumulator
    spans = [list(_chunks(edges[v], edges[v + 1], carrier, send.dtype)) for v in range(places.count)]
    place = places.place(t.rank)
    halves = _Halves(carrier, mailbox, send, places, edges, tags[0])
    spread = _Spread(carrier, mailbox, places.leaders, place, spans, tags[1], dtype)
    with t.keeping((mailbox, halves, spread)):
        if places.folded(t.rank):
            spread.follow(t.rank - 1)
            yield from halves.run()
        else:
            follower = [t.rank + 1] if places.paired(t.rank) else []
            spread.lead(follower)
            yield from halves.run()
            for span in spans[place]:
                message = carrier.encode_sum(halves.total(span), dtype, t.size if mean else 1)
                mailbox.send(message, spread.first + follower, tags[1])
                carrier.decode_own(message, recv.data[span], dtype)
        yield from spread.run(recv.data)
        yield from mailbox.finish()


def halving_reduce_scatter(
    carrier: Carrier,
    send: Flat,
    recv: Flat,
    tags: Sequence[int],
    *,
    mean: bool = False,
    memory: Memory | None = None,
) -> Steps:
    """Sum ``send`` over all ranks by recursive halving; rank r gets block r.

    Args:
        carrier: codec, transport and statistics.
        send: ``size * recv.size`` elements.
        recv: one block; may be a part of ``send``.
        tags: one.
        mean: divide the sum by the number of ranks.
        memory: None.

    Raises:
        WireError, MismatchError: from a peer's message.
    """
    t = carrier.transport
    (tag,) = tags
    mailbox = carrier.mailbox()
    places = Places(t.size)
    block, ranks = recv.size, t.size if mean else 1
    edges = [leader * block for leader in places.leaders] + [send.size]
    wide = send.dtype.accumulator
    halves = _Halves(carrier, mailbox, send, places, edges, tag)
    with t.keeping((mailbox, halves)):
        yield from halves.run()
        start = t.rank * block
        if places.folded(t.rank):
            spans = list(_chunks(start, start + block, carrier, send.dtype))
            messages = [
                mailbox.receive(carrier.inbox_bytes(s.stop - s.start, wide), t.rank - 1, tag) for s in spans
            ]
            with t.keeping(messages):
                for span, message in zip(spans, messages, strict=True):
                    yield mailbox.arrival([message])
                    carrier.decode(message, recv.data[span.start - start : span.stop - start], wide)
                yield from mailbox.finish()
            return
        if places.paired(t.rank):
            for span in _chunks(start + block, start + 2 * block, carrier, send.dtype):
                mailbox.send(carrier.encode_sum(halves.total(span), wide, ranks), [t.rank + 1], tag)
        if block:
            carrier.store(halves.total(slice(start, start + block)), recv.data, ranks)
        yield from mailbox.finish()


def doubling_allgather(carrier: Carrier, send: Flat, recv: Flat, tags: Sequence[int]) -> Steps:
    """Gather every rank's ``send`` into ``recv``, in rank order, in as many steps as the rank count has bits.

    Args:
        carrier: codec, transport and statistics.
        send: one block; may be this rank's part of ``recv``.
        recv: ``size * send.size`` elements of the same dtype.
        tags: one.

    Raises:
        WireError, MismatchError: from a peer's message.
    """
    t = carrier.transport
    (tag,) = tags
    mailbox = carrier.mailbox()
    n = send.size
    spans = [list(_chunks(q * n, (q + 1) * n, carrier, send.dtype)) for q in range(t.size)]
    spread = _Spread(carrier, mailbox, list(range(t.size)), t.rank, spans, tag, send.dtype)
    with t.keeping((mailbox, spread)):
        spread.lead([])
        for span in spans[t.rank]:
            message = carrier.encode(send.data[span.start - t.rank * n : span.stop - t.rank * n])
            mailbox.send(message, spread.first, tag)
            carrier.decode_own(message, recv.data[span])
        yield from spread.run(recv.data)
        yield from mailbox.finish()


def _chunks(start: int, stop: int, carrier: Carrier, dtype: DType) -> Iterator[slice]:
    """Yield the chunks of a range of elements."""
    n = stop - start
    shards = Shards.fixed(n, 1, n, dtype.itemsize, carrier.chunk_bytes)
    for k in range(shards.count):
        span = shards.span(0, k)
        yield slice(start + span.start, start + span.stop)


class _Halves:
    """Step 1 of halving on this rank: the sum of the elements ``edges[place]`` to ``edges[place + 1]``."""

    def __init__(
        self, carrier: Carrier, mailbox: Mailbox, send: Flat, places: Places, edges: list[int], tag: int
    ) -> None:
        self._carrier, self._mailbox, self._send = carrier, mailbox, send
        self._places, self._edges, self._tag = places, edges, tag
        self._rank = carrier.transport.rank
        self._acc: Any = None  # of the elements from _start on; None as long as they are this rank's own
        self._start = 0
        self._coming: list[Incoming] = []

    def total(self, span: slice) -> Any:
        """Return this rank's partial sum of a span; the caller may overwrite it."""
        if self._acc is None:
            return self._carrier.own(self._send.data[span], None, span)
        return self._acc[span.start - self._start : span.stop - self._start]

    def run(self) -> Steps:
        """Fold, then halve."""
        places, edges, n = self._places, self._edges, self._send.size
        dtype, wide = self._send.dtype, self._send.dtype.accumulator
        if places.folded(self._rank):
            self._give(0, n, self._rank - 1)
            return
        if places.paired(self._rank):
            spans = self._expect(0, n, self._rank + 1, dtype)
            self._keep(0, n)
            yield from self._add(spans, dtype)
        place = places.place(self._rank)
        low, high = 0, places.count
        while high - low > 1:
            middle = (low + high) // 2
            # What a rank sends in the first of these steps is its own data, unless it has folded.
            first = high - low == places.count
            if place < middle:
                partner = places.leaders[place + middle - low]
                keep, give = (low, middle), (middle, high)
            else:
                partner = places.leaders[place - (middle - low)]
                keep, give = (middle, high), (low, middle)
            source = dtype if first and not places.paired(partner) else wide
            low, high = keep
            spans = self._expect(edges[low], edges[high], partner, source)
            self._give(edges[give[0]], edges[give[1]], partner)
            self._keep(edges[low], edges[high])
            yield from self._add(spans, source)

    def _expect(self, start: int, stop: int, peer: int, dtype: DType) -> list[slice]:
        spans = list(_chunks(start, stop, self._carrier, self._send.dtype))
        self._coming = [
            self._mailbox.receive(self._carrier.inbox_bytes(s.stop - s.start, dtype), peer, self._tag)
            for s in spans
        ]
        return spans

    def _give(self, start: int, stop: int, peer: int) -> None:
        for span in _chunks(start, stop, self._carrier, self._send.dtype):
            if self._acc is None:
                message = self._carrier.encode(self._send.data[span])
            else:
                message = self._carrier.encode(self.total(span), self._send.dtype.accumulator)
            self._mailbox.send(message, [peer], self._tag)

    def _keep(self, start: int, stop: int) -> None:
        if start != stop:
            self._acc, self._start = self.total(slice(start, stop)), start

    def _add(self, spans: list[slice], dtype: DType) -> Steps:
        for span, message in zip(spans, self._coming, strict=True):
            yield self._mailbox.arrival([message])
            self._carrier.add([message], self.total(span), dtype)


class _Spread:
    """Step 2 of doubling: send every place's encoded chunks to all.

    With places counted from a rank's own on, chunks of place j come from place h, the highest power of two not above
    j, and go on to places -h' for each power of two h' above j and not above the number of places less j + 1.

    Attributes:
        first: the ranks to which this rank sends its own chunks, to begin with.
    """

    def __init__(
        self,
        carrier: Carrier,
        mailbox: Mailbox,
        ranks: list[int],
        place: int,
        spans: list[list[slice]],
        tag: int,
        dtype: DType,
    ) -> None:
        """Spread chunks.

        Args:
            carrier, mailbox: of the operation.
            ranks: in each place.
            place: this rank's, or that of the rank which it follows.
            spans: of each place's chunks.
            tag: of their messages.
            dtype: of their messages.
        """
        self._carrier, self._mailbox = carrier, mailbox
        self._ranks, self._place, self._spans = ranks, place, spans
        self._tag, self._dtype = tag, dtype
        self._coming: list[tuple[slice, Incoming, list[int]]] = []
        self.first: list[int] = []

    def lead(self, followers: list[int]) -> None:
        """Receive the other places' chunks, and send them on, to ``followers`` too."""
        count = len(self._ranks)
        self.first = self._onward(0)
        for j in range(1, count):
            source = self._ranks[(self._place + (1 << (j.bit_length() - 1))) % count]
            self._expect(j, source, self._onward(j) + followers)

    def follow(self, leader: int) -> None:
        """Receive all places' chunks from the rank in this place."""
        for j in range(len(self._ranks)):
            self._expect(j, leader, [])

    def run(self, out: Any) -> Steps:
        """Write what comes to ``out``, of all places' elements."""
        for span, message, onward in self._coming:
            yield self._mailbox.arrival([message])
            if onward:
                sealed = self._carrier.checked(message, span.stop - span.start, self._dtype)
                self._mailbox.forward(sealed, onward, self._tag)
            self._carrier.decode(message, out[span], self._dtype)

    def _onward(self, j: int) -> list[int]:
        count = len(self._ranks)
        steps = [1 << i for i in range((count - 1).bit_length())]
        return [self._ranks[(self._place - h) % count] for h in steps if j < min(h, count - h)]

    def _expect(self, j: int, source: int, onward: list[int]) -> None:
        for span in self._spans[(self._place + j) % len(self._ranks)]:
            nbytes = self._carrier.inbox_bytes(span.stop - span.start, self._dtype)
            self._coming.append((span, self._mailbox.receive(nbytes, source, self._tag), onward))

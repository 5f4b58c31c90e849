"""Build reductions by recursive halving and doubling: few messages, for data so small that their number costs most.

All-reduce, on 2^k ranks:

1. In each of k steps a rank sends half of what it still sums to a partner, encoded, and adds the partner's encoded
   half to its own, in float32 (float64 for float64). Then it has the sum of one of 2^k shards.
2. It encodes that sum. In each of k steps ranks exchange all encoded sums that they have (:mod:`.doubling`); every
   rank, the owner too, decodes the same messages, so all ranks end with the same bits. Sums that go as they are, not
   encoded, make one message in each exchange.

With any other number p of ranks, r = p - 2^k pairs fold first: the odd rank of a pair sends its data to the even one,
and in the end gets the result from it. (Rabenseifner, "Optimization of collective reduction operations", 2004.)

Partial sums are encoded again at each step. With a codec of relative error e and independent data each of the k steps
adds p / 2 messages' errors to a sum of p terms, and the last encoding adds one of the whole sum: together about
e sqrt(1 + k / 2), where encoding once has e sqrt(2 - 1 / p). Lossless codecs carry partial sums in the accumulator's
dtype, and so are exact up to the order of the sum. There is no error feedback: partial sums belong to no one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from hybridcomp.schedules.algorithms.doubling import Joined, Spread
from hybridcomp.schedules.parts import chunks
from hybridcomp.schedules.recorder import Recorder
from hybridcomp.schedules.schedule import Buffer, Operation, Schedule, Span
from hybridcomp.schedules.shards import Shards
from hybridcomp.schedules.topology import Topology
from hybridcomp.schedules.window import Slots, Stage, pipelined

_AHEAD = 3  # chunks of a step for which there is room
_SUMS, _RESULTS = 0, 1  # channels: of partial sums, and the first one of results


def all_reduce(operation: Operation, topology: Topology, rank: int) -> Schedule:
    """Sum ``SEND`` over all ranks into ``RECV`` by recursive halving and doubling."""
    r = Recorder(operation, topology, rank)
    (n,) = operation.counts
    places = Places(r.ranks)
    place = places.place(rank)
    length = Shards.of(n, places.count, operation.itemsize, operation.chunk_bytes).length
    edges = [min(v * length, n) for v in range(places.count + 1)]
    cuts = [chunks(operation, *edge) for edge in pairwise(edges)]
    wide = operation.sum_wide
    halves = _Halves(r, places, edges)
    spread: Joined | Spread
    if operation.plain:
        spread = Joined(r, places.leaders, place, edges, _RESULTS)
    else:
        spread = Spread(r, places.leaders, place, cuts, _RESULTS, wide=wide)
    if places.folded(rank):
        halves.give(0, n, rank - 1)
        spread.follow(rank - 1)
        return r.finish()
    followers = [rank + 1] if places.paired(rank) else []
    longest = max((cut.stop - cut.start for cut in cuts[place]), default=0)
    results = Slots(r, _AHEAD, longest, wide=wide)
    numbers = iter(range(len(cuts[place])))

    def finish(slots: list[int], cut: slice) -> None:
        result, out = results[next(numbers)], Span(Buffer.RECV, cut.start, cut.stop - cut.start)
        r.sum_encode(slots, halves.total(cut.start, cut.stop), result, out, divide=operation.mean)
        spread.give(result, followers)

    halves.run(finish)
    spread.lead(followers)
    return r.finish()


def reduce_scatter(operation: Operation, topology: Topology, rank: int) -> Schedule:
    """Sum ``SEND`` over all ranks by recursive halving; this rank's part goes to ``RECV``. Parts may be of any size."""
    r = Recorder(operation, topology, rank)
    places = Places(r.ranks)
    starts = list(accumulate(operation.counts, initial=0))
    edges = [starts[leader] for leader in places.leaders] + [starts[-1]]
    halves = _Halves(r, places, edges)
    start, stop = starts[rank], starts[rank + 1]
    mine = chunks(operation, start, stop)
    if places.folded(rank):
        halves.give(0, starts[-1], rank - 1)
        _take(r, mine, start, rank - 1)
        return r.finish()
    halves.run(halves.add)
    if places.paired(rank):
        theirs = chunks(operation, stop, starts[rank + 2])
        slots = Slots(r, _AHEAD, max((cut.stop - cut.start for cut in theirs), default=0), wide=True)
        for k, cut in enumerate(theirs):
            r.sum_encode([], halves.total(cut.start, cut.stop), slots[k], None, divide=operation.mean)
            r.send(slots[k], rank + 1, _SUMS)
    for cut in mine:
        out = Span(Buffer.RECV, cut.start - start, cut.stop - cut.start)
        r.sum([], halves.total(cut.start, cut.stop), out, divide=operation.mean)
    return r.finish()


def _take(r: Recorder, cuts: list[slice], first: int, source: int) -> None:
    """Receive the chunks of this rank's part, which begins at element ``first``, from another rank; decode them."""
    slots = Slots(r, _AHEAD, max((cut.stop - cut.start for cut in cuts), default=0), wide=True)

    def receive(k: int) -> None:
        r.recv(slots[k], cuts[k].stop - cuts[k].start, source, _SUMS)

    def decode(k: int) -> None:
        r.decode(slots[k], Span(Buffer.RECV, cuts[k].start - first, cuts[k].stop - cuts[k].start))

    pipelined(len(cuts), Stage(_AHEAD - 1, receive), Stage(0, decode))


class Places:
    """Places of the ranks that take part in halving: one of every pair that folds, and all other ranks.

    Attributes:
        count: number of places, a power of two.
        leaders: rank in each place.
    """

    def __init__(self, ranks: int) -> None:
        self.count = 1 << (ranks.bit_length() - 1)
        self._pairs = ranks - self.count
        self.leaders = [2 * v if v < self._pairs else v + self._pairs for v in range(self.count)]

    def folded(self, rank: int) -> bool:
        """Tell whether a rank gives its data to the rank before it."""
        return rank < 2 * self._pairs and rank % 2 == 1

    def paired(self, rank: int) -> bool:
        """Tell whether a rank takes the data of the rank after it."""
        return rank < 2 * self._pairs and rank % 2 == 0

    def place(self, rank: int) -> int:
        """Return a rank's place, or its partner's."""
        return rank // 2 if rank < 2 * self._pairs else rank - self._pairs


class _Halves:
    """Recorder of step 1 on this rank, which sums the elements ``edges[place]`` to ``edges[place + 1]``."""

    def __init__(self, r: Recorder, places: Places, edges: Sequence[int]) -> None:
        self._r, self._places, self._edges = r, places, edges
        self._room: Span | None = None  # room for partial sums of the elements from _first on
        self._first = 0
        self._summed = False  # whether there are partial sums; before, this rank's own data are the sum

    def total(self, start: int, stop: int) -> Span:
        """Return this rank's sum of a range of elements."""
        return self._sums(start, stop) if self._summed else Span(Buffer.SEND, start, stop - start)

    def add(self, slots: list[int], cut: slice) -> None:
        """Add messages of a chunk to this rank's sum of it."""
        self._r.sum(slots, self.total(cut.start, cut.stop), self._sums(cut.start, cut.stop))

    def give(self, start: int, stop: int, peer: int) -> None:
        """Send this rank's sum of a range of elements to another rank."""
        send = self._sender(chunks(self._r.operation, start, stop), peer)
        for k in range(len(chunks(self._r.operation, start, stop))):
            send(k)

    def run(self, finish: Callable[[list[int], slice], None]) -> None:
        """Fold, then halve; call ``finish`` with the last step's messages for each chunk, in place of :meth:`add`."""
        rank, places, edges = self._r.rank, self._places, self._edges
        if places.paired(rank):
            self._step((edges[0], edges[-1]), (0, 0), rank + 1, False, self.add)
        place = places.place(rank)
        low, high = 0, places.count
        if high == 1 and finish != self.add:
            for cut in chunks(self._r.operation, edges[0], edges[1]):
                finish([], cut)
        while high - low > 1:
            middle = (low + high) // 2
            # In the first of these steps a rank sends its own data, unless it has folded.
            first = high - low == places.count
            if place < middle:
                partner = places.leaders[place + middle - low]
                keep, give = (low, middle), (middle, high)
            else:
                partner = places.leaders[place - (middle - low)]
                keep, give = (middle, high), (low, middle)
            low, high = keep
            self._step(
                (edges[low], edges[high]),
                (edges[give[0]], edges[give[1]]),
                partner,
                not first or places.paired(partner),
                finish if high - low == 1 else self.add,
            )

    def _step(
        self,
        keep: tuple[int, int],
        give: tuple[int, int],
        peer: int,
        wide: bool,
        add: Callable[[list[int], slice], None],
    ) -> None:
        """Send one range to a peer, and add its messages of another range, which are ``wide`` or not."""
        r = self._r
        given, kept = chunks(r.operation, *give), chunks(r.operation, *keep)
        slots = Slots(r, _AHEAD, max((cut.stop - cut.start for cut in kept), default=0), wide=wide)
        send = self._sender(given, peer)
        if self._room is None and add == self.add:
            self._room, self._first = r.scratch(keep[1] - keep[0]), keep[0]

        def receive(k: int) -> None:
            if k < len(kept):
                r.recv(slots[k], kept[k].stop - kept[k].start, peer, _SUMS)

        def take(k: int) -> None:
            if k < len(kept):
                add([slots[k]], kept[k])

        count = max(len(given), len(kept))
        pipelined(count, Stage(_AHEAD - 1, receive), Stage(_AHEAD - 1, send), Stage(0, take))
        self._summed = self._summed or add == self.add

    def _sender(self, cuts: list[slice], peer: int) -> Callable[[int], None]:
        """Return a function that encodes and sends a chunk of this rank's sum."""
        r = self._r
        slots = Slots(r, _AHEAD, max((cut.stop - cut.start for cut in cuts), default=0), wide=self._summed)

        def send(k: int) -> None:
            if k < len(cuts):
                r.encode(slots[k], self.total(cuts[k].start, cuts[k].stop))
                r.send(slots[k], peer, _SUMS)

        return send

    def _sums(self, start: int, stop: int) -> Span:
        assert self._room is not None
        return Span(Buffer.SCRATCH, self._room.start + start - self._first, stop - start)

"""Build an all-gather of ceil(log2 p) steps for p ranks: in each, ranks exchange all messages that they have.

Every rank encodes its part once; the messages are checked and sent on, and all ranks decode the same ones. Messages go
in the order of Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems",
1997, which suits any number of ranks.

The messages of each place have their own channel: see :mod:`.ring`.

:class:`Joined` is the way back of recursive halving for values that go as they are: it joins all values of a rank into
one message, where encoded values would have to be encoded anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from hybridcomp.schedules.parts import chunks
from hybridcomp.schedules.recorder import Recorder
from hybridcomp.schedules.schedule import Buffer, Operation, Schedule, Span
from hybridcomp.schedules.topology import Topology
from hybridcomp.schedules.window import Slots, Stage, pipelined

_AHEAD = 3  # chunks of a part for which there is room


def all_gather(operation: Operation, topology: Topology, rank: int) -> Schedule:
    """Gather every rank's ``SEND`` into ``RECV``, in rank order; parts may be of any size."""
    r = Recorder(operation, topology, rank)
    starts = list(accumulate(operation.counts, initial=0))
    cuts = [chunks(operation, *edge) for edge in pairwise(starts)]
    spread = Spread(r, list(range(r.ranks)), rank, cuts, 0, wide=False)
    slots = Slots(r, _AHEAD, max((cut.stop - cut.start for cut in cuts[rank]), default=0))
    for k, cut in enumerate(cuts[rank]):
        r.encode(slots[k], Span(Buffer.SEND, cut.start - starts[rank], cut.stop - cut.start))
        spread.give(slots[k], [])
        r.decode(slots[k], Span(Buffer.RECV, cut.start, cut.stop - cut.start))
    spread.lead([])
    return r.finish()


class Spread:
    """Spread of every place's encoded chunks to all.

    With places counted from a rank's own on, chunks of place j come from place h, the highest power of two not above
    j, and go on to places -h' for each power of two h' above j and not above the number of places less j + 1.
    """

    def __init__(
        self,
        r: Recorder,
        ranks: Sequence[int],
        place: int,
        cuts: Sequence[Sequence[slice]],
        channel: int,
        *,
        wide: bool,
    ) -> None:
        """Spread chunks.

        Args:
            r: recorder of the steps.
            ranks: rank in each place.
            place: place of this rank, or of the rank that it follows.
            cuts: chunks of each place.
            channel: channel of the first place's messages; the channels of the other places follow.
            wide: whether messages are of the accumulator's dtype.
        """
        self._r, self._ranks, self._place, self._cuts = r, ranks, place, cuts
        self._channel, self._wide = channel, wide

    def give(self, slot: int, followers: list[int]) -> None:
        """Send a chunk of this place on its way, to ``followers`` too."""
        for q in self._onward(0) + followers:
            self._r.send(slot, q, self._channel + self._place)

    def lead(self, followers: list[int]) -> None:
        """Receive the other places' chunks, and send them on, to ``followers`` too."""
        count = len(self._ranks)
        for j in range(1, count):
            source = self._ranks[(self._place + (1 << (j.bit_length() - 1))) % count]
            self._take(j, source, self._onward(j) + followers)

    def follow(self, leader: int) -> None:
        """Receive all places' chunks from the rank in this place."""
        for j in range(len(self._ranks)):
            self._take(j, leader, [])

    def _take(self, j: int, source: int, onward: list[int]) -> None:
        """Receive the chunks of a place, send them on and decode them."""
        r, origin = self._r, (self._place + j) % len(self._ranks)
        cuts, channel = self._cuts[origin], self._channel + origin
        longest = max((cut.stop - cut.start for cut in cuts), default=0)
        slots = Slots(r, _AHEAD, longest, wide=self._wide)

        def receive(k: int) -> None:
            r.recv(slots[k], cuts[k].stop - cuts[k].start, source, channel)

        def pass_on(k: int) -> None:
            if onward:
                r.check(slots[k])
            for q in onward:
                r.send(slots[k], q, channel)
            r.decode(slots[k], Span(Buffer.RECV, cuts[k].start, cuts[k].stop - cuts[k].start))

        pipelined(len(cuts), Stage(_AHEAD - 1, receive), Stage(0, pass_on))

    def _onward(self, j: int) -> list[int]:
        count = len(self._ranks)
        steps = [1 << i for i in range((count - 1).bit_length())]
        return [self._ranks[(self._place - h) % count] for h in steps if j < min(h, count - h)]


class Joined:
    """Spread of every place's values to all: in each step, places exchange all values that they have in one message.

    The number of places is a power of two. A place that is a multiple of 2^i has, before step i, the values of the 2^i
    places that begin with it; the other places of these have the same.
    """

    def __init__(
        self, r: Recorder, ranks: Sequence[int], place: int, edges: Sequence[int], channel: int
    ) -> None:
        """Spread values.

        Args:
            r: recorder of the steps.
            ranks: rank in each place.
            place: place of this rank, or of the rank that it follows.
            edges: first element in ``RECV`` of each place's values, and the end of the last place's.
            channel: channel of the messages.
        """
        self._r, self._ranks, self._place = r, ranks, place
        self._edges, self._channel = edges, channel

    def give(self, slot: int, followers: list[int]) -> None:
        """Send a chunk of this place on its way; ``followers`` get it with the others."""
        if len(self._ranks) > 1:
            self._r.send(slot, self._ranks[self._place ^ 1], self._channel)

    def lead(self, followers: list[int]) -> None:
        """Receive the other places' values, and send them on; all of them to ``followers``, too."""
        held = 1
        while held < len(self._ranks):
            first = self._place - self._place % held
            partner = self._ranks[self._place ^ held]
            if held > 1:
                self._send(first, held, partner)
            self._take(first ^ held, held, partner)
            held *= 2
        for q in followers:
            self._send(0, held, q)

    def follow(self, leader: int) -> None:
        """Receive all places' values from the rank in this place."""
        self._take(0, len(self._ranks), leader)

    def _send(self, first: int, count: int, peer: int) -> None:
        """Send the values of ``count`` places."""
        cuts = self._cuts(first, count)
        slots = self._slots(cuts)
        for k, cut in enumerate(cuts):
            self._r.encode(slots[k], Span(Buffer.RECV, cut.start, cut.stop - cut.start))
            self._r.send(slots[k], peer, self._channel)

    def _take(self, first: int, count: int, source: int) -> None:
        """Receive the values of ``count`` places."""
        r, cuts = self._r, self._cuts(first, count)
        slots = self._slots(cuts)

        def receive(k: int) -> None:
            r.recv(slots[k], cuts[k].stop - cuts[k].start, source, self._channel)

        def decode(k: int) -> None:
            r.decode(slots[k], Span(Buffer.RECV, cuts[k].start, cuts[k].stop - cuts[k].start))

        pipelined(len(cuts), Stage(_AHEAD - 1, receive), Stage(0, decode))

    def _cuts(self, first: int, count: int) -> list[slice]:
        return chunks(self._r.operation, self._edges[first], self._edges[first + count])

    def _slots(self, cuts: list[slice]) -> Slots:
        return Slots(self._r, _AHEAD, max((cut.stop - cut.start for cut in cuts), default=0))

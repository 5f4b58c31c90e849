"""All-gather in as many steps as the rank count has bits: in each, ranks exchange all messages that they have.

Every rank encodes its part once; the messages are checked and sent on, and all ranks decode the same ones. Messages go
in the order of Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems",
1997, which suits any number of ranks.

The messages of each place have a channel of their own: see :mod:`.ring`.
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
        for q in spread.first:
            r.send(slots[k], q, rank)
        r.decode(slots[k], Span(Buffer.RECV, cut.start, cut.stop - cut.start))
    spread.lead([])
    return r.finish()


class Spread:
    """Every place's encoded chunks, on their way to all.

    With places counted from a rank's own on, chunks of place j come from place h, the highest power of two not above
    j, and go on to places -h' for each power of two h' above j and not above the number of places less j + 1.

    Attributes:
        first: the ranks to which this rank sends its own chunks, to begin with.
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
            r: records the steps.
            ranks: in each place.
            place: this rank's, or that of the rank which it follows.
            cuts: each place's chunks.
            channel: of the messages of the first place; those of the others follow.
            wide: whether these are of the accumulator's dtype.
        """
        self._r, self._ranks, self._place, self._cuts = r, ranks, place, cuts
        self._channel, self._wide = channel, wide
        self.first = self._onward(0)

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

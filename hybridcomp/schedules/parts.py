"""Cut a buffer into parts, one for each rank, and each part into the chunks that are sent."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from hybridcomp.schedules.schedule import Buffer, Operation, Span
from hybridcomp.schedules.shards import Shards


class Parts:
    """Parts of a buffer, which follow one another, cut into chunks.

    Attributes:
        starts: first element of each part.
        rounds: number of chunks of the part that has most.
    """

    def __init__(self, starts: Sequence[int], cuts: Sequence[Sequence[slice]]) -> None:
        """Set the chunks of each part to ``cuts``, slices of the whole buffer."""
        self.starts = starts
        self.rounds = max(map(len, cuts), default=0)
        self._cuts = cuts

    @classmethod
    def even(cls, operation: Operation, count: int) -> Parts:
        """Divide the elements of an operation on one array into ``count`` near-equal parts."""
        (n,) = operation.counts
        shards = Shards.of(n, count, operation.itemsize, operation.chunk_bytes)
        cuts = [[shards.span(q, k) for k in range(shards.count) if shards.size(q, k)] for q in range(count)]
        return cls([min(q * shards.length, n) for q in range(count)], cuts)

    @classmethod
    def given(cls, operation: Operation, counts: Sequence[int] | None = None) -> Parts:
        """Make parts of ``counts`` elements, by default the operation's counts."""
        sizes = operation.counts if counts is None else counts
        starts = list(accumulate(sizes, initial=0))
        edges = pairwise(starts)
        return cls(starts[:-1], [chunks(operation, start, stop) for start, stop in edges])

    def size(self, part: int, k: int) -> int:
        """Return the number of elements of chunk ``k`` of a part; 0 past its end."""
        cuts = self._cuts[part]
        return int(cuts[k].stop - cuts[k].start) if k < len(cuts) else 0

    def longest(self, part: int) -> int:
        """Return the number of elements of the longest chunk of a part."""
        return max((cut.stop - cut.start for cut in self._cuts[part]), default=0)

    def start(self, part: int, k: int) -> int:
        """Return the index of the first element of a chunk in the buffer of all parts."""
        return int(self._cuts[part][k].start)

    def whole(self, buffer: Buffer, part: int, k: int) -> Span:
        """Return a chunk in a buffer of all parts."""
        return Span(buffer, self.start(part, k), self.size(part, k))

    def alone(self, buffer: Buffer, part: int, k: int) -> Span:
        """Return a chunk in a buffer that holds nothing but its part."""
        return Span(buffer, self.start(part, k) - self.starts[part], self.size(part, k))


def chunks(operation: Operation, start: int, stop: int) -> list[slice]:
    """Return the chunks of a range of elements."""
    n = stop - start
    cut = Shards.fixed(n, 1, n, operation.itemsize, operation.chunk_bytes)
    spans = [cut.span(0, k) for k in range(cut.count)]
    return [slice(start + span.start, start + span.stop) for span in spans]

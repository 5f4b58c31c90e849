"""Partition a buffer into a shard for each rank, and each shard into chunks that are pipelined."""

from __future__ import annotations

from dataclasses import dataclass, field

CHUNK_BYTES = 1 << 20  # uncompressed: stays in a core's L2 cache between encode, sum and decode
_ALIGN = 64  # elements, so that shards begin on cache lines


@dataclass(frozen=True, slots=True)
class Shards:
    """Partition of ``n`` elements into shards of ``ranks`` ranks.

    Attributes:
        n: number of elements in all.
        ranks: number of shards; the last ones may be shorter, or empty.
        length: elements of a full shard.
        chunk: elements of a full chunk.
        count: chunks of a full shard.
    """

    n: int
    ranks: int
    length: int
    chunk: int
    count: int
    _spans: dict[tuple[int, int], slice] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, n: int, ranks: int, itemsize: int, chunk_bytes: int = CHUNK_BYTES) -> Shards:
        """Make near-equal shards, cut on 64-element borders."""
        return cls.fixed(n, ranks, aligned(-(-n // ranks)), itemsize, chunk_bytes)

    @classmethod
    def fixed(cls, n: int, ranks: int, length: int, itemsize: int, chunk_bytes: int = CHUNK_BYTES) -> Shards:
        """Make shards of ``length`` elements each."""
        chunk = max(1, chunk_bytes // itemsize)
        if length > chunk:  # equal chunks: a short last one would cost one more message
            chunk = -(-length // -(-length // chunk))
            chunk = -(-chunk // _ALIGN) * _ALIGN
        return cls(n, ranks, length, chunk, -(-length // chunk) if length else 0)

    def span(self, rank: int, k: int) -> slice:
        """Return the range of chunk ``k`` of a rank's shard; empty past the end."""
        spans = self._spans
        found = spans.get((rank, k))
        if found is None:
            end = min((rank + 1) * self.length, self.n)
            start = min(rank * self.length + k * self.chunk, end)
            found = spans[rank, k] = slice(start, min(start + self.chunk, end))
        return found

    def size(self, rank: int, k: int) -> int:
        """Return the number of elements of :meth:`span`."""
        span = self.span(rank, k)
        return int(span.stop - span.start)


def aligned(length: int) -> int:
    """Return the length of shards that have room for ``length`` elements: short ones are not cut on borders."""
    return -(-length // _ALIGN) * _ALIGN if length > _ALIGN else length

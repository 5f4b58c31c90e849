"""Match operations across the ranks' traces: when a rank waited for others, and how far apart clocks can be."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from hybridcomp.breakdown.reading import MESSAGES, RankTrace, TracedOperation

_FROM_ROOT = ("broadcast", "scatter")
_TO_ROOT = ("reduce", "gather")

Pair = tuple[
    int, TracedOperation, int, TracedOperation
]  # rank and operation of the sender, and of the receiver


class Matches:
    """Operations of all ranks, matched with each other.

    Args:
        ranks: traces of the ranks.

    Attributes:
        collectives: operation of each rank, by communicator and number.
        messages: pairs of a send and its receive.
    """

    def __init__(self, ranks: Sequence[RankTrace]) -> None:
        self._groups: Mapping[str, tuple[int, ...]] = {
            key: group for one in ranks for key, group in one.groups.items()
        }
        self.collectives: dict[tuple[str, int], dict[int, TracedOperation]] = defaultdict(dict)
        sends: dict[tuple[str, int, int, int], list[TracedOperation]] = defaultdict(list)
        receives: dict[tuple[str, int, int, int], list[TracedOperation]] = defaultdict(list)
        for one in ranks:
            for operation in one.operations:
                comm = operation.comm
                if comm is None:
                    continue
                if operation.op not in MESSAGES:
                    self.collectives[comm, operation.n][one.rank] = operation
                elif operation.peer is not None:
                    ends = (one.rank, operation.peer)
                    if operation.op == "send":
                        sends[(comm, *ends, operation.tag)].append(operation)
                    else:
                        receives[(comm, *ends[::-1], operation.tag)].append(operation)
        self.messages = [
            (channel[1], sent, channel[2], received)
            for channel, of_channel in sends.items()
            for sent, received in zip(_numbered(of_channel), _numbered(receives[channel]), strict=False)
        ]

    def find_waits(self) -> None:
        """Set ``until`` of each operation: the time until which its rank could only wait for others.

        In a collective in which each rank needs all, a rank waits until the last of the others had something to send;
        in one from a root, until the root had; in one to a root, the root waits until the last rank had. A receive
        waits until the sender had something to send, a send until the receiver was there.
        """
        for (comm, _), of_rank in self.collectives.items():
            group = self._groups.get(comm, ())
            for rank, operation in of_rank.items():
                needed = [of_rank[r].ready for r in _needs(rank, operation, of_rank, group)]
                operation.until = max([operation.began, *needed])
        for _, sent, _, received in self.messages:
            received.until = max(received.began, sent.ready)
            sent.until = max(sent.began, received.began)

    def orders(self) -> Iterator[tuple[int, float, int, float]]:
        """Yield pairs of events in order: a rank and a time, then another rank and a later time by its own clock."""
        for (comm, _), of_rank in self.collectives.items():
            group = self._groups.get(comm, ())
            for rank, operation in of_rank.items():
                for other in _needs(rank, operation, of_rank, group):
                    yield other, of_rank[other].began, rank, operation.ended
        for source, sent, target, received in self.messages:
            yield source, sent.began, target, received.ended


def _numbered(operations: list[TracedOperation]) -> list[TracedOperation]:
    return sorted(operations, key=lambda o: o.n)


def _needs(
    rank: int, operation: TracedOperation, of_rank: Mapping[int, TracedOperation], group: Sequence[int]
) -> list[int]:
    """Return the ranks of the job from which a rank needs something in a collective."""
    others = [r for r in of_rank if r != rank]
    if operation.root is None or not 0 <= operation.root < len(group):
        return others
    root = group[operation.root]
    if operation.op in _FROM_ROOT:
        return [root] if root in others else []
    if operation.op in _TO_ROOT:
        return others if rank == root else []
    return others


def clock_offsets(ranks: Sequence[RankTrace], matches: Matches) -> tuple[dict[int, float], float]:
    """Estimate the seconds to add to the times of each rank, from which events must precede others.

    Ranks of one machine share a clock. Between machines each message, and each collective in which one rank needs
    another, is a ping: it cannot end before the other rank has begun. All these bounds, also by way of other machines,
    leave a range for each offset; its middle is taken.

    Returns:
        Seconds by rank, and the largest possible error of one of them: infinite where machines exchanged nothing.
    """
    clocks = sorted({one.clock for one in ranks})
    of_rank = {one.rank: clocks.index(one.clock) for one in ranks}
    count = len(clocks)
    if count == 1:
        return dict.fromkeys(of_rank, 0.0), 0.0
    # most[a][b]: largest amount by which the offset of a can exceed that of b
    most = [[0.0 if a == b else math.inf for b in range(count)] for a in range(count)]
    for early, before, late, after in matches.orders():
        a, b = of_rank[early], of_rank[late]
        if a != b:
            most[a][b] = min(most[a][b], after - before)
    for k in range(count):
        for a in range(count):
            for b in range(count):
                most[a][b] = min(most[a][b], most[a][k] + most[k][b])
    first = of_rank[ranks[0].rank]
    offsets, wrong = [], 0.0
    for a in range(count):
        high, low = most[a][first], -most[first][a]
        known = math.isfinite(high) and math.isfinite(low)
        offsets.append((high + low) / 2 if known else 0.0)
        wrong = max(wrong, abs(high - low) / 2 if known else math.inf)
    return {rank: offsets[clock] for rank, clock in of_rank.items()}, wrong

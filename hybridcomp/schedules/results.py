"""Define what each operation takes and gives: sizes of buffers, in-place data, the value of every result element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from hybridcomp.schedules.faults import ScheduleError
from hybridcomp.schedules.schedule import Operation
from hybridcomp.schedules.values import Promise
from hybridcomp.schedules.values import Run as Elements

if TYPE_CHECKING:
    from hybridcomp.schedules.run import Run

#: Operations on one array, whose counts are one number.
WHOLE = ("all_reduce", "broadcast", "reduce", "send")
#: Operations on parts, whose counts are one number for each rank; of an all-to-all for each pair of ranks.
PARTS = ("reduce_scatter", "all_gather", "gather", "scatter", "all_to_all")
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
#: Operations whose result has the same bits on all ranks.
ALIKE = ("all_reduce", "all_gather", "broadcast")


@dataclass(frozen=True, slots=True)
class Layout:
    """A rank's buffers.

    Attributes:
        send, recv: elements of each.
        send_at, recv_at: where each begins, if they lie in the same memory.
    """

    send: int
    recv: int
    send_at: int = 0
    recv_at: int = 0


def has_in_place(kind: str) -> bool:
    """Tell whether an operation may be given ``MPI.IN_PLACE``.

    (Of an all-to-all the communicator then makes a copy.)
    """
    return kind not in ("all_to_all", "send")


def layout(operation: Operation, ranks: int, rank: int) -> Layout:
    """Return the buffers that a rank has.

    Raises:
        ScheduleError: no such operation, or not so many counts.
    """
    kind, counts, root = operation.kind, operation.counts, operation.root
    wanted = 1 if kind in WHOLE else ranks * ranks if kind == "all_to_all" else ranks
    if kind not in WHOLE + PARTS or len(counts) != wanted:
        raise ScheduleError(f"{len(counts)} counts of the operation {kind!r} on {ranks} ranks")
    n, total = counts[0], sum(counts)
    starts = list(accumulate(counts, initial=0))
    match kind:
        case "all_reduce":
            return Layout(n, n)
        case "broadcast":
            return Layout(n if rank == root else 0, n)
        case "reduce":
            return Layout(n, n if rank == root else 0)
        case "send":
            return Layout(n, 0) if rank == root else Layout(0, n)
        case "reduce_scatter":
            return Layout(total, counts[rank], recv_at=starts[rank])
        case "all_gather":
            return Layout(counts[rank], total, send_at=starts[rank])
        case "gather":
            return (
                Layout(counts[rank], total, send_at=starts[rank]) if rank == root else Layout(counts[rank], 0)
            )
        case "scatter":
            return (
                Layout(total, counts[rank], recv_at=starts[rank]) if rank == root else Layout(0, counts[rank])
            )
        case _:
            return Layout(sum(counts[rank * ranks : (rank + 1) * ranks]), sum(counts[rank::ranks]))


def check_results(run: Run, promise: Promise) -> None:
    """Check all ranks' results after a run.

    Raises:
        ScheduleError: says on which rank, and which elements.
    """
    operation, ranks = run.operation, run.ranks
    for rank in range(ranks):
        size = layout(operation, ranks, rank).recv
        at = 0
        for owner, count, source in _sources(operation, ranks, rank):
            _check(run, promise, rank, at, owner, run.result(rank, at, count), source)
            at += count
        assert at == size
    if operation.kind in ALIKE:
        n = layout(operation, ranks, 0).recv
        first = run.result(0, 0, n)
        for rank in range(1, ranks):
            if run.result(rank, 0, n) != first:
                raise ScheduleError(
                    f"ranks 0 and {rank} do not take the same messages: their bits may differ"
                )


def _sources(operation: Operation, ranks: int, rank: int) -> Sequence[tuple[int | None, int, int]]:
    """Return the runs that a rank's ``RECV`` should hold: rank (None: the sum of all), count, first element."""
    counts, root = operation.counts, operation.root
    starts = list(accumulate(counts, initial=0))
    match operation.kind:
        case "all_reduce":
            return [(None, counts[0], 0)]
        case "reduce":
            return [(None, counts[0], 0)] if rank == root else []
        case "reduce_scatter":
            return [(None, counts[rank], starts[rank])]
        case "broadcast":
            return [(root, counts[0], 0)]
        case "send":
            return [(root, counts[0], 0)] if rank != root else []
        case "scatter":
            return [(root, counts[rank], starts[rank])]
        case "all_to_all":
            return [
                (q, counts[q * ranks + rank], starts[q * ranks + rank] - starts[q * ranks])
                for q in range(ranks)
            ]
        case "gather" if rank != root:
            return []
        case _:
            return [(q, n, 0) for q, n in enumerate(counts)]


def _check(
    run: Run, promise: Promise, rank: int, start: int, owner: int | None, found: list[Elements], source: int
) -> None:
    """Check a range of a rank's result, from element ``start`` on."""
    for count, number, origin in found:
        where = f"rank {rank}, RECV[{start}:{start + count}]"
        if number < 0:
            raise ScheduleError(f"{where} is never written")
        value = run.values[number]
        problem = None
        if origin != source:
            problem = f"it should be of element {source} on, not {origin}"
        elif owner is not None:
            problem = _movement(run, rank, owner, value.ranks, value.parts + value.sums)
        elif not value.total:
            problem = f"it lacks the parts of ranks {sorted(set(range(run.ranks)) - set(value.ranks))}"
        elif value.divided != run.operation.mean:
            problem = f"it is {'' if value.divided else 'not '}divided by the number of ranks"
        elif not promise.order(value.ranks, run.order.schedules[0].topology):
            problem = f"the ranks' parts are added in the order {value.ranks}"
        elif value.parts > promise.parts or value.sums > promise.sums:
            problem = f"parts are encoded {value.parts} times on their way, the sum {value.sums} times"
        if problem is not None:
            raise ScheduleError(f"{where}: {problem}")
        start, source = start + count, source + count


def _movement(run: Run, rank: int, owner: int, ranks: tuple[int, ...], encoded: int) -> str | None:
    exact = owner == rank and run.operation.kind in ("gather", "scatter", "all_to_all")
    if ranks != (owner,):
        return f"it should be of rank {owner}, not of {', '.join(map(str, ranks))}"
    if encoded > (0 if exact else 1):
        return f"it was encoded {encoded} times"
    return None

"""Check the value of every element of all ranks' results after a symbolic run."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate

from hybridcomp.schedules.faults import ScheduleError
from hybridcomp.schedules.layout import ALIKE, layout
from hybridcomp.schedules.proofs.run import Run
from hybridcomp.schedules.proofs.values import Promise
from hybridcomp.schedules.proofs.values import Run as Elements
from hybridcomp.schedules.schedule import Operation


def check_results(run: Run, promise: Promise) -> None:
    """Check all ranks' results after a run.

    Raises:
        ScheduleError: a result is wrong; names the rank and the elements.
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
    """Return the runs that a rank's ``RECV`` should hold, as rank (None: the sum of all), count, first element."""
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
    topology = run.order.schedules[0].topology
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
        elif not promise.order(value.ranks, topology):
            problem = f"the ranks' parts are added in the order {value.ranks}"
        elif value.parts > promise.parts or value.sums > promise.sums:
            problem = f"parts are encoded {value.parts} times on their way, the sum {value.sums} times"
        elif any(map(operator.gt, (value.losses, value.sums), promise.losses(topology))):
            problem = f"the errors of {value.losses} encoded parts and {value.sums} encoded sums add up in it"
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

"""Define the buffers of each operation: their sizes and places, and the classes of operations."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from hybridcomp.schedules.faults import ScheduleError
from hybridcomp.schedules.schedule import Operation

#: Operations on one array, whose counts are one number.
WHOLE = ("all_reduce", "broadcast", "reduce", "send")
#: Operations on parts, whose counts are one number for each rank, for an all-to-all one for each pair of ranks.
PARTS = ("reduce_scatter", "all_gather", "gather", "scatter", "all_to_all")
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
#: Operations whose result has the same bits on all ranks.
ALIKE = ("all_reduce", "all_gather", "broadcast")


@dataclass(frozen=True, slots=True)
class Layout:
    """Buffers of a rank.

    Attributes:
        send, recv: number of elements of each buffer.
        send_at, recv_at: first element of each buffer, if both lie in the same memory.
    """

    send: int
    recv: int
    send_at: int = 0
    recv_at: int = 0


def has_in_place(kind: str) -> bool:
    """Tell whether an operation may be given ``MPI.IN_PLACE``.

    (The communicator copies the data for an all-to-all in place.)
    """
    return kind not in ("all_to_all", "send")


def layout(operation: Operation, ranks: int, rank: int) -> Layout:
    """Return the layout of a rank's buffers.

    Raises:
        ScheduleError: there is no such operation, or it does not have as many counts.
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

"""Prove that all ranks' schedules keep their operation's promise, by a symbolic run without MPI and without data.

1. Every send has its receive, and no step waits for itself through others (:mod:`.proofs.order`): no deadlock.
2. All steps run in an order in which they may happen, on symbolic values (:mod:`.proofs.values`). Where two steps touch
   one slot, or overlapping spans of a buffer or of error-feedback memory, and one of them writes, one has certainly
   ended before the other begins; so any other order gives the same values. Nothing is read before it is written.
   Received messages are checked before they are sent on. Sums of some ranks' parts are never rounded to the caller's
   dtype.
3. At the end every element of every result is as the operation promises: for a reduction it holds each rank's part of
   this element, exactly once, in the promised order, encoded as often as promised and divided once for a mean; for a
   movement the right rank's element. Where all ranks get a result, it is made of the same messages on all of them,
   also on the rank that encoded them: the same bits.

4. The schedules also end where every rank does one step after another (:mod:`.in_order`), as without the engine.

Steps 2 and 3 are done with ``SEND`` and ``RECV`` apart, and again as they lie for ``MPI.IN_PLACE``.

Where steps depend on a cut (:mod:`.cuts`), all of this is done for several cuts, with the steps carried out in each.
The cut is by all ranks' sizes, and has certainly ended before any step that depends on it begins.

None of this uses how :class:`~hybridcomp.schedules.recorder.Recorder` found the dependencies.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridcomp.schedules import cuts
from hybridcomp.schedules.faults import ScheduleError
from hybridcomp.schedules.in_order import check_in_order
from hybridcomp.schedules.layout import has_in_place
from hybridcomp.schedules.proofs.order import Order
from hybridcomp.schedules.proofs.results import check_results
from hybridcomp.schedules.proofs.run import Run
from hybridcomp.schedules.proofs.values import Promise
from hybridcomp.schedules.schedule import Schedule


def verify(schedules: Sequence[Schedule], promise: Promise | None = None) -> None:
    """Check the schedules of all ranks of one operation.

    Args:
        schedules: schedules of rank 0, of rank 1, ...
        promise: promise of the algorithm; that of ``direct`` by default.

    Raises:
        ScheduleError: a schedule breaks a promise; names rank and step, and says what is wrong.
    """
    first = schedules[0]
    for rank, schedule in enumerate(schedules):
        if (schedule.rank, schedule.ranks) != (rank, len(schedules)):
            raise ScheduleError(
                f"schedule {rank} of {len(schedules)} is of rank {schedule.rank} of {schedule.ranks}"
            )
        if (schedule.operation, schedule.topology) != (first.operation, first.topology):
            raise ScheduleError(f"ranks 0 and {rank} have schedules of different operations or hosts")
    for case in cuts.cases(schedules):
        order = Order(case)
        for in_place in (False, True) if has_in_place(first.operation.kind) else (False,):
            run = Run(order, in_place)
            run.play()
            check_results(run, promise or Promise())
        check_in_order(case)

"""Prove that the schedules of all ranks do what their operation promises: a symbolic run, without MPI and without data.

1. Every send has its receive, and no step waits for itself through others (:mod:`.proofs.order`): no deadlock.
2. All steps run in an order in which they may happen, on symbolic values (:mod:`.proofs.values`). Of two steps that
   touch one slot, overlapping spans of a buffer or of the memory of error feedback, one of them writing, one has
   certainly ended before the other begins; so any other order gives the same values. Nothing is read before it is
   written. What was received is checked before it is sent on. Sums of some ranks' parts are never rounded to the
   caller's dtype.
3. At the end every element of every result is what the operation promises: of a reduction each rank's part of this
   element, exactly once, in the promised order, encoded as often as promised and divided once for a mean; of a movement
   the right rank's element. Where all ranks get a result, it is made of the same messages on all of them, also on the
   rank that encoded them: the same bits.

4. They also end where every rank does one step after another (:mod:`.in_order`), as it does without the engine.

Steps 2 and 3 are done with ``SEND`` and ``RECV`` apart, and again as they lie for ``MPI.IN_PLACE``.

Where steps depend on a cut (:mod:`.cuts`), all of this is done for several cuts, with what is carried out then. The cut
is of all ranks' sizes, and has certainly ended before whatever depends on it begins.

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
        schedules: of rank 0, of rank 1, ...
        promise: what the algorithm promises; that of ``direct`` unless given.

    Raises:
        ScheduleError: names rank and step, and says what is wrong.
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

"""Join operations of one kind into one: their schedules, one after the other, on parts of the same buffers.

Each part is carried as if alone: cut as if there were no others, by its own messages. A step of a part waits for no
step of another; ready steps of the first parts go first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hybridcomp.schedules.schedule import Buffer, Schedule, Slot, Span, Step


def joined(schedules: Sequence[Schedule], starts: Sequence[int]) -> Schedule:
    """Join schedules of one rank.

    Args:
        schedules: schedules to join, at least one, of the same topology and rank; none finds the owners of regions.
        starts: first element of each schedule, in ``SEND`` as in ``RECV``. The error-feedback memory of a schedule
            follows that of the schedule before it.

    Raises:
        ValueError: a schedule finds owners of regions.
    """
    steps: list[Step] = []
    slots: list[Slot] = []
    scratch = memory = 0
    for schedule, start in zip(schedules, starts, strict=True):
        if schedule.regions:
            raise ValueError(f"schedules of {schedule.operation.kind} that find owners cannot be joined")
        offsets = {Buffer.SEND: start, Buffer.RECV: start, Buffer.SCRATCH: scratch}
        steps += _moved(schedule.steps, len(steps), len(slots), offsets, memory)
        slots += schedule.slots
        scratch += schedule.scratch
        memory += sum(schedule.operation.counts)
    first = schedules[0]
    counts = tuple(n for schedule in schedules for n in schedule.operation.counts)
    return replace(
        first,
        operation=replace(first.operation, counts=counts),
        steps=tuple(steps),
        slots=tuple(slots),
        scratch=scratch,
        channels=max(schedule.channels for schedule in schedules),
    )


def _moved(
    steps: Sequence[Step], before: int, slots: int, offsets: dict[Buffer, int], memory: int
) -> list[Step]:
    """Move steps behind ``before`` others, which have ``slots`` slots and ``memory`` elements of memory."""

    def placed(span: Span | None) -> Span | None:
        return None if span is None else replace(span, start=span.start + offsets[span.buffer])

    return [
        replace(
            step,
            after=tuple(index + before for index in step.after),
            slot=step.slot + slots if step.slot >= 0 else -1,
            slots=tuple(slot + slots for slot in step.slots),
            span=placed(step.span),
            out=placed(step.out),
            memory=step.memory + memory if step.memory >= 0 else -1,
        )
        for step in steps
    ]

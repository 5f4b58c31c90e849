"""Place parts of a buffer that do not follow one another, by displacements as in MPI's v-collectives."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from hybridcomp.schedules.schedule import Buffer, Schedule, Span

Extents = Sequence[tuple[int, int]]  # first element and element count of each part


def placed(schedule: Schedule, buffer: Buffer, extents: Extents) -> Schedule:
    """Move the parts of a buffer to where the caller has them.

    Args:
        schedule: schedule for parts that follow one another; each of its spans of ``buffer`` lies in one part.
        buffer: ``SEND`` or ``RECV``.
        extents: extent of each part, with the schedule's element count. Parts that are written do not overlap.

    Raises:
        ValueError: a span reaches past its part.
    """
    sizes = [n for _, n in extents]
    starts = list(accumulate(sizes, initial=0))
    if all(start == at or not n for (start, n), at in zip(extents, starts, strict=False)):
        return schedule

    def moved(span: Span | None) -> Span | None:
        if span is None or span.buffer is not buffer or not span.count:
            return span
        part = bisect_right(starts, span.start) - 1
        if part >= len(sizes) or span.stop > starts[part + 1]:
            raise ValueError(f"elements {span.start} to {span.stop} are in no part of sizes {sizes}")
        return Span(buffer, span.start - starts[part] + extents[part][0], span.count)

    steps = tuple(replace(step, span=moved(step.span), out=moved(step.out)) for step in schedule.steps)
    return replace(schedule, steps=steps)

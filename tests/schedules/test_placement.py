"""Parts of buffers that do not follow one another."""

from __future__ import annotations

import pytest

from hybridcomp.schedules.placement import placed
from hybridcomp.schedules.registry import build
from hybridcomp.schedules.schedule import Buffer, Operation, Schedule, Span
from hybridcomp.schedules.topology import Topology

COUNTS = (5, 0, 700, 64)


def gathered(chunk_bytes: int = 1024) -> Schedule:
    """Return the all-gather of parts of any size, on rank 2."""
    operation = Operation("all_gather", COUNTS, 4, chunk_bytes=chunk_bytes)
    return build(operation, Topology.even(4, 1), 2, "direct")


def spans(schedule: Schedule, buffer: Buffer) -> list[Span]:
    return [
        span
        for step in schedule.steps
        for span in (step.span, step.out)
        if span is not None and span.buffer is buffer
    ]


def test_parts_that_follow_one_another_stay() -> None:
    schedule = gathered()
    assert placed(schedule, Buffer.RECV, [(0, 5), (99, 0), (5, 700), (705, 64)]) is schedule


def test_parts_are_moved_one_by_one_and_nothing_else() -> None:
    schedule = gathered()
    extents = [(900, 5), (0, 0), (100, 700), (1, 64)]
    moved = placed(schedule, Buffer.RECV, extents)
    assert spans(moved, Buffer.SEND) == spans(schedule, Buffer.SEND)
    before, after = spans(schedule, Buffer.RECV), spans(moved, Buffer.RECV)
    starts = {0: 900, 5: 100, 705: 1}  # where each part was, and is
    part = [max(start for start in starts if start <= span.start) for span in before]
    assert len(set(part)) == 3
    assert after == [
        Span(Buffer.RECV, span.start - start + starts[start], span.count)
        for span, start in zip(before, part, strict=True)
    ]
    assert [step.after for step in moved.steps] == [step.after for step in schedule.steps]


def test_a_span_of_two_parts_is_refused() -> None:
    schedule = gathered(1 << 20)
    with pytest.raises(ValueError, match="elements 5 to 705 are in no part"):
        placed(schedule, Buffer.RECV, [(900, 5), (0, 300), (100, 400), (1, 64)])

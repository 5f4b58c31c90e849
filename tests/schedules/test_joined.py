"""Schedules of several arrays as one."""

from __future__ import annotations

import pytest

from hybridcomp.schedules.joined import joined
from hybridcomp.schedules.registry import build
from hybridcomp.schedules.schedule import Buffer, Operation, Schedule, Step
from hybridcomp.schedules.topology import Topology

COUNTS, STARTS = (700, 0, 3, 5000), (10, 710, 720, 1000)


def parts(algorithm: str) -> list[Schedule]:
    """Return all-reduces with error feedback of each array, on rank 2 of two hosts with two ranks each."""
    operations = [Operation("all_reduce", (n,), 4, feedback=True, chunk_bytes=1024) for n in COUNTS]
    return [build(operation, Topology.even(4, 2), 2, algorithm) for operation in operations]


@pytest.mark.parametrize("algorithm", ["direct", "hierarchical", "ring", "one_shot"])
def test_each_step_is_that_of_its_part_moved(algorithm: str) -> None:
    alone = parts(algorithm)
    whole = joined(alone, STARTS)
    steps = slots = scratch = memory = 0
    for part, start in zip(alone, STARTS, strict=True):
        offsets = {Buffer.SEND: start, Buffer.RECV: start, Buffer.SCRATCH: scratch}
        for before in part.steps:
            after: Step = whole.steps[steps + part.steps.index(before)]
            assert (after.kind, after.peer, after.channel, after.count, after.divide) == (
                before.kind,
                before.peer,
                before.channel,
                before.count,
                before.divide,
            )
            assert after.after == tuple(index + steps for index in before.after)
            assert after.slots == tuple(slot + slots for slot in before.slots)
            assert after.slot == (before.slot + slots if before.slot >= 0 else -1)
            assert after.memory == (before.memory + memory if before.memory >= 0 else -1)
            for old, new in (before.span, after.span), (before.out, after.out):
                assert (old is None) == (new is None)
                if old is not None and new is not None:
                    assert (new.buffer, new.count) == (old.buffer, old.count)
                    assert new.start == old.start + offsets[old.buffer]
        steps, slots = steps + len(part.steps), slots + len(part.slots)
        scratch, memory = scratch + part.scratch, memory + part.operation.counts[0]
    assert (len(whole.steps), len(whole.slots), whole.scratch) == (steps, slots, scratch)
    assert whole.operation.counts == COUNTS
    assert whole.channels == max(part.channels for part in alone)


def test_schedules_that_find_owners_are_not_joined() -> None:
    operation = Operation("all_reduce", (5000,), 4)
    schedule = build(operation, Topology.even(4, 1), 2, "oktopk")
    with pytest.raises(ValueError, match="cannot be joined"):
        joined([schedule, schedule], [0, 5000])

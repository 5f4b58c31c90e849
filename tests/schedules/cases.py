"""Operations to try algorithms on, and ways to spoil a schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hybridcomp.schedules.registry import ALGORITHMS, Algorithm
from hybridcomp.schedules.schedule import Operation, Schedule, Step
from hybridcomp.schedules.topology import Topology
from hybridcomp.testing import CHUNK_BYTES, operation
from hybridcomp.testing import verified as check

__all__ = ["CHUNK_BYTES", "check", "operation"]
PAIRS = [(kind, name) for kind, algorithms in ALGORITHMS.items() for name in algorithms]


def built(algorithm: Algorithm, operation: Operation, topology: Topology) -> list[Schedule]:
    """Return the schedules of all ranks."""
    return [algorithm.build(operation, topology, rank) for rank in range(len(topology.hosts))]


def without_step(schedule: Schedule, index: int) -> Schedule:
    """Leave a step out; those that waited for it wait for what it waited for."""
    gone = schedule.steps[index]

    def renumbered(step: Step) -> Step:
        after = {*step.after} - {index}
        if index in step.after:
            after |= {*gone.after}
        return replace(step, after=tuple(sorted(one - (one > index) for one in after)))

    steps = [renumbered(step) for i, step in enumerate(schedule.steps) if i != index]
    return replace(schedule, steps=tuple(steps))


def with_step(schedule: Schedule, index: int, **changes) -> Schedule:
    """Change fields of a step."""
    steps = list(schedule.steps)
    steps[index] = replace(steps[index], **changes)
    return replace(schedule, steps=tuple(steps))


def without_dependencies(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    """Leave each dependency of each step out, in turn.

    But not those between steps that round one block of the memory of error feedback: other ranks' messages may imply
    their order, which differs from chunk to chunk. Another test leaves out all of those.
    """
    for index, step in enumerate(schedule.steps):
        for one in step.after:
            if step.memory_edges & schedule.steps[one].memory_edges:
                continue
            after = tuple(other for other in step.after if other != one)
            yield f"step {index} after step {one}", with_step(schedule, index, after=after)


def without_order_of_memory(schedule: Schedule) -> Schedule:
    """Leave all dependencies out between steps that round one block of the memory of error feedback."""
    steps = [
        replace(
            s, after=tuple(one for one in s.after if not s.memory_edges & schedule.steps[one].memory_edges)
        )
        for s in schedule.steps
    ]
    return replace(schedule, steps=tuple(steps))


def swapped(schedule: Schedule, first: int, second: int) -> Schedule:
    """Exchange two steps that do not wait for each other, and what each waits for."""
    steps = list(schedule.steps)
    places = {first: second, second: first}
    steps[first], steps[second] = steps[second], steps[first]
    moved = [replace(s, after=tuple(sorted(places.get(one, one) for one in s.after))) for s in steps]
    return replace(schedule, steps=tuple(moved))

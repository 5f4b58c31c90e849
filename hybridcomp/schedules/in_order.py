"""Prove that all ranks may do their steps one after another, in the order of their schedules.

Steps are done so for arrays on a device, and over backends of torch's: a rank waits for a message where a step reads
it, and sends wait for no rank. Two ranks then have :data:`TAGS` tags instead of channels.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from hybridcomp.schedules.faults import fail
from hybridcomp.schedules.schedule import Kind, Schedule

TAGS = 4  # the last one is for all channels from 3 on


def tag_of(channel: int) -> int:
    """Return the index, among an operation's tags, of the tag for a channel's messages."""
    return min(channel, TAGS - 1)


def check_in_order(schedules: Sequence[Schedule]) -> None:
    """Check the schedules of all ranks, whose steps are all carried out.

    Raises:
        ScheduleError: a rank waits for ever; or messages of channels that share a tag are sent in another order than
            they are received in.
    """
    _check_tags(schedules)
    at = [0] * len(schedules)
    sent: Counter[tuple[int, int, int]] = Counter()
    posted: Counter[tuple[int, int, int]] = Counter()
    coming: list[dict[int, tuple[tuple[int, int, int], int]]] = [{} for _ in schedules]
    moved = True
    while moved:
        moved = False
        for rank, schedule in enumerate(schedules):
            while at[rank] < len(schedule.steps):
                step = schedule.steps[at[rank]]
                if step.kind is Kind.SEND:
                    sent[rank, step.peer, step.channel] += 1
                elif step.kind is Kind.RECV:
                    line = (step.peer, rank, step.channel)
                    posted[line] += 1
                    coming[rank][step.slot] = line, posted[line]
                else:
                    waits = [coming[rank][slot] for slot in step.reads if slot in coming[rank]]
                    if any(sent[line] < number for line, number in waits):
                        break
                    coming[rank].pop(step.writes, None)
                at[rank] += 1
                moved = True
    for rank, schedule in enumerate(schedules):
        if at[rank] < len(schedule.steps):
            fail(schedule, at[rank], "it waits for ever where ranks do one step after another")


def _check_tags(schedules: Sequence[Schedule]) -> None:
    """Check that messages that share a tag between two ranks are sent and received in one order."""
    sends: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for rank, schedule in enumerate(schedules):
        for step in schedule.steps:
            if step.kind is Kind.SEND:
                sends[rank, step.peer, tag_of(step.channel)].append(step.channel)
    met: Counter[tuple[int, int, int]] = Counter()
    for rank, schedule in enumerate(schedules):
        for index, step in enumerate(schedule.steps):
            if step.kind is not Kind.RECV:
                continue
            line = (step.peer, rank, tag_of(step.channel))
            number, met[line] = met[line], met[line] + 1
            if sends[line][number : number + 1] != [step.channel]:
                fail(schedule, index, f"it is not message {number} that rank {step.peer} sends by its tag")

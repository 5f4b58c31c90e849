"""Prepare a schedule for a run one step after another: join sends of one message, find the later uses of messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hybridcomp.schedules.in_order import tag_of
from hybridcomp.schedules.schedule import Kind, Schedule, Step


class PreparedStep(NamedTuple):
    """Step, or several sends of one message, with the later uses of its message.

    Attributes:
        step: the step, or the first of the sends.
        peers: receivers of the sends.
        summed: whether a later step adds the message to others.
        kept: whether the message is read after it was sent, and not at once.
        tag: index, among the operation's tags, of the tag of messages that are sent or received.
    """

    step: Step
    peers: tuple[int, ...] = ()
    summed: bool = False
    kept: bool = False
    tag: int = 0


class Prepared(NamedTuple):
    """Schedule, and its steps as they are run.

    Attributes:
        schedule: schedule of one rank, with encoded messages.
        groups: groups of its steps.
    """

    schedule: Schedule
    groups: list[PreparedStep]

    @property
    def on_host(self) -> bool:
        """Tell whether it runs in host memory alone: message sizes decide, which a device tells too late."""
        return self.schedule.regions > 0


def prepare(schedule: Schedule) -> Prepared:
    """Group the steps of a schedule, and find the later uses of each message."""
    steps, groups, at = schedule.steps, [], 0
    while at < len(steps):
        step, end = steps[at], at + 1
        if step.kind is Kind.SEND:
            while end < len(steps) and _same_send(steps[end], step):
                end += 1
            reader = _next_reader(steps, end, step.slot)
            at_once = reader == end and steps[end].kind is Kind.DECODE
            peers = tuple(one.peer for one in steps[at:end])
            kept = reader is not None and not at_once
            groups.append(PreparedStep(step, peers, kept=kept, tag=tag_of(step.channel)))
        else:
            summed = step.writes >= 0 and _is_summed(steps, end, step.writes)
            groups.append(PreparedStep(step, summed=summed, tag=tag_of(step.channel)))
        at = end
    return Prepared(schedule, groups)


def _same_send(step: Step, first: Step) -> bool:
    """Tell whether a step sends the same message as ``first``, under the same condition."""
    alike = (step.slot, step.channel, step.region, step.owner)
    return step.kind is Kind.SEND and alike == (first.slot, first.channel, first.region, first.owner)


def _users(steps: Sequence[Step], start: int, slot: int) -> Iterator[int]:
    """Yield the indices of the steps that read a slot, before it is written again."""
    for index in range(start, len(steps)):
        if slot in steps[index].reads:
            yield index
        if steps[index].writes == slot:
            return


def _next_reader(steps: Sequence[Step], start: int, slot: int) -> int | None:
    """Return the index of the first step that reads a slot other than to send it; None if there is none."""
    return next((i for i in _users(steps, start, slot) if steps[i].kind is not Kind.SEND), None)


def _is_summed(steps: Sequence[Step], start: int, slot: int) -> bool:
    return any(steps[i].kind in (Kind.SUM, Kind.SUM_ENCODE) for i in _users(steps, start, slot))

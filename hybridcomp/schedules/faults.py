"""Describe faults of a schedule, each in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from hybridcomp.schedules.schedule import Kind, Schedule, Span, Step


class ScheduleError(ValueError):
    """Raised for a schedule that breaks its promise; names the rank and the step at fault."""


def describe(step: Step) -> str:
    """Describe the work of a step in a few words."""
    match step.kind:
        case Kind.SEND:
            return f"send slot {step.slot} to rank {step.peer}"
        case Kind.RECV:
            return f"receive slot {step.slot} from rank {step.peer}"
        case Kind.SUM:
            return f"{_addends(step)} to {_span(step.out)}"
        case Kind.SUM_ENCODE:
            also = f" and {_span(step.out)}" if step.out is not None else ""
            return f"{_addends(step)}, encode into slot {step.slot}{also}"
        case Kind.SIZES:
            return f"write the sizes of {_slots(step.slots)} into slot {step.slot}"
        case Kind.CUT:
            return f"cut {step.count} regions by {_slots(step.slots)}"
        case _:  # the kind's name, the places that it reads, and those that it writes
            read = [] if step.span is None else [_span(step.span)]
            read += [_slots(step.reads)] if step.reads else []
            into = f" into slot {step.writes}" if step.writes >= 0 else ""
            to = f" to {_span(step.out)}" if step.out is not None else ""
            return f"{words(step.kind)} {' and '.join(read) or 'nothing'}{into}{to}"


def words(kind: Kind) -> str:
    """Return the name of a kind of steps in small letters: ``sum and encode``."""
    return kind.name.lower().replace("_", " and ")


def fail(schedule: Schedule, index: int, problem: str) -> NoReturn:
    """Raise a ScheduleError about a step."""
    raise ScheduleError(f"rank {schedule.rank}, step {index} ({describe(schedule.steps[index])}): {problem}")


def _span(span: Span | None) -> str:
    return "nothing" if span is None else f"{span.buffer.name}[{span.start}:{span.stop}]"


def _addends(step: Step) -> str:
    own = [] if step.span is None else [_span(step.span)]
    terms = own + ([_slots(step.slots)] if step.slots else [])
    return f"{'average' if step.divide else 'sum'} {' and '.join(terms) or 'nothing'}"


def _slots(slots: Sequence[int]) -> str:
    return f"slot{'s' * (len(slots) > 1)} {', '.join(map(str, slots))}"

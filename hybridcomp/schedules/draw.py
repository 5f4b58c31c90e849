"""Show schedules to users: a rank's steps as rows, all ranks' in a few numbers, their simulated time as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

from hybridcomp.schedules.faults import describe, words
from hybridcomp.schedules.proofs.order import Order
from hybridcomp.schedules.schedule import Kind, Schedule, Slot
from hybridcomp.schedules.simulate import Timeline

#: Headings of :func:`rows`.
HEADINGS = ("step", "does", "elements", "channel", "after")
# Okabe and Ito's palette, which people with any colour vision tell apart. Steps too short to be seen are not drawn.
_COMPUTES = {
    Kind.ENCODE: ("encode", "#E69F00"),
    Kind.SUM: ("sum", "#009E73"),
    Kind.SUM_ENCODE: ("sum and encode", "#0072B2"),
    Kind.DECODE: ("decode", "#56B4E9"),
    Kind.COPY: ("copy", "#F0E442"),
}
# Style of a send by the kind of step that made its message.
_SENDS = {
    Kind.ENCODE: ("send own data", "#CC79A7"),
    Kind.SUM_ENCODE: ("send a sum", "#D55E00"),
    Kind.RECV: ("send on", "#E9B08A"),
    Kind.SIZES: ("send sizes", "#999999"),
}
_OTHER = "#000000"  # colour of steps in neither table
_Style = tuple[str, str]  # name and colour
_LABELLED = 0.012  # share of the width: shorter bars have no label
_EDGED = 0.004  # share of the width: shorter bars have no edge, which would hide them


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of all ranks' schedules.

    Attributes:
        steps: number of steps of the rank that has most.
        messages, sent: number and bytes of messages of the rank that sends most of each.
        chain: number of steps in the longest chain, over all ranks, in which each waits for the one before.
        room: bytes of the slots of the rank that has most.
    """

    steps: int
    messages: int
    sent: int
    chain: int
    room: int


def rows(schedule: Schedule) -> list[tuple[str, ...]]:
    """Return the steps of a schedule as cells under :data:`HEADINGS`."""
    result: list[tuple[str, ...]] = []
    for index, step in enumerate(schedule.steps):
        does = describe(step)
        if step.memory >= 0:
            does += f", memory[{step.memory}:{step.memory + step.count}]"
        if step.region >= 0:
            does += f", if rank {step.owner} owns region {step.region}"
        channel = str(step.channel) if step.kind in (Kind.SEND, Kind.RECV) else ""
        result.append((str(index), does, str(step.count), channel, ", ".join(map(str, step.after))))
    return result


def summarize(schedules: Sequence[Schedule], message_bytes: Callable[[Slot, int], int]) -> Summary:
    """Count the steps, messages and bytes of all ranks' schedules.

    Args:
        schedules: schedules of all ranks.
        message_bytes: function of a slot and a number of elements that returns the bytes of such a message.

    Raises:
        ScheduleError: messages do not meet, or steps wait for one another.
    """
    sent = [
        [message_bytes(s.slots[step.slot], step.count) for step in s.steps if step.kind is Kind.SEND]
        for s in schedules
    ]
    return Summary(
        steps=max(len(s.steps) for s in schedules),
        messages=max(map(len, sent)),
        sent=max(map(sum, sent)),
        chain=Order(schedules).longest_chain(),
        room=max(sum(message_bytes(slot, slot.count) for slot in s.slots) for s in schedules),
    )


def picture(
    schedules: Sequence[Schedule], timeline: Timeline, title: str, file: IO[bytes], kind: str
) -> None:
    """Draw the times of steps: for each rank a row for its computing, and one for its sends.

    Args:
        schedules: schedules of all ranks.
        timeline: times from :func:`~hybridcomp.schedules.simulate.simulate`.
        title: title above the picture.
        file: file to write to.
        kind: format of the picture: ``png``, ``svg``.

    Raises:
        ImportError: matplotlib is missing.
        OSError: the file cannot be written.
        ValueError: matplotlib does not write this format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  (a second, for a picture alone)
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    figure = Figure(figsize=(12.0, 1.9 + 0.62 * len(schedules)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    scale, unit = (1e3, "ms") if timeline.seconds >= 1e-3 else (1e6, "us")
    shown: dict[_Style, None] = {}
    for schedule in schedules:
        shown |= _lanes(axes, schedule, timeline, scale)
    ranks = len(schedules)
    axes.set_yticks(
        [rank + offset for rank in range(ranks) for offset in (0.25, 0.66)],
        [f"rank {rank}  {lane}" for rank in range(ranks) for lane in ("computes", "sends")],
        fontsize=8 if ranks <= 12 else 5,
    )
    for rank in range(1, ranks):
        axes.axhline(rank - 0.045, color="#BBBBBB", linewidth=0.6)
    axes.set_ylim(ranks - 0.02, -0.07)
    axes.set_xlim(0, (timeline.seconds or 1e-6) * scale * 1.005)
    axes.set_xlabel(f"simulated time ({unit}); a number is the rank that a message goes to")
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    known = [style for style in (*_COMPUTES.values(), *_SENDS.values()) if style in shown]
    styles = list(dict.fromkeys([*known, *shown]))
    patches = [Patch(facecolor=colour, label=what) for what, colour in styles]
    if patches:
        figure.legend(
            handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=9
        )
    figure.savefig(file, format=kind)


def _lanes(axes: Any, schedule: Schedule, timeline: Timeline, scale: float) -> dict[_Style, None]:
    """Draw a rank's rows; return the styles that they use."""
    bars: dict[tuple[_Style, float, bool], list[tuple[float, float]]] = {}
    begins, ends = timeline.begins[schedule.rank], timeline.ends[schedule.rank]
    made: dict[int, Kind] = {}  # for each slot, the kind of step that made its message
    for index, step in enumerate(schedule.steps):
        if step.writes >= 0:
            made[step.writes] = step.kind
        if step.kind in (Kind.RECV, Kind.CHECK, Kind.SIZES, Kind.CUT):
            continue
        sends = step.kind is Kind.SEND
        if sends:
            style, top = _SENDS.get(made[step.slot], ("send", _OTHER)), 0.5
        else:
            style, top = _COMPUTES.get(step.kind, (words(step.kind), _OTHER)), 0.07
        begin, width = begins[index] * scale, (ends[index] - begins[index]) * scale
        share = width / (timeline.seconds * scale)
        bars.setdefault((style, top, share > _EDGED), []).append((begin, width))
        if sends and share > _LABELLED:
            place = (begin + width / 2, schedule.rank + 0.67)
            axes.annotate(str(step.peer), place, ha="center", va="center", fontsize=6.5, color="black")
    for (style, top, edged), spans in bars.items():
        edge = {"edgecolor": "white" if edged else style[1], "linewidth": 0.5}
        axes.broken_barh(spans, (schedule.rank + top, 0.33), facecolors=style[1], **edge)
    return dict.fromkeys(style for style, _, _ in bars)

"""Record pipelines of chunks: the order of their stages, and the slots that they take in turn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from hybridcomp.schedules.recorder import Recorder


class Slots:
    """Slots that chunks take in turn: a chunk's message waits until the one ``depth`` before it is used up.

    Args:
        recorder: recorder of the schedule.
        depth: most slots; each is made when it is first asked for.
        count: elements of the longest message.
        wide: whether they hold elements of the accumulator's dtype.
        plain: whether they hold elements as they are; None for the operation's setting.
    """

    def __init__(
        self, recorder: Recorder, depth: int, count: int, *, wide: bool = False, plain: bool | None = None
    ) -> None:
        self._depth = depth
        self._make: Callable[[], int] = partial(recorder.slot, count, wide=wide, plain=plain)
        self._slots: dict[int, int] = {}

    def __getitem__(self, chunk: int) -> int:
        """Return the slot of a chunk."""
        place = chunk % self._depth
        if place not in self._slots:
            self._slots[place] = self._make()
        return self._slots[place]


class Stage(NamedTuple):
    """Stage that every chunk passes through.

    Attributes:
        ahead: chunks by which it is ahead of a common count; negative if it is behind.
        record: function that records the stage for a chunk.
    """

    ahead: int
    record: Callable[[int], None]


def pipelined(count: int, *stages: Stage) -> None:
    """Record the stages of ``count`` chunks, the first stage furthest ahead."""
    for step in range(-stages[0].ahead, count - stages[-1].ahead):
        for stage in stages:
            if 0 <= step + stage.ahead < count:
                stage.record(step + stage.ahead)

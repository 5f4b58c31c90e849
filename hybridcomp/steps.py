"""Count the optimizer steps of this process, and for how much of them the thread that makes them slept."""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Totals of a process's optimizer steps, since it began.

    Attributes:
        count: number of steps.
        timed: those of them whose length is known: all but the first, and the first after each reset.
        blind: those of them for which it is not known how long the thread slept.
        seconds: seconds of the timed steps.
        slept: seconds for which the thread slept in those of which it is known.
    """

    count: int = 0
    timed: int = 0
    blind: int = 0
    seconds: float = 0.0
    slept: float = 0.0


@dataclass(frozen=True)
class Steps:
    """Optimizer steps that statistics belong to.

    Attributes:
        count: number of steps; 0 where no optimizer stepped, and totals are shown.
        seconds: seconds of those steps whose length is known; 0 where none is, as for the first alone.
        waited: of these, the seconds for which the thread that makes the steps slept, so that it could not compute;
            None where that is not known, as with a GPU, for which it sleeps, too.
        timed: number of the steps whose length is known.
    """

    count: int = 0
    seconds: float = 0.0
    waited: float | None = None
    timed: int = 0

    @property
    def length(self) -> float | None:
        """Return the mean seconds of a step; None where no step's length is known."""
        return self.seconds / self.timed if self.timed else None

    @property
    def share(self) -> float | None:
        """Return the share of a step in which the thread waited, at most 1; None where it is not known."""
        if self.waited is None or self.seconds <= 0:
            return None
        return min(1.0, max(0.0, self.waited / self.seconds))


NO_STEPS = StepTotals()


def between(before: StepTotals, now: StepTotals) -> Steps:
    """Return the steps that totals ``now`` have more than those ``before``."""
    waited = None if now.blind > before.blind else max(0.0, now.slept - before.slept)
    seconds = max(0.0, now.seconds - before.seconds)
    return Steps(max(0, now.count - before.count), seconds, waited, max(0, now.timed - before.timed))


class StepClock:
    """Clock of a process's optimizer steps: how many, how long, and how much of them its thread slept.

    The optimizer that steps first makes the steps, as long as it lives. A thread that sleeps waits for other ranks, or
    for its data.

    Attributes:
        totals: totals up to now; replaced at each step, so that any thread may read it.
    """

    def __init__(self) -> None:
        self.totals = NO_STEPS
        self._optimizer: weakref.ref[object] | None = None
        self._last: tuple[int, float, float | None] | None = None  # thread, time, its seconds awake

    def break_off(self) -> None:
        """Leave the step that is under way out of the lengths: counting begins anew within it."""
        self._last = None

    def stepped(self, optimizer: object, *, sees_waits: bool = True) -> bool:
        """Take notice of an optimizer's step; return whether it is one of training, which the first optimizer makes.

        Args:
            optimizer: optimizer that has stepped.
            sees_waits: whether its thread sleeps only for other ranks and for data: not where a GPU is used.
        """
        first = None if self._optimizer is None else self._optimizer()
        if first is None:
            first, self._optimizer = optimizer, weakref.ref(optimizer)
        if first is not optimizer:
            return False
        now = threading.get_native_id(), time.perf_counter(), awake_seconds()
        before, self._last = self._last, now
        old = self.totals
        if before is None:
            self.totals = StepTotals(old.count + 1, old.timed, old.blind, old.seconds, old.slept)
            return True
        passed, blind, slept = now[1] - before[1], old.blind, old.slept
        if not sees_waits or now[0] != before[0] or now[2] is None or before[2] is None:
            blind += 1
        else:
            slept += min(passed, max(0.0, passed - (now[2] - before[2])))
        self.totals = StepTotals(old.count + 1, old.timed + 1, blind, old.seconds + passed, slept)
        return True


clock = StepClock()  # of this process


def awake_seconds() -> float | None:
    """Return the seconds for which this thread has run, or waited for a core, in all; None where nobody counts them."""
    counted = schedstat(threading.get_native_id())
    return None if counted is None else time.thread_time() + counted[1]


def schedstat(thread: int) -> tuple[float, float] | None:
    """Return the seconds for which a thread has run, and waited for a core; None where Linux does not count them."""
    try:
        ran, delayed, _ = Path(f"/proc/self/task/{thread}/schedstat").read_bytes().split()
        return int(ran) / 1e9, int(delayed) / 1e9
    except (OSError, ValueError):
        return None

"""Measure a communicator's decisions and change them, at the same operation on all ranks and without their waiting.

Operations are counted alike on all ranks, so ranks act alike if they act at the same number. Early in a job the
options of each decision take turns; then ranks exchange their measurements, by one small reduction to the slowest
rank's times. It travels beside the next operations, and takes effect :data:`LAG` operations later: by then it has long
ended, and a rank that is so many operations ahead of another waits for it. From then on the times are compared, again
and again, with those of the beginning: where they have changed, so has the link.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable

import numpy as np

from hybridcomp.policy.auto.decider import TRIED, Array, Decider, Decision

FIRST = 8  # operations, before anything is tried
LAG = 8  # operations from an exchange to its effect
_LEAST, _MOST = 11, 4096  # operations between two exchanges
_WORTH = 200.0  # an exchange's seconds fit so often between two exchanges: half a percent
# Least seconds of operations between exchanges: a rank that is kept from its core for a while is no slower link.
_SPAN = 0.2
# Operations until the next look for something to decide: twice as many each time.
_IDLE, _MOST_IDLE = 64, 512
# Operations of a turn that are counted: as many as take so many seconds. As many precede them, which compile
# schedules and meet the link as the turn before has left it.
_COUNTED, _LEAST_COUNTED, _MOST_COUNTED = 10e-3, 2, 64
_MOST_TURN = 512
_ROUNDS = 3  # turns of each option; the middle one counts
# Factors of time that are a change of the link if they last for three intervals, or two.
_CHANGED, _CHANGED_MUCH = 1.3, 2.0
_WRONG = 2.5  # factor between measured and predicted times: the profile is of another link
_OF_LINK = 1 << 16  # bytes of a message, from which on the link decides its time
_PLAINLY = 1 << 18  # bytes of a message that is compared with its prediction
_BASE = 3  # first intervals, with whose middle later ones are compared
_CALMER = 1.15  # factor on the limit after a change that changed no choice

Row = tuple[str, str, str, int, int, float]  # operation, codec, reason, calls, raw bytes, seconds
Totals = dict[tuple[str, str, str], tuple[int, int, float]]
Gather = Callable[[Array], Callable[[], Array]]


class Reviews:
    """Reviews of one communicator's decisions.

    Args:
        decider: decider whose decisions are reviewed.
        rows: function that returns the totals of operations that have ended here.
        gather: function that starts to gather all ranks' values [n]; returns one that waits for them, [ranks, n].
        changed: function called where answers may have changed.
        clock: function that returns seconds; it measures the cost of exchanges, which decides how often they come.
    """

    def __init__(
        self,
        decider: Decider,
        rows: Callable[[], Iterable[Row]],
        gather: Gather,
        changed: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._decider, self._rows, self._gather, self._changed = decider, rows, gather, changed
        self._clock = clock
        self._steps = self._run()
        self._operation = 0

    def review(self, operation: int) -> int:
        """Do the work due at a number of operations; return how many more are to pass until the next work.

        Args:
            operation: number of the next operation, the same on all ranks.
        """
        self._operation = operation
        return next(self._steps)

    def _run(self) -> Generator[int, None, None]:
        yield FIRST
        idle = _IDLE
        while True:
            if self._decider.untried():
                yield from self._trial()
                idle = _IDLE
            # The memory of one host grows neither slower nor faster, and short messages do not tell of a link.
            if any(map(_of_link, self._decider.watched())) and self._decider.place.hosts > 1:
                yield from self._watch()
            else:
                yield idle
                idle = min(2 * idle, _MOST_IDLE)

    def _largest(self, values: Array) -> Callable[[], Array]:
        """Start to find the largest of all ranks' values; return a function that waits for them."""
        wait = self._gather(values)
        return lambda: wait().max(axis=0)

    def _totals(self) -> Totals:
        totals: Totals = {}
        for op, codec, reason, calls, nbytes, seconds in self._rows():
            known = totals.get((op, codec, reason), (0, 0, 0.0))
            totals[op, codec, reason] = (known[0] + calls, known[1] + nbytes, known[2] + seconds)
        return totals

    # -- early in a job ------------------------------------------------------------------------------

    def _trial(self) -> Generator[int, None, None]:
        decider, trials = self._decider, self._decider.untried()
        counted = min(_MOST_TURN, sum(map(_counted, trials)))
        first = max(counted, len(trials))
        rounds = np.full((_ROUNDS, len(trials), TRIED), np.nan)  # seconds for each byte
        for number in range(_ROUNDS):
            for index in range(max(len(decision.options) for decision in trials)):
                decider.try_option(trials, index)
                self._changed()
                yield first
                before = self._totals()
                yield counted
                for row, (calls, nbytes, seconds) in enumerate(self._since(before, trials)):
                    if index < len(trials[row].options) and calls and nbytes:
                        rounds[number, row, index] = seconds / nbytes
        decider.try_option(trials, 0)
        self._changed()
        wait = self._largest(_middle(rounds).ravel())
        yield LAG
        decider.settle(trials, wait(), self._operation)
        self._changed()

    def _since(self, before: Totals, decisions: list[Decision]) -> list[tuple[int, int, float]]:
        """Return the calls, bytes and seconds of each decision's choice since some totals."""
        now = self._totals()
        found = []
        for decision in decisions:
            key = (decision.signature.op, decision.choice.codec.spec, decision.choice.reason)
            new, old = now.get(key, (0, 0, 0.0)), before.get(key, (0, 0, 0.0))
            found.append((new[0] - old[0], new[1] - old[1], new[2] - old[2]))
        return found

    # -- from then on --------------------------------------------------------------------------------

    def _watch(self) -> Generator[int, None, None]:
        """Compare times with those of the beginning, until there is something to try."""
        decider, watched = self._decider, self._decider.watched()
        telling = np.array([_of_link(decision) for decision in watched])
        plain = np.array([d.choice.codec.lossless and d.signature.nbytes >= _PLAINLY for d in watched])
        compared = _Comparison()
        cost, interval = 0.0, _LEAST
        # Count the cheapest exchange: one for which a rank was late took longer, and would put off the next ones.
        cheapest = math.inf
        yield 1 + len(watched)  # compiles schedules
        while True:
            before, began, first = self._totals(), self._clock(), self._operation
            yield interval
            if len(decider.watched()) != len(watched):
                return
            passed = self._clock() - began
            began = self._clock()
            found = np.array(self._since(before, watched), float).reshape(len(watched), 3)
            # In a job that computes between operations, exchanges cost that small part of the operations' seconds, too.
            took = min(passed, found[:, 2].sum()) / max(1, self._operation - first)
            each = np.full(len(watched), -1.0)
            some = telling & (found[:, 0] > 0) & (found[:, 1] > 0)
            each[some] = found[some, 2] / found[some, 1]
            wait = self._largest(np.concatenate([each, found[:, 1], [took, cost]]))
            cost = self._clock() - began
            yield LAG
            began = self._clock()
            agreed = wait()
            cost += self._clock() - began
            now, nbytes = agreed[: len(watched)], agreed[len(watched) : -2]
            now = np.where(now > 0, now, np.nan)
            took, spent = agreed[-2:]
            if spent > 0:
                cheapest = min(cheapest, spent)
                interval = min(2 * interval, _interval(took, cheapest))
            base = compared.base(now)
            if base is None:  # the first time, compare with the profile's predictions
                base = decider.predicted(watched)
                # Codecs may be slower than predicted for want of cores; that says nothing of the link.
                base[~plain & (now > base)] = np.nan
                changed = _far(now, base, nbytes) > _WRONG
            else:
                changed = compared.changed(_far(now, base, nbytes))
            if changed:
                compared.begin(decider.link_changed(now, base, nbytes, self._operation))
                self._changed()
                if decider.untried():
                    yield from self._trial()
                yield 1 + len(watched)


class _Comparison:
    """Comparison of intervals with the first ones, which tells changes from times that waver."""

    def __init__(self) -> None:
        self._history: list[Array] | None = None  # the first intervals; None before any
        self._limit, self._changes = _CHANGED, 0

    def base(self, now: Array) -> Array | None:
        """Return the values to compare an interval with, and keep it if it is an early one; None at the first time."""
        if not np.isfinite(now).any():
            return now
        history, first = self._history or [], self._history is None
        base = _middle(np.array(history)) if history else now
        self._history = [*history, now][:_BASE]
        return None if first else base

    def changed(self, far: float) -> bool:
        """Tell whether the link has changed, by how far an interval is from the first ones."""
        self._changes = self._changes + 1 if far > self._limit else 0
        much = far > max(_CHANGED_MUCH, self._limit)
        return self._changes > 2 or (self._changes > 1 and much)

    def begin(self, other: bool) -> None:
        """Begin anew after a change; where no ``other`` choices came of it, the next change has to be larger."""
        self._limit = _CHANGED if other else self._limit * _CALMER
        self._history, self._changes = [], 0


def _of_link(decision: Decision) -> bool:
    """Tell whether the link decides the time of a kind of message."""
    return decision.signature.nbytes >= _OF_LINK


def _middle(rounds: Array) -> Array:
    """Return medians of known values over the first dimension; infinite where none is known."""
    known = np.isfinite(rounds)
    ordered = np.sort(np.where(known, rounds, np.inf), axis=0)
    middle = np.take_along_axis(ordered, np.maximum(known.sum(axis=0) - 1, 0)[None] // 2, axis=0)[0]
    return np.asarray(middle)


def _counted(decision: Decision) -> int:
    """Return the number of operations of a kind that count in a turn."""
    wanted = _COUNTED / max(decision.options[0].predicted, 1e-6)
    return int(min(max(wanted, _LEAST_COUNTED), _MOST_COUNTED))


def _far(now: Array, before: Array, nbytes: Array) -> float:
    """Return the factor between two sums of seconds, at least 1, over kinds whose seconds a byte are known in both."""
    known = np.isfinite(now) & np.isfinite(before) & (nbytes > 0)
    if not known.any():
        return 1.0
    seconds, those = (float((each[known] * nbytes[known]).sum()) for each in (now, before))
    ratio = seconds / those
    return max(ratio, 1 / ratio)


def _interval(took: float, cost: float) -> int:
    """Return the operations between two exchanges that make their cost too small to measure."""
    wanted = max(_WORTH * cost, _SPAN) / took if took > 0 else _LEAST
    return int(min(_MOST, max(_LEAST, math.ceil(wanted))))

"""Adapt the codec of one axis and operation as training goes on, beside its messages and without waiting for them.

The figures of a measured step s are gathered from all ranks while step s + 1 is sent, and decide from step s + 2 on:
by then they have long arrived.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hybridcomp.codecs import Codec
from hybridcomp.policy.adapt.controller import Array, Controller
from hybridcomp.policy.adapt.dct import DctController
from hybridcomp.policy.adapt.decisions import Decision, files
from hybridcomp.policy.adapt.frozen import FrozenController
from hybridcomp.policy.adapt.gravac import GravacController
from hybridcomp.policy.adapt.sidco import SidcoController
from hybridcomp.policy.adapt.spec import DCT, FROZEN, GRAVAC, SIDCO, Adapt
from hybridcomp.policy.message import Choice, Message

Gather = Callable[[Array], Callable[[], Array]]
"""Function that starts to gather each rank's values [n]; returns a function that waits for all ranks', [ranks, n]."""

Arrays = dict[str, npt.NDArray[Any]]

_STATE, _FIGURES, _PENDING = "state", "figures", "pending"
_LATELY = 32  # last steps whose seconds are kept
_LEAST_SHARE = 16  # a sample has every so-many-th element of a tensor, unless these are too few
_log = logging.getLogger("hybridcomp.adapt")


class Asked(Protocol):
    """Policy, or the decider of one."""

    def choose(self, message: Message) -> Choice:
        """Choose the codec of a message."""

    def same_as_step(self, step: int) -> int:
        """Return the first step that has the answers of ``step``."""


class Adaptation:
    """Decisions about the messages of one rule.

    All ranks call :meth:`begin` with the same steps, at the same places among their operations.

    Args:
        adapt: the rule's ``adapt``.
        codecs: codecs of the rule; the first one is adapted.
        asked: policy or decider for all other messages.
        axis, op: axis and operation of the rule.
        place: number of this one among the process's adaptations of that axis and operation, from 1.
        gather: function that gathers values over the ranks.
        writes: whether this rank writes the file of decisions that ``adapt`` may name.
        clock: function that returns seconds.

    Attributes:
        version: number that grows whenever answers may have changed.
    """

    def __init__(
        self,
        adapt: Adapt,
        codecs: tuple[Codec, ...],
        asked: Asked,
        axis: str,
        op: str,
        gather: Gather,
        *,
        place: int = 1,
        writes: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.version = 0
        mine = tuple(decision for decision in adapt.frozen if decision.concerns(axis, op, place))
        if adapt.frozen and not mine:
            _log.warning("%s.%s: no decision of the file to repeat is about it", axis, op)
        self._adapt = dataclasses.replace(adapt, frozen=mine)
        self._codec, self._asked, self._axis, self._op, self._place = codecs[0], asked, axis, op, place
        self._gather, self._clock = gather, clock
        self._names: set[str] = set()  # names of the adapted messages
        self._seconds: deque[float] = deque(maxlen=_LATELY)
        self._start_over()
        if adapt.freeze is not None and writes:
            files.add_source(adapt.freeze, self.written)

    def _start_over(self) -> None:
        """Forget all figures and decisions."""
        self._controller = make_controller(self._adapt, self._codec)
        self._step, self._began = -1, 0.0
        self._seconds.clear()
        self._measuring = False
        self._figures: Array | None = None  # this rank's, if asked for before they are gathered
        self._due = 0  # step from which on pending figures decide
        self._wait: Callable[[], Array] | None = None
        self._told = 0  # decisions that are no news

    def history(self) -> list[Decision]:
        """Return the decisions up to now, in the order of their steps."""
        return list(self._controller.history)

    def written(self) -> list[Decision]:
        """Return the decisions up to now as a file has them, which says what they are about."""
        return [
            decision._replace(axis=self._axis, op=self._op, place=self._place) for decision in self.history()
        ]

    def news(self) -> list[Decision]:
        """Return the decisions made since the last call; loaded ones are no news."""
        told, self._told = self._told, len(self._controller.history)
        return self._controller.history[told:]

    # -- asked ---------------------------------------------------------------------------------------

    def choose(self, message: Message) -> Choice:
        """Choose as the policy does, with the decided codec in place of the rule's."""
        choice = self._asked.choose(message)
        if message.axis != self._axis or message.op != self._op or choice.codec != self._codec:
            return choice
        name = message.name or ""
        self._names.add(name)
        codec, why = self._controller.current(name)
        refused = codec.can_carry(message.dtype, message.dims)
        if refused is not None:  # a file may name any codec
            return dataclasses.replace(choice, reason=refused)
        # A threshold takes any number of values: they are counted together.
        label = self._codec.spec if codec.name == self._codec.name == "threshold" else None
        return dataclasses.replace(choice, codec=codec, reason=why, label=label)

    def same_as_step(self, step: int) -> int:
        """Return the first step that has the answers of ``step``, as long as :attr:`version` stays."""
        return self._asked.same_as_step(step)

    # -- steps ---------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Begin a step of training, unless it has begun: before its first message of this axis and operation."""
        if step <= self._step:
            return
        now = self._clock()
        if step == self._step + 1 and self._began:
            self._seconds.append(now - self._began)
        self._step, self._began = step, now
        if self._wait is not None and step >= self._due:
            self._decide(self._wait(), step)
        elif isinstance(self._controller, FrozenController):
            self._decide(np.empty((0, 0)), step)
        if self._measuring:
            self._wait, self._due = self._gather(self._measured()), step + 1
        self._measuring = self._wait is None and self._controller.measures(step)

    def _decide(self, everyone: Array, step: int) -> None:
        self._wait = None
        known = len(self._controller.history)
        if self._controller.decide(everyone, step):
            self.version += 1
            self._seconds.clear()
            for decision in self._controller.history[known:]:
                about = self._axis, self._op, step, decision.codec, decision.why
                _log.info("%s.%s from step %d on: %s (%s)", *about)

    @property
    def measuring(self) -> bool:
        """Tell whether this step's messages are to be observed."""
        return self._measuring

    def sample(self, n: int) -> slice:
        """Return the slice of a tensor of ``n`` elements that :meth:`observe` is to see."""
        wanted = max(self._controller.least_sample, n // _LEAST_SHARE)
        # An odd stride: rows have an even number of elements, and all of their columns are to be seen.
        return slice(0, n, max(1, n // wanted) | 1)

    def observe(self, name: str, values: npt.NDArray[Any], n: int) -> None:
        """Take notice of a message's values in this step, before it is sent, if it is an adapted one.

        Args:
            name: name of the tensor.
            values: [m], the tensor's elements of :meth:`sample`, with the residual of error feedback added.
            n: number of the tensor's elements.
        """
        if name in self._names and values.size:
            wide = values.astype(np.float64)
            # The tensor is shown whatever its values: they may be finite on one rank and not on another.
            self._controller.add(name, wide if np.isfinite(wide).all() else wide[:0], values.size / n)

    # -- saved ---------------------------------------------------------------------------------------

    def memory(self) -> Arrays:
        """Return the arrays to save; waits for figures that are under way. Call it between steps."""
        found: Arrays = {}
        if self._measuring:  # before the controller's state, which says what the figures are of
            self._figures = found[_FIGURES] = self._measured()
        saved = {
            "history": self._controller.history,
            "controller": self._controller.state(),
            "step": self._step,
            "measuring": self._measuring,
            "due": self._due,
        }
        found[_STATE] = np.frombuffer(json.dumps(saved).encode(), np.uint8).copy()
        if self._wait is not None:
            everyone = self._wait()
            self._wait = lambda: everyone
            found[_PENDING] = everyone
        return found

    def load_memory(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Go on from the arrays that :meth:`memory` returned; from nothing where there are none.

        Raises:
            ValueError: the arrays are of another kind.
        """
        self._start_over()
        self.version += 1
        if not arrays:
            return
        try:
            saved = json.loads(arrays[_STATE].tobytes())
            self._controller.load(saved["controller"])
            self._controller.history[:] = [Decision(*one) for one in saved["history"]]
            self._step, self._due = int(saved["step"]), int(saved["due"])
            self._measuring = bool(saved["measuring"])
            self._told = len(self._controller.history)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ValueError(
                f"the saved decisions of {self._axis}.{self._op} cannot be those of its adapt: {error!r}"
            ) from error
        self._figures = arrays.get(_FIGURES)
        everyone = arrays.get(_PENDING)
        self._wait = None if everyone is None else lambda: everyone

    def _measured(self) -> Array:
        """Return this rank's figures of the measured step that has ended."""
        found, self._figures = self._figures, None
        if found is not None:
            return found
        return self._controller.figures(median(self._seconds) if self._seconds else float("nan"))


def make_controller(adapt: Adapt, codec: Codec) -> Controller:
    """Make the controller of a rule's ``adapt``, which decides between variants of ``codec``."""
    if adapt.kind == GRAVAC:
        return GravacController(codec, adapt.options)
    if adapt.kind == DCT:
        return DctController(codec, adapt.options)
    if adapt.kind == SIDCO:
        return SidcoController(codec, adapt.options)
    assert adapt.kind == FROZEN
    return FrozenController(codec, adapt.frozen)

"""Hold the decisions of one communicator: for each kind of message the codecs to choose from, and the one in use."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hybridcomp.codecs import Codec
from hybridcomp.perfmodel import Profile
from hybridcomp.policy.auto.candidates import EF, NONE, candidates
from hybridcomp.policy.auto.cost import Place, estimate, refined, slowed, whole_bytes
from hybridcomp.policy.auto.signature import FrozenChoice, Signature
from hybridcomp.policy.auto.spec import Auto
from hybridcomp.policy.message import Choice, Message

_REFINED = 2  # candidates that the model predicts beside none: each takes it a fifth of a millisecond
TRIED = 4  # options of a kind of message, at most
_NEAR = 1.6  # slower options than this factor on the fastest prediction are not tried
# The codec none is tried even so, below so many times the fastest or so many seconds: it needs no trust in a profile.
_NONE_NEAR, _NONE_SECONDS = 4.0, 5e-3
_AS_FAST = 1.01  # options within this factor are equally fast, and none, else the first of them, is taken
_TELLING_WIRE = 0.3  # share of a message's estimated seconds: with less on the link it does not tell of it
_LEAST_WIRE = 0.02  # share of a link's seconds: the link is not believed to be faster than that at once
_log = logging.getLogger("hybridcomp.auto")
Array = npt.NDArray[np.float64]


class FixedRules(Protocol):
    """Policy that a decider belongs to."""

    @property
    def written(self) -> Mapping[str, Any]:
        """Return what the policy's file has but for its section ``[auto]``."""

    @property
    def auto(self) -> Auto | None:
        """Return the settings of ``auto``."""

    def choose(self, message: Message) -> Choice:
        """Choose by the rules of the policy alone."""

    def settles(self, message: Message) -> Choice | None:
        """Return the choice where the policy's rules leave none to ``auto``."""

    def same_as_step(self, step: int) -> int:
        """Return the first step that has the answers of ``step``."""


@dataclass(slots=True)
class Option:
    """Codec that a kind of message may take.

    Attributes:
        codec, feedback: codec and form of error feedback.
        predicted: predicted seconds of one message.
        measured: seconds for each byte on the slowest rank; None where it was not tried.
    """

    codec: Codec
    feedback: str | None
    predicted: float
    measured: float | None = None


@dataclass(slots=True)
class Decision:
    """Decision on one kind of message.

    Attributes:
        signature: signature of the messages.
        fidelity: class of fidelity.
        example: first of the messages, whose shape the candidates were asked about.
        options: options to choose from, the fastest predicted first.
        choice: choice in use.
        tried: whether the options were measured, or there is only one.
        open: whether the class allows more than one codec, even if no more than one is an option now.
    """

    signature: Signature
    fidelity: str
    example: Message
    options: list[Option]
    choice: Choice = field(init=False)
    tried: bool = False
    open: bool = False

    def use(self, option: Option, reason: str) -> None:
        """Take an option from now on."""
        self.choice = Choice(option.codec, option.feedback, reason)


class Decider:
    """Decisions of one communicator, alike on all ranks, which ask about the same messages in the same order.

    Args:
        rules: policy.
        profile: rank 0's profile.
        place: hosts and engine of the ranks.

    Attributes:
        profile: profile with the speed of links as this job has found it.
        version: number that grows whenever answers may have changed.
    """

    def __init__(self, rules: FixedRules, profile: Profile, place: Place) -> None:
        assert rules.auto is not None
        self._rules, self._auto = rules, rules.auto
        self.profile, self.place = profile, place
        self.version = 0
        self._decisions: dict[Signature, Decision] = {}
        # Axis, operation and name of messages whose error feedback may hold something.
        self._owing: set[tuple[str, str, str]] = set()
        self._link = ""

    # -- asked ---------------------------------------------------------------------------------------

    def same_as_step(self, step: int) -> int:
        """Return the first step that has the answers of ``step``, to be a key of caches."""
        return self._rules.same_as_step(step)

    def choose(self, message: Message) -> Choice:
        """Choose the codec of a message by the decision on its kind of messages."""
        settled = self._rules.settles(message)
        if settled is not None:
            return settled
        fidelity = self._auto.fidelity(message.axis, message.op)
        signature = Signature.of(message)
        decision = self._decisions.get(signature)
        if decision is None:
            decision = self._decisions[signature] = self._decide(signature, fidelity, message)
        choice = decision.choice
        if message.kept_by is None:
            return choice
        key = (message.axis, message.op, message.kept_by)
        if choice.feedback is not None:
            if choice.codec.can_carry(message.dtype, message.dims) is not None:  # the example could be
                return Choice(NONE, None, choice.reason)
            self._owing.add(key)
        elif key in self._owing and choice.codec.lossless:  # lossy codecs leave a residual again
            self._owing.discard(key)
            return Choice(choice.codec, EF, "auto: with what error feedback still owes", once=True)
        return choice

    def _decide(self, signature: Signature, fidelity: str, message: Message) -> Decision:
        found = candidates(fidelity, message, self._auto.also)
        decision = Decision(signature, fidelity, message, [], open=len(found) > 1)
        self._predict(decision)
        return decision

    def _predict(self, decision: Decision, *, before: Codec | None = None) -> None:
        """Choose by the profile's predictions; keep the choice before among the options."""
        signature = decision.signature
        found = candidates(decision.fidelity, decision.example, self._auto.also)
        rest = sorted(found[1:], key=lambda c: self._estimate(signature, c[0]))
        rest = [c for number, c in enumerate(rest) if number < _REFINED or c[0] == before]
        options = [
            Option(codec, feedback, refined(self.profile, self.place, signature, codec))
            for codec, feedback in [found[0], *rest]
        ]
        none = options[0].predicted
        options.sort(key=lambda option: option.predicted)
        limit = options[0].predicted * _NEAR
        near_none = none < _NONE_SECONDS or none < options[0].predicted * _NONE_NEAR
        decision.options = [
            option
            for option in options
            if option.predicted <= limit or option.codec == before or (option.codec is NONE and near_none)
        ][:TRIED]
        best = decision.options[0]
        decision.tried = len(decision.options) == 1
        what = f"{_size_label(signature.nbytes)} in {_time_label(best.predicted)}"
        beside = "" if best.codec is NONE else f", none {_time_label(none)}"
        decision.use(best, f"auto: {decision.fidelity}, {what}{beside} predicted{self._link}")
        self._say(decision)

    def _estimate(self, signature: Signature, codec: Codec) -> float:
        return estimate(self.profile, self.place, signature, codec).seconds

    def _say(self, decision: Decision) -> None:
        signature, choice = decision.signature, decision.choice
        _log.info("%s.%s: %s: %s", signature.axis, signature.op, choice.codec.spec, choice.reason)

    # -- measured ------------------------------------------------------------------------------------

    def watched(self) -> list[Decision]:
        """Return the decisions on operations of all ranks that may change, in the order in which they were made."""
        return [d for d in self._decisions.values() if d.open and d.signature.op != "send"]

    def untried(self) -> list[Decision]:
        """Return the watched decisions with options that were not measured yet."""
        return [d for d in self.watched() if not d.tried]

    def try_option(self, decisions: Sequence[Decision], index: int) -> None:
        """Have decisions take their option of this number, or their first where they have fewer."""
        for decision in decisions:
            options = decision.options
            option = options[index] if index < len(options) else options[0]
            number = options.index(option) + 1
            size = _size_label(decision.signature.nbytes)
            decision.use(option, f"auto: tries {number} of {len(options)} at {size}")
        self.version += 1

    def settle(self, decisions: Sequence[Decision], seconds: Array, operation: int) -> None:
        """Take the fastest option of each decision.

        Args:
            decisions: decisions that were tried.
            seconds: seconds for each byte, of each decision and option (``TRIED`` of them); not finite where not known.
            operation: number of the operation at which this is decided, for the reason.
        """
        for decision, row in zip(decisions, seconds.reshape(len(decisions), -1), strict=True):
            decision.tried = True
            options = decision.options
            known = [(s, o) for s, o in zip(row.tolist(), options, strict=False) if np.isfinite(s)]
            size = _size_label(decision.signature.nbytes)
            whole = whole_bytes(decision.signature, self.place.ranks)
            if len(known) < len(options):  # too few of them: the prediction stands
                best = options[0]
                how = f"{_time_label(best.predicted)} predicted"
            else:
                for taken, option in known:
                    option.measured = taken
                limit = min(taken for taken, _ in known) * _AS_FAST
                near = [option for taken, option in known if taken <= limit]
                best = next((o for o in near if o.codec is NONE), near[0])
                assert best.measured is not None
                others = [f", {o.codec.name} {_time_label(t * whole)}" for t, o in known if o is not best]
                how = (
                    f"{_time_label(best.measured * whole)}{''.join(others)} measured by operation {operation}"
                )
            decision.use(best, f"auto: {decision.fidelity}, {size} in {how}{self._link}")
            self._say(decision)
        self.version += 1

    def predicted(self, decisions: Sequence[Decision]) -> Array:
        """Return the predicted seconds for each byte of decisions."""
        return np.array(
            [
                next(o.predicted for o in d.options if o.codec == d.choice.codec)
                / max(1, whole_bytes(d.signature, self.place.ranks))
                for d in decisions
            ]
        )

    def link_changed(self, seconds: Array, before: Array, nbytes: Array, operation: int) -> bool:
        """Estimate how fast the link has become, and decide anew by that; return whether any choice is another one.

        Args:
            seconds: seconds for each byte, of each of :meth:`watched`, now; NaN where there was none.
            before: seconds for each byte when they were decided.
            nbytes: bytes that each has carried.
            operation: number of the operation at which this is decided, for the reason.
        """
        wire_before = wire_now = 0.0
        for decision, now, then, weight in zip(self.watched(), seconds, before, nbytes, strict=False):
            if not np.isfinite(now * then):
                continue
            parts = estimate(self.profile, self.place, decision.signature, decision.choice.codec)
            wire = parts.wire / max(parts.seconds, parts.wire)
            if wire < _TELLING_WIRE:
                continue
            wire_before += weight * then * wire
            wire_now += weight * max(now - then * (1 - wire), then * _LEAST_WIRE)
        if not wire_now or not wire_before:
            return False
        speedup = wire_before / wire_now
        self.profile = slowed(self.profile, self.place, speedup)
        self._link = f"; link {speedup:.2g} times as fast from operation {operation} on"
        chosen = [d.choice.codec for d in self._decisions.values()]
        for decision in self._decisions.values():
            self._predict(decision, before=decision.choice.codec)
        self.version += 1
        return chosen != [d.choice.codec for d in self._decisions.values()]

    # -- written -------------------------------------------------------------------------------------

    @property
    def written(self) -> Mapping[str, Any]:
        """Return what the policy's file has beside the choices that are made here."""
        return self._rules.written

    def choices(self) -> list[FrozenChoice]:
        """Return all decisions as frozen choices."""
        return [
            FrozenChoice(signature, d.choice.codec.spec, d.choice.feedback, d.choice.reason)
            for signature, d in self._decisions.items()
        ]


def _size_label(nbytes: float) -> str:
    """Return bytes in a unit that suits them: ``1.25 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} GiB"


def _time_label(seconds: float) -> str:
    """Return seconds in a unit that suits them: ``3.81 ms``."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"

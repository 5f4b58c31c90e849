"""Define policies as nested rules: for the whole, an axis, an operation or phase of that axis; the innermost wins.

A message of which an axis names both the operation and the phase goes by the operation's rule.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from hybridcomp.codecs import FORMS, Codec, get_codec, parse_form
from hybridcomp.codecs.registry import FIRST, packages_of, parse_spec
from hybridcomp.errors import PolicyError
from hybridcomp.policy.adapt.spec import FROZEN, Adapt
from hybridcomp.policy.auto.candidates import LEAST_BYTES, NONE, every, senders
from hybridcomp.policy.auto.signature import Signature, nearest
from hybridcomp.policy.auto.spec import Auto, axes_of
from hybridcomp.policy.message import ROOTED, Choice, Message
from hybridcomp.schedules.registry import SELECTABLE, is_own, lookup
from hybridcomp.schedules.registry import package_of as algorithm_package

_SAYSNONE = "the policy says none"


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule of one level of a policy; None leaves a setting to the level around it.

    ``min_bytes`` and ``exclude`` stand by themselves, and all others belong to ``codecs``: a level that names a codec
    does not take the feedback of the level around it.

    Attributes:
        codecs: tried in order; the first that can carry the message is used.
        feedback: spec of the form of error feedback for messages that have a name, and sends that have a link.
        warmup_steps: steps sent uncompressed at first.
        only: the part of a pipeline's step that is compressed; None is all of it.
        stages: number of the pipeline's first stages that are compressed; None is all.
        from_layer: first layer that is compressed; messages of earlier ones are sent uncompressed.
        between_hosts: whether messages among ranks of one host are sent uncompressed: memory is faster than codecs.
        min_bytes: smaller messages are sent uncompressed.
        exclude: ``fnmatch`` patterns of message names that are sent uncompressed.
        algorithm: algorithm of compressed operations, wherever it can be used; None to choose.
        steps: codecs from a step of training on, ascending; before the first, ``codecs`` are tried.
        adapt: adaptation of the first codec as training goes on (:mod:`hybridcomp.policy.adapt`).
    """

    codecs: tuple[Codec, ...] | None = None
    feedback: str | None = None
    warmup_steps: int = 0
    min_bytes: int | None = None
    exclude: tuple[str, ...] | None = None
    only: str | None = None
    stages: int | None = None
    from_layer: int = 0
    between_hosts: bool = False
    algorithm: str | None = None
    steps: tuple[tuple[int, tuple[Codec, ...]], ...] = ()
    adapt: Adapt | None = None

    def inside(self, outer: Rule) -> Rule:
        """Return this rule with the settings that it leaves open taken from ``outer``."""
        source = outer if self.codecs is None else self
        return Rule(  # dataclasses.replace takes several times as long
            codecs=source.codecs,
            feedback=source.feedback,
            warmup_steps=source.warmup_steps,
            min_bytes=outer.min_bytes if self.min_bytes is None else self.min_bytes,
            exclude=outer.exclude if self.exclude is None else self.exclude,
            only=source.only,
            stages=source.stages,
            from_layer=source.from_layer,
            between_hosts=source.between_hosts,
            algorithm=source.algorithm,
            steps=source.steps,
            adapt=source.adapt,
        )

    def codecs_at(self, step: int | None) -> tuple[Codec, ...]:
        """Return the codecs that are tried in a step; where the step is not known, those of the last steps."""
        past = [codecs for first, codecs in self.steps if step is None or first <= step]
        return past[-1] if past else self.codecs or ()

    @property
    def every_codec(self) -> tuple[Codec, ...]:
        """Return the codecs of all steps."""
        return (*(self.codecs or ()), *(codec for _, codecs in self.steps for codec in codecs))

    @property
    def changes(self) -> tuple[int, ...]:
        """Return the steps at which its answers change."""
        return (self.warmup_steps, *(first for first, _ in self.steps))

    @property
    def places(self) -> bool:
        """Tell whether the rule asks where in the model a message belongs."""
        return self.only is not None or self.stages is not None or self.from_layer > 0

    def spares(self, message: Message) -> str | None:
        """Return the reason why a message's place leaves it uncompressed, None where there is none.

        Unknown places are compressed.
        """
        if self.only is not None and message.part not in (None, self.only):
            return f"not in the {self.only}"
        if self.stages is not None and message.stage is not None and message.stage >= self.stages:
            return f"stage {message.stage} is not among the first {self.stages}"
        if message.layer is not None and message.layer < self.from_layer:
            return f"layer {message.layer} is before from_layer {self.from_layer}"
        if self.between_hosts and message.hosts == 1:
            return "all ranks are on one host"
        return None


@dataclass(frozen=True)
class Policy:
    """A policy: immutable; equal policies have equal :attr:`digest`.

    Attributes:
        name: the preset's name, the file's path, or the codec spec.
        base: the rule around all axes.
        axes: rule of each axis.
        entries: rules by operation (``all_reduce``) or phase (``backward``), for each axis; the operation's goes first.
        everything: also compress operations from or to one rank, which otherwise need an entry of their own (they
            carry parameters, state and results that must arrive exactly).
        fused: whether the gradient of an embedding that two stages share is summed over replicas and stages at once.
        auto: settings of ``auto`` for axes without a section (:mod:`hybridcomp.policy.auto`); None for nothing.
        default: whether it is a default: ranks whose defaults differ take rank 0's.
        lines: line of each axis's section in the file, for messages; empty for presets.
        written: what the file has but for its section ``[auto]``; empty for what is no file.
    """

    name: str
    base: Rule
    axes: Mapping[str, Rule] = field(default_factory=dict)
    entries: Mapping[str, Mapping[str, Rule]] = field(default_factory=dict)
    everything: bool = False
    fused: bool = False
    auto: Auto | None = None
    default: bool = field(default=False, compare=False)
    lines: Mapping[str, int] = field(default_factory=dict, compare=False)
    written: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def choose(self, message: Message) -> Choice:
        """Choose the codec for a message, and say why.

        Messages that the rules leave to ``auto`` go uncompressed here: a communicator's decider chooses for them.
        """
        return self.settles(message) or Choice(NONE, None, "auto decides once the link is known")

    def settles(self, message: Message) -> Choice | None:
        """Choose as :meth:`choose`; return None for a message that is left to ``auto``."""
        if not self._automatic(message.axis):
            return self._by_rule(message)
        assert self.auto is not None
        if message.op in ROOTED:
            return Choice(NONE, None, _exact_unless_named(message.op))
        if not message.dtype.is_float:
            return Choice(NONE, None, f"auto: {message.dtype.label} is no float")
        if message.nbytes < max(LEAST_BYTES, self.base.min_bytes or 0):
            return Choice(NONE, None, f"auto: below {max(LEAST_BYTES, self.base.min_bytes or 0)} bytes")
        excluded = _excluded(self.base, message)
        if excluded is not None or not self.auto.frozen:
            return excluded
        found = nearest(self.auto.frozen, Signature.of(message))
        if found is None:
            return Choice(NONE, None, f"policy {self.name} has no choice for {message.op} of {message.axis}")
        codec = get_codec(found.codec)
        refused = codec.can_carry(message.dtype, message.dims)
        feedback = found.feedback if message.kept_by is not None else None
        return Choice(NONE, None, refused) if refused else Choice(codec, feedback, f"frozen: {found.reason}")

    def _automatic(self, axis: str) -> bool:
        """Tell whether messages of an axis are left to ``auto``."""
        return self.auto is not None and axis not in self.axes

    @property
    def decides(self) -> bool:
        """Tell whether a communicator's decider chooses for some messages."""
        return self.auto is not None and not self.auto.frozen

    def _by_rule(self, message: Message) -> Choice:
        rule, named = self._rule(message.axis, message.op, message.phase)
        if rule.codecs is None:
            return Choice(NONE, None, self._unnamed(message))
        if message.op in ROOTED and not (named or self.everything):
            return Choice(NONE, None, _exact_unless_named(message.op))
        codecs = rule.codecs_at(message.step)
        if not any(c.name != "none" for c in codecs):
            return Choice(NONE, None, _SAYSNONE)
        if message.nbytes < (rule.min_bytes or 0):
            return Choice(NONE, None, f"below min_bytes ({rule.min_bytes})")
        excluded = _excluded(rule, message)
        if excluded is not None:
            return excluded
        if message.step is not None and message.step < rule.warmup_steps:
            return Choice(NONE, None, f"warm-up ({rule.warmup_steps} steps)")
        spared = rule.spares(message)
        if spared is not None:
            return Choice(NONE, None, spared)
        shape = message.dims
        reason = ""
        for codec in codecs:
            reason = codec.can_carry(message.dtype, shape) or ""
            if not reason and codec.partial and rule.feedback is not None and _keeps_nothing(message):
                reason = f"{codec.name} relies on error feedback, which keeps nothing of this message"
            if not reason:
                feedback = rule.feedback if codec.name != "none" and message.remembers else None
                least = rule.min_bytes or 0
                return Choice(
                    codec, feedback, f"policy {self.name}", algorithm=rule.algorithm, min_bytes=least
                )
        return Choice(NONE, None, reason)

    def _unnamed(self, message: Message) -> str:
        """Return the reason why no codec is named for a message to which no rule applies."""
        if not self.compresses:
            return _SAYSNONE
        sections = list(dict.fromkeys([*self.axes, *self.entries]))
        if message.axis in sections:
            return f"policy {self.name} names no codec for {message.op} of axis {message.axis}"
        return f"policy {self.name} has sections {', '.join(sections)}; this group's axis is {message.axis}"

    def _rule(self, axis: str, op: str, phase: str | None) -> tuple[Rule, bool]:
        rule = self.axes.get(axis, Rule()).inside(self.base)
        entries = self.entries.get(axis, {})
        for key in (op, phase or ""):
            if key in entries:
                return entries[key].inside(rule), key == op
        return rule, False

    def codecs(self, axis: str, op: str) -> tuple[Codec, ...]:
        """Return every codec that may carry some message of an axis and operation; empty if none is compressed."""
        if self._automatic(axis):
            return self._automatic_codecs(axis, op)
        phases = (None, "forward", "backward")
        found = {c for phase in phases for c in self._rule(axis, op, phase)[0].every_codec}
        return tuple(sorted((c for c in found if c.name != "none"), key=lambda c: c.spec))

    def _automatic_codecs(self, axis: str, op: str) -> tuple[Codec, ...]:
        assert self.auto is not None
        if op in ROOTED:
            return ()
        every_codec = senders if op == "send" else every
        return every_codec(self.auto.fidelity(axis, op), self.auto.also)

    def least_bytes(self, axis: str, op: str) -> int | None:
        """Return the size below which no message of an axis and operation is compressed; None if none is at all."""
        if self._automatic(axis):
            return max(LEAST_BYTES, self.base.min_bytes or 0) if self.codecs(axis, op) else None
        rules = [self._rule(axis, op, phase)[0] for phase in (None, "forward", "backward")]
        return min(
            (r.min_bytes or 0 for r in rules if any(c.name != "none" for c in r.every_codec)), default=None
        )

    @property
    def compresses(self) -> bool:
        """Tell whether any rule names a codec other than ``none``, or ``auto`` may take one."""
        return self.auto is not None or any(c.name != "none" for r in self._rules for c in r.every_codec)

    @property
    def places(self) -> bool:
        """Tell whether any rule asks where in the model a message belongs."""
        return any(rule.places for rule in self._rules)

    @property
    def adapts(self) -> bool:
        """Tell whether any rule decides about its codec as training goes on, by what it measures."""
        return any(rule.adapt is not None and rule.adapt.kind != FROZEN for rule in self._rules)

    def adapting(self, axis: str, op: str) -> Rule | None:
        """Return the rule of an axis and operation that decides about its codec as training goes on, if it does."""
        rule, _ = self._rule(axis, op, "backward")
        return rule if rule.adapt is not None else None

    @functools.cached_property
    def changes(self) -> tuple[int, ...]:
        """Return the steps at which answers may change, ascending, the first one too."""
        return tuple(sorted({0, *(step for rule in self._rules for step in rule.changes)}))

    @property
    def last_change(self) -> int:
        """Return the step from which on answers no longer change."""
        return self.changes[-1]

    def same_as_step(self, step: int) -> int:
        """Return a step that has the answers of ``step``, to be a key of caches."""
        return self.changes[max(0, bisect.bisect_right(self.changes, step) - 1)]

    @property
    def _rules(self) -> list[Rule]:
        return [self.base, *self.axes.values(), *(r for e in self.entries.values() for r in e.values())]

    def require_axes(self, axes: Iterable[str]) -> None:
        """Check that a policy read from a file speaks only of axes that exist.

        Raises:
            PolicyError: an axis does not exist; names the file, the line and the section.
        """
        known = tuple(axes)
        for axis in () if self.auto is None else axes_of(self.auto.classes):
            if axis not in known:
                raise PolicyError(
                    f"{self.name}: there is a class for axis {axis}, which the mesh does not have; "
                    f"it has {', '.join(known)}"
                )
        for axis, line in self.lines.items():
            if axis not in known:
                raise PolicyError(
                    f"{self.name}:{line}: section [{axis}] is for an axis that the mesh does not have; "
                    f"it has {', '.join(known)}"
                )

    @functools.cached_property
    def digest(self) -> str:
        """Return the SHA-256 of the policy's rules, in hex: equal on two ranks exactly when they decide alike."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()

    def canonical(self) -> str:
        """Return the rules as text, in a fixed order; the name and the file's layout do not matter."""
        lines = [_canonical("*", self.base), f"everything={self.everything}", *["fused"] * self.fused]
        lines += [f"package {package}" for package in self.packages]
        lines += [] if self.auto is None else [self.auto.canonical()]
        lines += [_canonical(a, r) for a, r in sorted(self.axes.items())]
        lines += [
            _canonical(f"{axis}.{key}", rule)
            for axis, entries in sorted(self.entries.items())
            for key, rule in sorted(entries.items())
        ]
        return "\n".join(lines)

    @functools.cached_property
    def packages(self) -> tuple[str, ...]:
        """Return the packages, with versions, other than hybridcomp, that the rules' codecs and algorithms are of.

        Ranks whose packages differ may write other bytes by the same rules: these are part of :attr:`digest`.
        """
        codecs = {codec for rule in self._rules for codec in rule.every_codec}
        if self.auto is not None:
            codecs |= {*self.auto.also, *(get_codec(choice.codec) for choice in self.auto.frozen)}
        found = {package for codec in codecs for package in packages_of(codec)}
        for name in {rule.algorithm for rule in self._rules if rule.algorithm is not None}:
            algorithms = (lookup(op, name) for op in SELECTABLE)
            found |= {algorithm_package(one) for one in algorithms if one is not None and not is_own(one)}
        return tuple(sorted(found))

    def __hash__(self) -> int:
        return hash(self.digest)


def _keeps_nothing(message: Message) -> bool:
    """Tell whether error feedback keeps no residual of a reduction."""
    return message.kept_by is None and message.op in ("all_reduce", "reduce_scatter")


def _excluded(rule: Rule, message: Message) -> Choice | None:
    if message.name is not None:
        for pattern in rule.exclude or ():
            if fnmatchcase(message.name, pattern):
                return Choice(NONE, None, f"excluded by {pattern!r}")
    return None


def _exact_unless_named(op: str) -> str:
    return f"{ROOTED[op]} are exact unless named"


_SENT = ("ef", "loco")  # forms whose messages stand for the given values


def check_feedback(op: str, codec: Codec, feedback: str | None) -> None:
    """Check that an operation (or phase) can give a codec this form of error feedback.

    ``ef21`` needs every rank to see the result, and ``dgc`` and ``ef-sgdm`` send their accumulated sums, not the given
    values; a linear codec's own algorithm keeps plain residuals.

    Raises:
        PolicyError: it cannot; names the operation or the codec, and what is allowed.
    """
    if feedback is None:
        return
    name = parse_form(feedback).name
    if codec.linear and name not in ("ef", "ef-sgdm"):
        raise PolicyError(f"feedback of {codec.name} must be ef or ef-sgdm, not {feedback!r}: it is linear")
    if op == "reduce_scatter" and name == "ef21":
        allowed = ", ".join(form for form in FORMS if form != name)
        raise PolicyError(
            f"feedback of reduce_scatter must be one of {allowed}, not {feedback!r}: a rank does not see the result "
            "of what it sends, so senders and receivers could not tell together that a step overflowed"
        )
    if op == "send" and name not in _SENT:
        raise PolicyError(
            f"feedback of send must be one of {', '.join(_SENT)}, not {feedback!r}: a receiver takes every message for "
            "what it was made of"
        )


def check_bound(spec: str, codec: Codec) -> None:
    """Check that a policy's spec gives the bound of a codec that has one, also of the codec of its values.

    Raises:
        PolicyError: it does not; names the codec, and what is allowed.
    """
    _, given = parse_spec(spec)
    if codec.bounds and not {*codec.bounds, FIRST} & set(given):
        allowed = " or ".join(f"{name}= ({what})" for name, what in codec.bounds.items())
        raise PolicyError(f"{codec.name} needs a bound on its error: give {allowed}")
    if "values" in given:
        values = str(given["values"])
        check_bound(values, get_codec(values))


def _canonical(key: str, rule: Rule) -> str:
    codecs = "-" if rule.codecs is None else ",".join(c.spec for c in rule.codecs)
    text = f"{key}: {codecs} {rule.feedback} {rule.warmup_steps} {rule.min_bytes} {rule.exclude}"
    if rule.places:
        text = f"{text} {rule.only} {rule.stages} {rule.from_layer}"
    if rule.algorithm is not None:
        text = f"{text} by {rule.algorithm}"
    for first, codecs_then in rule.steps:
        text = f"{text} from {first} {','.join(c.spec for c in codecs_then)}"
    if rule.adapt is not None:
        text = f"{text} adapt {rule.adapt.canonical()}"
    return f"{text} between hosts" if rule.between_hosts else text

"""Parse a rule's ``adapt``: ``"gravac:eps=0.75"``, ``"dct:density=0.005"``, ``"sidco:every=5"``, ``"frozen:FILE"``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hybridcomp.codecs import Codec, checks, parse_form
from hybridcomp.codecs.registry import FIRST, parse_spec
from hybridcomp.files import shown
from hybridcomp.policy.adapt.decisions import Decision, read_decisions
from hybridcomp.policy.adapt.thresholds import DRIFT

GRAVAC, DCT, SIDCO, FROZEN = KINDS = ("gravac", "dct", "sidco", "frozen")
SCOPES = ("all", "tensor")
_DEFAULTS: dict[str, dict[str, Any]] = {
    GRAVAC: {
        "eps": 0.75,
        "omega": 0.05,
        "first": 0.1,
        "least": 1e-4,
        "factor": 0.5,
        "alpha": 0.3,
        "every": 10,
        "window": 30,
    },
    DCT: {"density": 0.005, "every": 1000, "check": 50, "drift": DRIFT, "scope": "all"},
    SIDCO: {"every": 5, "drift": 0.2, "scope": "tensor"},
}
_CODECS = {GRAVAC: ("topk", "sidco"), DCT: ("threshold",), SIDCO: ("sidco",)}
_WHOLE = ("every", "window", "check")
_MOST = 1 << 31
_MOST_FACTOR = 0.99  # each next ratio is that share of the last one, in six digits: it must be another one


@dataclass(frozen=True)
class Adapt:
    """Adaptation of a rule's codec; made by :func:`parse_adapt`.

    Attributes:
        kind: one of :data:`KINDS`.
        options: parameters by name, defaults included.
        frozen: decisions to repeat, by step; for ``frozen`` only.
        freeze: file that rank 0 writes the decisions to as the job ends; None for none.
    """

    kind: str
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    frozen: tuple[Decision, ...] = ()
    freeze: str | None = field(default=None, compare=False)

    def written_to(self, path: str | None) -> Adapt:
        """Return it with a file for the decisions, unless it repeats those of one."""
        return self if self.kind == FROZEN else dataclasses.replace(self, freeze=path)

    def canonical(self) -> str:
        """Return all settings that decide, as text in a fixed order."""
        given = ",".join(f"{key}={value}" for key, value in sorted(self.options.items()))
        return f"{self.kind} {given} {self.frozen!r}"


def parse_adapt(text: Any, codecs: tuple[Codec, ...], feedback: str | None) -> Adapt:
    """Parse an ``adapt``, and check that it fits the rule's codec.

    Args:
        text: ``KIND`` or ``KIND:NAME=VALUE,...``.
        codecs: codecs of the rule; the decisions are about the first one.
        feedback: form of error feedback of the rule; None for none.

    Raises:
        ValueError: the text is wrong; says what is allowed.
    """
    if not isinstance(text, str):
        raise ValueError(f"adapt must be a text such as 'gravac:eps=0.75', not {shown(text)}")
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise ValueError(f"adapt must be one of {', '.join(KINDS)}, not {kind!r}")
    if feedback is not None and parse_form(feedback).name != "ef":
        raise ValueError(f"adapt {kind} goes with feedback ef, or none, not {shown(feedback)}")
    if kind == FROZEN:
        return Adapt(kind, frozen=read_decisions(Path(rest)))
    if codecs[0].name not in _CODECS[kind]:
        allowed = " or ".join(_CODECS[kind])
        raise ValueError(f"adapt {kind} decides about codec {allowed}, not {codecs[0].name}")
    _, given = parse_spec(text)
    defaults = _DEFAULTS[kind]
    freeze = given.pop("freeze", None)
    for key in given:
        if key not in defaults:
            named = (
                f"no parameter {key!r}" if key != FIRST else f"no parameter without a name ({given[key]!r})"
            )
            raise ValueError(f"adapt {kind} has {named}; it takes {', '.join([*defaults, 'freeze'])}")
    options = {key: _checked(key, given.get(key, value)) for key, value in defaults.items()}
    if kind == GRAVAC and options["least"] > options["first"]:
        raise ValueError(f"least must be at most first ({options['first']}), not {options['least']}")
    return Adapt(kind, MappingProxyType(options), freeze=None if freeze is None else str(freeze))


def _checked(key: str, value: Any) -> Any:
    if key == "scope":
        return checks.choice(key, value, SCOPES)
    if key in _WHOLE:
        return checks.integer(key, value, 1, _MOST)
    return checks.number(key, value, most=_MOST_FACTOR if key == "factor" else 1)

"""Names and parameters of the forms of error feedback: ``"ef"``, ``"ef21"``, ``"loco:beta=0.8"``, ``"dgc"``,
``"ef-sgdm"``."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridcomp.codecs import checks
from hybridcomp.codecs.registry import FIRST, parse_spec

_DEFAULTS: dict[str, dict[str, Any]] = {
    "ef": {},
    "ef21": {},
    "loco": {"beta": 0.8, "reset_steps": 1024},
    "dgc": {"momentum": 0.9},
    "ef-sgdm": {"momentum": 0.9},
}
FORMS = tuple(_DEFAULTS)
_MOST_STEPS = 2**31 - 1


@dataclass(frozen=True)
class Form:
    """A form with all its parameters; made by :func:`parse_form`.

    Attributes:
        name: one of :data:`FORMS`.
        options: its parameters by name, defaults included.
    """

    name: str
    options: Mapping[str, Any]

    @property
    def spec(self) -> str:
        """Return the spec string that makes it; parameters at their defaults are left out."""
        defaults = _DEFAULTS[self.name]
        given = [f"{k}={v}" for k, v in self.options.items() if v != defaults[k]]
        return ":".join([self.name, *given])


def parse_form(spec: str | Form, **options: Any) -> Form:
    """Make a form from a spec string, or from a name and keyword arguments.

    Args:
        spec: ``"loco:beta=0.9,reset_steps=512"``, ``"loco"``, or a form (returned as it is).
        options: parameters by name; they win over those in the string.

    Raises:
        ValueError: an unknown form or parameter, or a value out of its range.
    """
    if isinstance(spec, Form):
        return spec
    if not isinstance(spec, str):
        raise ValueError(f"form must be one of {', '.join(FORMS)}, not {spec!r}")
    return _parsed(spec) if not options else _parse(spec, options)


def _parse(spec: str, options: Mapping[str, Any]) -> Form:
    name, given = parse_spec(spec)
    if name not in _DEFAULTS:
        raise ValueError(f"unknown form of error feedback {name!r}; known: {', '.join(FORMS)}")
    defaults = _DEFAULTS[name]
    takes = f"it takes {', '.join(defaults)}" if defaults else "it takes none"
    if FIRST in given:  # given by its place
        value = given.pop(FIRST)
        if not defaults:
            raise ValueError(f"form {name!r} has no parameter, not even {value!r}; {takes}")
        given = {next(iter(defaults)): value, **given}
    merged = {**given, **options}
    for key in merged:
        if key not in defaults:
            raise ValueError(f"form {name!r} has no parameter {key!r}; {takes}")
    return Form(name, {key: _checked(key, merged.get(key, value)) for key, value in defaults.items()})


@functools.lru_cache(64)
def _parsed(spec: str) -> Form:
    return _parse(spec, {})


def _checked(key: str, value: Any) -> Any:
    if key == "reset_steps":
        return checks.integer(key, value, 1, _MOST_STEPS)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(f"{key} must be a number from 0 to below 1, not {value!r}")
    return float(value)

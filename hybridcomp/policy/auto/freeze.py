"""Write the decisions of ``auto`` as a policy that makes the same ones without measuring, and read such a section.

.. code-block:: toml

    min_bytes = 16384                      # limits and sections of the policy that decided, as they were
    exclude = ["*.bias", "*norm*"]
    [tp]
    forward = "int8:block=128"

    [auto]                                 # classes of fidelity, by axis, or by axis and operation
    class = "safe"                         # of all others
    dp = "aggressive"
    "dp.all_gather" = "exact"

    [[auto.choice]]                        # made already: with one, nothing else is decided
    axis = "dp"
    op = "all_reduce"
    dtype = "float32"
    bytes = 4194304
    named = true
    thin = 8                               # only of matrices: see Signature
    codec = "int4:block=128"
    feedback = "ef"
    reason = "..."
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from hybridcomp.arrays import as_dtype
from hybridcomp.codecs import get_codec, parse_form
from hybridcomp.errors import HybridcompError
from hybridcomp.files import shown
from hybridcomp.policy.at_exit import FilesAtExit
from hybridcomp.policy.auto.candidates import allowed
from hybridcomp.policy.auto.signature import FrozenChoice, Signature
from hybridcomp.policy.auto.spec import ALSO, CLASS, CLASSES, Auto, checked_also, checked_class
from hybridcomp.policy.message import OPS

_CHOICE = "choice"
_KINDS: dict[str, type] = {
    "axis": str,
    "op": str,
    "dtype": str,
    "bytes": int,
    "named": bool,
    "thin": int,
    "codec": str,
    "feedback": str,
    "reason": str,
}
_OPTIONAL = ("thin", "feedback", "reason")
_MOST_BYTES, _MOST_THIN = 1 << 62, 64


class Frozen(Protocol):
    """Source of choices that were made, for :class:`Freezer`."""

    @property
    def written(self) -> Mapping[str, Any]:
        """Return what the policy has beside its choices."""

    def choices(self) -> list[FrozenChoice]:
        """Return its choices."""


def to_toml(auto: Auto, written: Mapping[str, Any], choices: Sequence[FrozenChoice]) -> str:
    """Return choices as the text of a policy.

    Args:
        auto: classes of fidelity that they were made within.
        written: what else the policy's file had, as it was read.
        choices: the choices.
    """
    lines = ["# Choices of the policy auto, as they were at the end of a job."]
    lines += [
        f"{_value(key)} = {_value(value)}" for key, value in written.items() if not _is_section(key, value)
    ]
    for key, value in written.items():
        if _is_section(key, value):
            lines += ["", f"[{_value(key)}]", *(f"{_value(k)} = {_value(v)}" for k, v in value.items())]
    lines += [
        "",
        "[auto]",
        *[f"{CLASS} = {json.dumps(auto.of_all)}"] * (auto.of_all is not None),
        *(f"{json.dumps(key)} = {json.dumps(value)}" for key, value in auto.classes.items()),
        *[f"{ALSO} = {json.dumps([codec.spec for codec in auto.also])}"] * bool(auto.also),
    ]
    for (axis, op, dtype, nbytes, named, thin), codec, feedback, reason in choices:
        lines += ["", f"[[auto.{_CHOICE}]]"]
        pairs: dict[str, Any] = {"axis": axis, "op": op, "dtype": dtype, "bytes": nbytes, "named": named}
        pairs |= {"thin": thin} if thin else {}
        pairs |= {"codec": codec} | ({} if feedback is None else {"feedback": feedback}) | {"reason": reason}
        lines += [f"{key} = {json.dumps(value)}" for key, value in pairs.items()]
    return "\n".join(lines) + "\n"


def _is_section(key: str, value: Any) -> bool:
    return (
        isinstance(value, dict) and key != "steps"
    )  # which are codecs by step, of the rule around all sections


def _value(value: Any) -> str:
    """Return a value, or a key, as TOML: tables in one line."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_value(key)} = {_value(one)}' for key, one in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value, ensure_ascii=False)


def read_auto(table: dict[str, Any]) -> Auto:
    """Read the section ``[auto]`` of a policy.

    Raises:
        ValueError: the section is wrong; with the key.
    """
    classes: dict[str, str] = {}
    for key, value in table.items():
        if key in (_CHOICE, ALSO):
            continue
        if not isinstance(value, str):
            raise ValueError(f"a class must be one of {', '.join(CLASSES)}, not {shown(value)}", key)
        try:
            classes[key] = checked_class(key, value)
        except ValueError as error:
            raise ValueError(str(error), key) from None
    try:
        also = checked_also(table.get(ALSO, []))
    except ValueError as error:
        raise ValueError(str(error), ALSO) from error
    of_all = classes.pop(CLASS, None)
    auto = Auto(MappingProxyType(classes), of_all, also=also)
    given = table.get(_CHOICE, [])
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise ValueError(f"{_CHOICE} must be tables, [[auto.{_CHOICE}]]", _CHOICE)
    try:
        frozen = tuple(_choice(auto, number, one) for number, one in enumerate(given, 1))
    except ValueError as error:
        raise ValueError(str(error), _CHOICE) from error
    return dataclasses.replace(auto, frozen=frozen)


def _choice(auto: Auto, number: int, table: dict[str, Any]) -> FrozenChoice:
    what = f"choice {number}"
    for key in table:
        if key not in _KINDS:
            raise ValueError(f"{what} has an unknown key {key!r}; allowed: {', '.join(_KINDS)}")
    for key, kind in _KINDS.items():
        if key not in table:
            if key not in _OPTIONAL:
                raise ValueError(f"{what} has no {key}")
        elif type(table[key]) is not kind:
            raise ValueError(
                f"{what}: {key} must be of type {kind.__name__}, not {type(table[key]).__name__}"
            )
    op, nbytes, thin = table["op"], table["bytes"], table.get("thin", 0)
    if op not in OPS:
        raise ValueError(f"{what}: op must be one of {', '.join(OPS)}, not {shown(op)}")
    if not 0 <= nbytes <= _MOST_BYTES or not 0 <= thin <= _MOST_THIN:
        raise ValueError(f"{what}: bytes must be from 0 to 2**62, and thin from 0 to {_MOST_THIN}")
    feedback = table.get("feedback")
    try:
        dtype = as_dtype(table["dtype"]).label
        codec = get_codec(table["codec"])
        feedback = None if feedback is None else parse_form(feedback).spec
    except (ValueError, TypeError, HybridcompError) as error:
        raise ValueError(f"{what}: {error}") from error
    fidelity = auto.fidelity(table["axis"], op)
    if not allowed(fidelity, codec, feedback, auto.also):
        raise ValueError(
            f"{what}: {table['axis']}.{op} is {fidelity}, which {codec.spec}"
            f"{' without feedback' if feedback is None else ''} is not"
        )
    signature = Signature(table["axis"], op, dtype, nbytes, table["named"], thin)
    return FrozenChoice(signature, codec.spec, feedback, table.get("reason", ""))


class Freezer(FilesAtExit[tuple[Auto, Frozen]]):
    """Files that this process writes as it ends, each with the choices of its communicators."""

    def __init__(self) -> None:
        super().__init__("the choices", _text)

    def add(self, auto: Auto, decider: Frozen) -> None:
        """Have a decider's decisions written to the file that ``auto`` names.

        Raises:
            PolicyError: the file's folder does not exist.
        """
        assert auto.freeze is not None
        self.add_source(auto.freeze, (auto, decider))


def _text(sources: Sequence[tuple[Auto, Frozen]]) -> str:
    choices: dict[Signature, FrozenChoice] = {}
    for _, decider in sources:
        choices |= {choice.signature: choice for choice in decider.choices()}
    auto, first = sources[0]
    return to_toml(auto, first.written, list(choices.values())) if choices else ""


freezer = Freezer()

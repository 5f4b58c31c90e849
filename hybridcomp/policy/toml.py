"""Read a policy from TOML.

.. code-block:: toml

    min_bytes = 65536                      # smaller messages go uncompressed
    exclude = ["*.bias", "*norm*"]         # names that go uncompressed
    codec = "int8:block=128"               # for every axis that says nothing else

    [dp]                                   # an axis of the mesh
    all_reduce = { codec = ["powersgd:rank=4", "int8"], feedback = "ef", warmup_steps = 100 }
    [pp]
    forward = "int8:block=128"             # an operation, which goes first, or a phase; a string is its codec
    backward = { codec = "powersgd:rank=16", feedback = "ef", only = "cool-down" }    # after the last forward pass
    [tp]
    between_hosts = true                   # among the ranks of one host nothing is compressed
    codec = "int8:block=128"
    [sp]
    forward = { codec = "int8", from_layer = 2 }                       # layers 0 and 1 go uncompressed
    [embedding]                            # tied embeddings of a pipeline: one all-reduce over replicas and stages
    fused = true
    [fsdp]
    reduce_scatter = { codec = "int4", feedback = "loco:beta=0.9" } # or ef, ef-sgdm, dgc (momentum=), ef21 (all_reduce)
    all_gather = { codec = "int8", algorithm = "ring" }             # of docs/algorithms.md, wherever it can be used

    [ddp]                                  # an axis of a program's own: its first 100 steps have another codec
    all_reduce = { codec = "int4", feedback = "ef", steps = { 100 = "powersgd:rank=4" } }
    [zero]                                 # the ratio adapts as training goes on (docs/adapt.md)
    reduce_scatter = { codec = "topk:ratio=0.1", feedback = "ef", adapt = "gravac:eps=0.8" }

    [auto]                                 # decides for the axes that have no section here
    dp = "aggressive"                      # a class of fidelity: exact, safe or aggressive
    "dp.all_gather" = "safe"

Decisions that :mod:`hybridcomp.policy.auto` has made and frozen are ``[[auto.choice]]`` there.

An ``all_reduce`` may have ``stages = 2``: only the first two stages of a pipeline compress theirs.
docs/techniques.md says what such rules mean for training; where no program says to which place a message belongs,
they leave it compressed.
"""

from __future__ import annotations

import copy
import operator
import re
from typing import Any, NoReturn

from hybridcomp.codecs import Codec, get_codec, parse_form
from hybridcomp.errors import ConfigError, PolicyError, printable
from hybridcomp.files import parse_toml, shown
from hybridcomp.policy.adapt.spec import Adapt, parse_adapt
from hybridcomp.policy.auto.freeze import read_auto
from hybridcomp.policy.auto.spec import NAME as AUTO
from hybridcomp.policy.auto.spec import Auto
from hybridcomp.policy.message import OPS, PHASES
from hybridcomp.policy.rules import Policy, Rule, check_bound, check_feedback
from hybridcomp.schedules.registry import ALGORITHMS, lookup, missing

_OF_CODEC = (
    "feedback",
    "warmup_steps",
    "only",
    "stages",
    "from_layer",
    "between_hosts",
    "algorithm",
    "steps",
    "adapt",
)
_RULE_KEYS = ("codec", *_OF_CODEC, "min_bytes", "exclude")
_EMBEDDING = "embedding"  # the section that may have `fused`
_ENTRY_OF = {
    "only": ("backward",),
    "stages": ("all_reduce",),
    "adapt": ("all_reduce", "reduce_scatter"),
}
_ONLY = ("cool-down",)
Codecs = tuple[Codec, ...]
MOST = (1 << 63) - 1  # largest integer


def parse_policy(text: str, name: str, *, preset: bool = False) -> Policy:
    """Parse a policy.

    Args:
        text: the TOML document.
        name: the file's path or the preset's name; begins every error message.
        preset: whether it is a preset, which may speak of axes that a mesh does not have.

    Raises:
        PolicyError: the text is wrong; names the file, line and key.
    """
    document = parse_toml(text, printable(name), error=PolicyError)
    try:
        return _Reader(text, name).policy(document, preset)
    except PolicyError:
        raise
    except ValueError as error:
        raise PolicyError(f"{printable(name)}: {error}") from error


class _Reader:
    """Reader of the parsed document; it has the text so that its errors name a line."""

    def __init__(self, text: str, name: str) -> None:
        self._lines = text.splitlines()
        self._name = name

    def policy(self, document: dict[str, Any], preset: bool) -> Policy:
        base: dict[str, Any] = {}
        axes: dict[str, Rule] = {}
        entries: dict[str, dict[str, Rule]] = {}
        lines: dict[str, int] = {}
        fused, auto = False, None
        written = copy.deepcopy({key: value for key, value in document.items() if key != AUTO})
        for key, value in document.items():
            if key == AUTO:
                auto = self._auto(value)
            elif isinstance(value, dict) and key not in _RULE_KEYS:
                if key == _EMBEDDING:
                    fused = self._fused(value)
                axes[key], entries[key] = self._axis(key, value)
                lines[key] = self._line(key, None)
            else:
                base[key] = value
        rule = self._rule(base, section=None)
        told = {} if preset else lines
        return Policy(self._name, rule, axes, entries, fused=fused, auto=auto, lines=told, written=written)

    def _auto(self, table: Any) -> Auto:
        if not isinstance(table, dict):
            self._fail(None, AUTO, f"{AUTO} must be a section, not {shown(table)}")
        try:
            return read_auto(table)
        except ValueError as error:
            self._fail(AUTO, str(error.args[-1]), str(error.args[0]), error)

    def _fused(self, table: dict[str, Any]) -> bool:
        fused = self._flag(table, "fused", _EMBEDDING)
        table.pop("fused", None)
        return fused

    def _flag(self, table: dict[str, Any], key: str, section: str | None, entry: str | None = None) -> bool:
        value = table.get(key, False)
        if not isinstance(value, bool):
            self._fail(section, entry or key, f"{key} must be true or false, not {shown(value)}")
        return value

    def _axis(self, axis: str, table: dict[str, Any]) -> tuple[Rule, dict[str, Rule]]:
        own = {k: v for k, v in table.items() if k in _RULE_KEYS}
        entries: dict[str, Rule] = {}
        for key, value in table.items():
            if key in _RULE_KEYS:
                continue
            if key not in OPS + PHASES:
                allowed = ", ".join(OPS + PHASES + _RULE_KEYS + ("fused",) * (axis == _EMBEDDING))
                self._fail(axis, key, f"unknown key {key!r}; allowed: {allowed}")
            entry = value if isinstance(value, dict) else {"codec": value}
            entries[key] = self._rule(entry, section=axis, entry=key)
        return self._rule(own, section=axis), entries

    def _rule(self, table: dict[str, Any], section: str | None, entry: str | None = None) -> Rule:
        for key in table:
            if key not in _RULE_KEYS:
                self._fail(section, entry or key, f"unknown key {key!r}; allowed: {', '.join(_RULE_KEYS)}")
        for key, where in _ENTRY_OF.items():
            if key in table and entry not in where:
                self._fail(
                    section, entry or key, f"{key} stands in an entry {' or '.join(where)} of an axis only"
                )
        if table.get("only", _ONLY[0]) not in _ONLY:
            what = f"only must be {' or '.join(map(repr, _ONLY))}, not {shown(table['only'])}"
            self._fail(section, entry or "only", what)
        for key in ("warmup_steps", "min_bytes", "stages", "from_layer"):
            value = table.get(key, 0)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST:
                self._fail(
                    section,
                    entry or key,
                    f"{key} must be an integer from 0 to 2**63 - 1, not {shown(value)}",
                )
        feedback = self._feedback(table.get("feedback"), section, entry)
        exclude = table.get("exclude")
        if exclude is not None and not (
            isinstance(exclude, list) and all(isinstance(e, str) for e in exclude)
        ):
            self._fail(
                section, entry or "exclude", f"exclude must be a list of patterns, not {shown(exclude)}"
            )
        codecs = self._codecs(table["codec"], section, entry) if "codec" in table else None
        steps = self._steps(table.get("steps", {}), section, entry)
        for codec in (*(codecs or ()), *(codec for _, found in steps for codec in found)):
            try:
                check_feedback(entry or "", codec, feedback)
            except PolicyError as error:
                self._fail(section, entry or "feedback", str(error), error)
        for key in _OF_CODEC:
            if key in table and codecs is None:
                self._fail(section, entry or key, f"{key} stands beside a codec, and here is none")
        return Rule(
            codecs,
            feedback,
            warmup_steps=table.get("warmup_steps", 0),
            min_bytes=table.get("min_bytes"),
            exclude=None if exclude is None else tuple(exclude),
            only=table.get("only"),
            stages=table.get("stages"),
            from_layer=table.get("from_layer", 0),
            between_hosts=self._flag(table, "between_hosts", section, entry),
            algorithm=self._algorithm(table.get("algorithm"), section, entry),
            steps=steps,
            adapt=self._adapt(table, codecs, feedback, section, entry),
        )

    def _algorithm(self, value: Any, section: str | None, entry: str | None) -> str | None:
        """Return the name of an algorithm of the entry's operation; outside an entry, of any operation."""
        operations = [entry] if entry in ALGORITHMS else list(ALGORITHMS)
        if isinstance(value, str):
            try:
                if any(lookup(op, value) is not None for op in operations):
                    return value
            except ConfigError as error:
                self._fail(section, entry or "algorithm", str(error), error)
        known = list(dict.fromkeys(name for op in operations for name in ALGORITHMS[op]))
        if value is not None:
            where = missing(value) if isinstance(value, str) else ""
            what = f"{where}algorithm must be one of {', '.join(known)}, not {shown(value)}"
            self._fail(section, entry or "algorithm", what)
        return None

    def _steps(self, table: Any, section: str | None, entry: str | None) -> tuple[tuple[int, Codecs], ...]:
        """Return the codecs from each step on, ascending."""
        if not isinstance(table, dict) or not all(key.isdecimal() and int(key) <= MOST for key in table):
            what = f'steps must be a table of steps of training and codecs, {{ 100 = "int4" }}, not {shown(table)}'
            self._fail(section, entry or "steps", what)
        found = {int(key): self._codecs(value, section, entry) for key, value in table.items()}
        return tuple(sorted(found.items(), key=operator.itemgetter(0)))

    def _adapt(
        self,
        table: dict[str, Any],
        codecs: Codecs | None,
        feedback: str | None,
        section: str | None,
        entry: str | None,
    ) -> Adapt | None:
        if "adapt" not in table:
            return None
        if "steps" in table:
            self._fail(
                section, entry or "adapt", "adapt and steps both change the codec: give only one of them"
            )
        try:
            return parse_adapt(table["adapt"], codecs or (), feedback)
        except ValueError as error:
            self._fail(section, entry or "adapt", str(error), error)

    def _feedback(self, value: Any, section: str | None, entry: str | None) -> str | None:
        """Return the spec of a form, without the parameters that are at their defaults."""
        if value is None:
            return None
        try:
            return parse_form(value).spec
        except ValueError as error:
            self._fail(section, entry or "feedback", f"feedback {shown(value)}: {error}", error)

    def _codecs(self, value: Any, section: str | None, entry: str | None) -> tuple[Codec, ...]:
        specs = value if isinstance(value, list) else [value]
        if not specs or not all(isinstance(s, str) for s in specs):
            self._fail(
                section,
                entry or "codec",
                f"codec must be a spec string or a list of them, not {shown(value)}",
            )
        try:
            codecs = tuple(get_codec(s) for s in specs)
            for spec, codec in zip(specs, codecs, strict=True):
                check_bound(spec, codec)
            return codecs
        except (ValueError, TypeError) as error:
            self._fail(section, entry or "codec", str(error), error)

    def _fail(self, section: str | None, key: str, what: str, cause: Exception | None = None) -> NoReturn:
        where = f"{section}.{key}" if section else key
        raise PolicyError(
            f"{printable(self._name)}: line {self._line(section, key)}, key {printable(where)}: {what}"
        ) from cause

    def _line(self, section: str | None, key: str | None) -> int:
        """Return the line of a section's header, or of a key within it (dotted and quoted forms included)."""
        current: str | None = None
        header_line = 1
        for number, line in enumerate(self._lines, 1):
            header = re.match(r"\s*\[+\s*([^\]]+?)\s*\]+", line)
            if header:
                path = [part.strip(" \"'") for part in header[1].split(".")]
                current = path[0]
                if current == section:
                    header_line = number
                    if key is None or key in path[1:]:
                        return number
            elif key is not None:
                found = re.match(r"\s*([\w.\"'-]+)\s*=", line)
                path = [part.strip("\"'") for part in found[1].split(".")] if found else []
                if path and ((current == section and path[0] == key) or [section, key] == path[:2]):
                    return number
            elif section is not None and re.match(rf"\s*[\"']?{re.escape(section)}[\"']?\s*[.=]", line):
                return number
        return header_line

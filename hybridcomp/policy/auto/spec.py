"""Define the settings of ``auto``: a class of fidelity for each axis, and choices that an earlier job has frozen."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from hybridcomp.codecs import Codec, get_codec
from hybridcomp.errors import PolicyError
from hybridcomp.files import shown
from hybridcomp.policy.auto.signature import FrozenChoice
from hybridcomp.policy.message import OPS, ROOTED

NAME = "auto"
EXACT, SAFE, AGGRESSIVE = CLASSES = ("exact", "safe", "aggressive")
FREEZE = "freeze"
ALSO = "also"
CLASS = "class"  # key of the class of all axes
_PARTS = re.compile(r"(?:\([^()]*\)|[^,])+")  # between commas outside parentheses
_SUMS = ("all_reduce", "reduce_scatter")
_ACTIVATIONS = ("tp", "sp", "cp", "pp", "ep")
_GATHERS_PARAMETERS = ("dp", "fsdp")  # these axes' all-gathers are of parameters, which have no other copy


@dataclass(frozen=True)
class Auto:
    """Settings of ``auto``.

    Attributes:
        classes: class of :data:`CLASSES` by axis (``dp``) or axis and operation (``dp.all_gather``); all others have
            :attr:`of_all`.
        of_all: class of all axes that have none of their own; None for that of :func:`usual_class`.
        frozen: choices to make without measuring; empty to decide.
        also: codecs that it may choose, too: a lossless one in every class, one whose error is ``safe`` in ``safe`` and
            ``aggressive``, any other in ``aggressive`` alone, with error feedback.
        freeze: file that rank 0 writes the choices to as the job ends; None for none.
    """

    classes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    of_all: str | None = None
    frozen: tuple[FrozenChoice, ...] = ()
    also: tuple[Codec, ...] = ()
    freeze: str | None = field(default=None, compare=False)

    def fidelity(self, axis: str, op: str) -> str:
        """Return the class of an axis's messages.

        The class of an axis, or of all, does not include the all-gathers of parameters: those have no other copy, and
        are named with their operation.
        """
        given = self.classes.get(f"{axis}.{op}")
        parameters = op == "all_gather" and axis in _GATHERS_PARAMETERS
        if given is None and not parameters and op not in ROOTED:
            given = self.classes.get(axis, self.of_all)
        return given or usual_class(axis, op)

    def canonical(self) -> str:
        """Return all settings that decide, as text in a fixed order."""
        classes = ",".join(
            [*filter(None, [self.of_all]), *(f"{k}={v}" for k, v in sorted(self.classes.items()))]
        )
        also = "".join(f" also {codec.spec}" for codec in self.also)
        return f"auto {classes} {self.frozen!r}{also}"


def usual_class(axis: str, op: str) -> str:
    """Return the class of an axis and operation for which none is given.

    Gradients over ``dp`` are summed again in every step, so error feedback makes up for a codec's losses; activations
    and the sums of other groups, which may be gradients, bear 8 bits; values without another copy stay exact: gathered
    parameters, messages from or to one rank, and all unknown operations.
    """
    if op in ROOTED:
        return EXACT
    if axis in _ACTIVATIONS:
        return SAFE
    if op in _SUMS:
        return AGGRESSIVE if axis == "dp" else SAFE
    return EXACT


def parse_spec(text: str) -> Auto:
    """Parse ``auto``, ``auto:exact`` or ``auto:dp=safe,tp=exact,also=(zfp:rate=16),freeze=choices.toml``.

    Raises:
        PolicyError: the text is wrong; says what is allowed.
    """
    _, _, options = text.partition(":")
    classes: dict[str, str] = {}
    freeze, also = None, []
    for part in filter(None, (piece.strip() for piece in _PARTS.findall(options))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key in CLASSES and not equals:
            key, equals, value = CLASS, "=", key
        if not equals or not key or not value:
            raise PolicyError(
                f"policy {text!r}: {part!r} must be CLASS, AXIS=CLASS, AXIS.OPERATION=CLASS, also=CODEC or "
                f"freeze=PATH; classes: {', '.join(CLASSES)}"
            )
        if key == FREEZE:
            freeze = value
        elif key == ALSO:
            also.append(value)
        elif key in classes:
            raise PolicyError(f"policy {text!r}: {key} stands there twice")
        else:
            try:
                classes[key] = checked_class(key, value)
            except ValueError as error:
                raise PolicyError(f"policy {text!r}: {error}") from None
    try:
        of_all = classes.pop(CLASS, None)
        return Auto(MappingProxyType(classes), of_all, also=checked_also(also), freeze=freeze)
    except ValueError as error:
        raise PolicyError(f"policy {text!r}: {error}") from None


def checked_also(specs: Any) -> tuple[Codec, ...]:
    """Return the codecs that ``auto`` may choose beside its own.

    Raises:
        ValueError: it is no list of spec strings, each of another codec.
    """
    if not isinstance(specs, list) or not all(isinstance(spec, str) for spec in specs):
        raise ValueError(f"{ALSO} must be a list of codecs, not {shown(specs)}")
    codecs = []
    for spec in specs:
        try:
            codec = get_codec(spec[1:-1] if spec.startswith("(") and spec.endswith(")") else spec)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{ALSO}: {error}") from error
        if codec in codecs:
            raise ValueError(f"{ALSO} has {codec.spec} twice")
        codecs.append(codec)
    return tuple(codecs)


def checked_class(key: str, value: Any) -> str:
    """Return the class of an axis, or of its operation, after checking both.

    Raises:
        ValueError: the class is none of :data:`CLASSES`, or there is no such operation.
    """
    if value not in CLASSES:
        raise ValueError(f"the class of {key} must be one of {', '.join(CLASSES)}, not {value!r}")
    _, dot, op = key.partition(".")
    if dot and op not in OPS:
        raise ValueError(f"{key} names no operation; allowed: {', '.join(OPS)}")
    return str(value)


def axes_of(classes: Iterable[str]) -> list[str]:
    """Return the axes that keys of :attr:`Auto.classes` name, each once."""
    return list(dict.fromkeys(key.partition(".")[0] for key in classes))

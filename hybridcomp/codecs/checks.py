"""Check parameters and payloads for several codecs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeGuard, TypeVar

from hybridcomp import native, wire
from hybridcomp.errors import WireError

C = TypeVar("C")
R = TypeVar("R")
_FREE_BYTES = 1 << 30
_MOST_TIMES = 256  # times a message's own bytes


def status(code: int, codec: str) -> None:
    """Raise WireError if a native decoder found something wrong (``code`` is not 0)."""
    if code:
        raise WireError(f"malformed {codec} payload: {native.kernels().status_text(code)}")


def expansion(header: wire.Header, max_bytes: int | None) -> None:
    """Raise WireError if a message's values need more memory than its receiver may have meant to give.

    Sparse, low-rank and lossless messages of some bytes may claim any number of elements.

    Args:
        header: header of the message, for which there is no buffer yet.
        max_bytes: most bytes of its values; None: 1 GiB, or 256 times the message's bytes where that is more.
    """
    size, message = header.count * header.dtype.itemsize, wire.HEADER_BYTES + header.payload
    allowed = max(_FREE_BYTES, _MOST_TIMES * message) if max_bytes is None else max_bytes
    if size > allowed:
        raise WireError(
            f"a message of {message} bytes decodes to {header.count} {header.dtype.label}, {size} bytes, more than the "
            f"{allowed} that are allowed: give max_bytes=, or an array as out="
        )


def floating(header: wire.Header, codec: str) -> None:
    """Raise WireError unless the encoded array was of a floating-point type."""
    if not header.dtype.is_float:
        raise WireError(f"malformed {codec} message: dtype {header.dtype.label} is not floating-point")


def is_integer(value: object) -> TypeGuard[int]:
    """Tell whether a value is an int, as True and False are not meant to be."""
    return isinstance(value, int) and not isinstance(value, bool)


def integer(name: str, value: Any, low: int, high: int, step: int = 1) -> int:
    """Return ``value``; ValueError unless an int from ``low`` to ``high`` and a multiple of ``step``."""
    if not is_integer(value) or not low <= value <= high or value % step:
        multiple = f"a multiple of {step} " if step > 1 else "an integer "
        raise ValueError(f"{name} must be {multiple}from {low} to {high}, not {value!r}")
    return value


def number(name: str, value: Any, most: float = math.inf) -> float:
    """Return ``value`` as a float; ValueError unless a finite number above 0 and at most ``most``."""
    given = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            given = float(value)
        except OverflowError:  # an integer beyond all floats
            given = math.inf
    if not 0 < given <= most or given == math.inf:
        allowed = "a finite number above 0" if most == math.inf else f"a number above 0 and at most {most}"
        raise ValueError(f"{name} must be {allowed}, not {value!r}")
    return given


def choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Return ``value``; ValueError unless it is one of ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")
    return str(value)


def flag(name: str, value: Any) -> bool:
    """Return ``value``; ValueError unless it is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, not {value!r}")
    return value


def stepped(seed: int, step: int) -> int:
    """Return the seed to use at ``step``: another one for every pair of seed and step that is likely to be used."""
    return (seed + step * 0x9E3779B97F4A7C15) % 2**63


def once_a_step(at_step: Callable[[C, int], R]) -> Callable[[C, int], R]:
    """Make a codec's ``at_step`` keep the codec of the last step, which every message of that step asks for.

    To make one, with its spec and the hash of that, takes tens of microseconds.
    """

    @functools.wraps(at_step)
    def kept(self: C, step: int) -> R:
        last: tuple[int, R] | None = self.__dict__.get("_last_step")
        if last is None or last[0] != step:
            last = step, at_step(self, step)
            if last[1] is not self:  # it draws numbers
                self.__dict__["_last_step"] = last
        return last[1]

    return kept

"""List the codecs that may carry a message of a class of fidelity."""

from __future__ import annotations

import functools

from hybridcomp.codecs import Codec, get_codec
from hybridcomp.policy.auto.spec import AGGRESSIVE, EXACT
from hybridcomp.policy.message import Message

NONE = get_codec("none")
EF = "ef"
LEAST_BYTES = 4096  # smaller messages take a latency, whatever their bytes
# Codecs of each class, in addition to the classes before it. Aggressive ones lose so much in a step that error
# feedback has to repair it; all lossy codecs then have it, so that a change of codec carries the residual over.
_EXACT = ("exponent",)
_SAFE = ("bf16", "int8:block=128")
_AGGRESSIVE = ("int4:block=128", "powersgd:rank=32")
# Smallest operation with error feedback, in bytes: its start takes Python a millisecond, that of ``none`` does not.
_LEAST_WITH_FEEDBACK = 1 << 16
Candidate = tuple[Codec, str | None]


def candidates(fidelity: str, message: Message, also: tuple[Codec, ...] = ()) -> list[Candidate]:
    """Return the codecs, with their error feedback, that may carry a message; ``none`` first.

    A message that keeps no residual has nothing to repair what it loses, and the link of a send is not known here: such
    messages of the class ``aggressive`` are treated as safe ones.

    Args:
        fidelity: class of fidelity.
        message: one of the messages.
        also: codecs that :attr:`.spec.Auto.also` adds.
    """
    found: list[Candidate] = [(NONE, None)]
    feedback = EF if fidelity == AGGRESSIVE and message.kept_by is not None and message.op != "send" else None
    for codec in _codecs(fidelity, feedback is not None, also):
        if codec.linear and (message.op != "all_reduce" or len(message.dims) < 2):
            continue
        if feedback is not None and not codec.lossless and message.operation_bytes < _LEAST_WITH_FEEDBACK:
            continue
        if codec.can_carry(message.dtype, message.dims) is None:
            found.append((codec, None if codec.lossless else feedback))
    return found


def senders(fidelity: str, also: tuple[Codec, ...] = ()) -> tuple[Codec, ...]:
    """Return the codecs in which a send of a class may come."""
    return _codecs(fidelity, False, also)


def every(fidelity: str, also: tuple[Codec, ...] = ()) -> tuple[Codec, ...]:
    """Return the codecs, other than ``none``, in which any message of a class may come."""
    return _codecs(fidelity, True, also)


@functools.cache
def _codecs(fidelity: str, feedback: bool, also: tuple[Codec, ...]) -> tuple[Codec, ...]:
    specs: tuple[str, ...] = _EXACT
    if fidelity != EXACT:
        specs = (*specs, *_SAFE)
    if fidelity == AGGRESSIVE and feedback:
        specs = (*specs, *_AGGRESSIVE)
    usual = tuple(get_codec(spec) for spec in specs)
    safe = fidelity != EXACT
    fits = (c.lossless or (safe and c.safe) or (fidelity == AGGRESSIVE and feedback) for c in also)
    return (*usual, *(codec for codec, good in zip(also, fits, strict=True) if good and codec not in usual))


def allowed(fidelity: str, codec: Codec, feedback: str | None, also: tuple[Codec, ...] = ()) -> bool:
    """Tell whether a frozen choice stays within a class of fidelity."""
    if codec.lossless:
        return True
    if codec in _codecs(fidelity, False, also):
        return True
    return fidelity == AGGRESSIVE and feedback is not None

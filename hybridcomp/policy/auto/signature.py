"""Define the signature by which ``auto`` tells messages apart, and a choice that is fixed for one kind of them."""

from __future__ import annotations

import math
from typing import NamedTuple

from hybridcomp.policy.message import Message

_EIGHTHS = 4  # bits of a size that count: sizes within an eighth of each other are as one


class Signature(NamedTuple):
    """Kind of a message: all ranks have the same kinds, in the same order.

    Attributes:
        axis, op: axis and operation of the message.
        dtype: label of the dtype, ``float32``.
        nbytes: bytes that travel together, rounded down to an eighth of a power of two.
        named: whether it has a name, under which error feedback can be kept.
        thin: bits of how many times smaller than the array a matrix's rank-1 factors are; 0 for other shapes.
    """

    axis: str
    op: str
    dtype: str
    nbytes: int
    named: bool
    thin: int

    @classmethod
    def of(cls, message: Message) -> Signature:
        """Return the signature of a message."""
        nbytes = message.operation_bytes
        coarse = max(0, nbytes.bit_length() - _EIGHTHS)
        thin = 0
        shape = message.shape or ()
        if len(shape) >= 2 and message.op == "all_reduce":
            rows, columns = shape[0], math.prod(shape[1:])
            thin = (rows * columns // max(1, rows + columns)).bit_length()
        named = message.kept_by is not None
        return cls(message.axis, message.op, message.dtype.label, nbytes >> coarse << coarse, named, thin)


class FrozenChoice(NamedTuple):
    """Choice that is fixed.

    Attributes:
        signature: signature of the messages that it is for.
        codec: spec of the codec.
        feedback: spec of the form of error feedback; None for none.
        reason: reason in the job that made it.
    """

    signature: Signature
    codec: str
    feedback: str | None
    reason: str


def nearest(choices: tuple[FrozenChoice, ...], wanted: Signature) -> FrozenChoice | None:
    """Return the choice for a signature, or for the one nearest in size that is otherwise like it; None without one."""
    alike = [choice for choice in choices if choice.signature._replace(nbytes=0) == wanted._replace(nbytes=0)]
    if not alike:
        alike = [
            choice
            for choice in choices
            if choice.signature._replace(nbytes=0, thin=0) == wanted._replace(nbytes=0, thin=0)
        ]
    distance = math.log2(wanted.nbytes or 1)
    return min(alike, key=lambda c: abs(math.log2(c.signature.nbytes or 1) - distance), default=None)

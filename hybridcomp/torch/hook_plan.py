"""What a hook does with the parameters of a bucket: a policy's answers, grouped by how they travel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridcomp.arrays import DType
from hybridcomp.policy import Choice, Message, Policy


@dataclass(frozen=True, slots=True)
class Piece:
    """A parameter's gradient within a bucket.

    Attributes:
        name: of the parameter.
        shape: of the parameter.
        start, stop: its elements in the bucket's buffer.
        choice: what the policy says.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    choice: Choice

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Plan:
    """A bucket's pieces by how they travel.

    Attributes:
        exact: uncompressed.
        encoded: by a codec that encodes elements.
        linear: by a codec that sums in the compressed domain.
    """

    exact: list[Piece] = field(default_factory=list)
    encoded: list[Piece] = field(default_factory=list)
    linear: list[Piece] = field(default_factory=list)


def make_plan(
    policy: Policy,
    axis: str,
    dtype: DType,
    parameters: Sequence[tuple[str, tuple[int, ...]]],
    step: int,
    ranks: int,
) -> Plan:
    """Ask the policy about each parameter of a bucket.

    Args:
        policy, axis: whose section to read.
        dtype: of the bucket.
        parameters: names and shapes, in the bucket's order.
        step: for warm-up.
        ranks: with one rank nothing is compressed.
    """
    plan = Plan()
    start = 0
    for name, shape in parameters:
        n = math.prod(shape)
        message = Message(axis, "all_reduce", "backward", dtype, n * dtype.itemsize, name, step, shape)
        choice = policy.choose(message)
        piece = Piece(name, shape, start, start + n, choice)
        start += n
        if ranks == 1 or not choice.compresses:
            plan.exact.append(piece)
        elif choice.codec.linear:
            plan.linear.append(piece)
        else:
            plan.encoded.append(piece)
    return plan


def last_warmup_step(policy: Policy) -> int:
    """The step from which on a policy's answers no longer change."""
    rules = [policy.base, *policy.axes.values(), *(r for e in policy.entries.values() for r in e.values())]
    return max(rule.warmup_steps for rule in rules)

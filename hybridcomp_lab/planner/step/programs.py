"""Define the programs of ranks for a few steps: what each computes, sends, starts and waits for, in order.

Ranks that differ in dp and tp alone do the same at the same time, so one stands for them: there is a program for each
rank of the pipeline, which stands for ``dp * tp`` ranks. With cyclic schedules there is one for each replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hybridcomp_lab.planner.step.traffic import Cost

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute for ``seconds`` of a processor."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Start:
    """Start a collective or a send, which goes on by itself.

    Attributes:
        key: name by which a program waits for it.
        axis: axis whose stream it is on; on a stream one operation follows the other.
        cost: cost of each of several alike operations.
        to: program that receives a send; None: a collective.
        among: programs that all have to start it before it begins; empty: each has its own.
    """

    key: Key
    axis: str
    cost: Cost
    to: int | None = None
    among: tuple[int, ...] = ()

    @property
    def stream(self) -> str:
        """Return the name of the stream that it is on."""
        return self.axis if self.to is None else f"{self.axis} to {self.to}"


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until an operation has ended that was started here or by a sender."""

    key: Key


@dataclass(frozen=True, slots=True)
class Mark:
    """Note the time: a step has ended."""

    step: int


Instruction = Compute | Start | Wait | Mark


@dataclass(frozen=True)
class Program:
    """Program of a rank.

    Attributes:
        rank: first of the ranks that it stands for.
        weight: number of ranks that it stands for.
        speed: relative speed of the slowest of them.
        instructions: instructions in order.
        loads: messages of one instruction that leave each host, by stream and host.
    """

    rank: int
    weight: int
    speed: float
    instructions: list[Instruction] = field(default_factory=list)
    loads: Mapping[str, Mapping[int, int]] = field(default_factory=dict)

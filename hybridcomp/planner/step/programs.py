"""Write the program of each rank of a few steps: what it computes, sends, starts and waits for, in order.

Ranks that differ in dp and tp alone do the same at the same time, so one stands for them: there is a program for each
rank of the pipeline, which stands for ``dp * tp`` ranks. Of cyclic schedules there is one for each replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hybridcomp.planner.step.traffic import Cost

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
        key: its name, by which it is waited for.
        axis: whose stream it is on: there one follows the other.
        cost: of each of those that are alike.
        to: of a send, the program that receives it; None: a collective.
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
    """Wait until something that was started, here or by a sender, has ended."""

    key: Key


@dataclass(frozen=True, slots=True)
class Mark:
    """Note the time: a step has ended."""

    step: int


Instruction = Compute | Start | Wait | Mark


@dataclass(frozen=True)
class Program:
    """What a rank does.

    Attributes:
        rank: the first of those it stands for.
        weight: ranks that it stands for.
        speed: relative, of the slowest of them.
        instructions: in order.
        loads: by stream, messages of one instruction that leave each host.
    """

    rank: int
    weight: int
    speed: float
    instructions: list[Instruction] = field(default_factory=list)
    loads: Mapping[str, Mapping[int, int]] = field(default_factory=dict)

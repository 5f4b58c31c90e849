"""Outcomes of scenarios of planted faults."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Outcome:
    """The counts of one scenario, or of many.

    Attributes:
        operations: number of operations that ranks started, counted once for all ranks.
        faults: planted faults, by sort.
        outcomes: how operations ended, or processes, by sort: ``"right"``, the name of an error, ``"killed"``.
    """

    operations: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)

    def add(self, other: Outcome) -> None:
        """Add the counts of another one."""
        self.operations += other.operations
        self.faults += other.faults
        self.outcomes += other.outcomes

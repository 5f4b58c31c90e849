"""Define a setting whose cost is asked for, and the exchanges that formulas are made of."""

from __future__ import annotations

from dataclasses import dataclass

from hybridcomp.perfmodel.profile import Profile
from hybridcomp.perfmodel.terms import Phase, Setting


@dataclass(frozen=True, slots=True)
class Case:
    """Setting, with the quantities that formulas use.

    Attributes:
        profile, setting: the machine and the operation whose cost is asked for.
        chunk: uncompressed bytes of a chunk.
    """

    profile: Profile
    setting: Setting
    chunk: int

    def phase(self, *, whole: bool = False) -> Phase:
        """Return an empty part of the algorithm, cut into chunks or ``whole``."""
        return Phase(self.profile, self.setting, max(1, self.setting.nbytes) if whole else self.chunk)

    @property
    def n(self) -> float:
        """Return the number of elements."""
        return self.setting.nbytes / self.setting.itemsize

    @property
    def p(self) -> int:
        """Return the number of ranks."""
        return self.setting.ranks

    @property
    def h(self) -> int:
        """Return the number of hosts."""
        return self.setting.hosts

    @property
    def l(self) -> int:  # noqa: E743  (its name in the formulas)
        """Return the number of ranks on the fullest host."""
        return self.setting.ranks_per_host

    @property
    def network(self) -> bool:
        """Tell whether any message leaves a host."""
        return self.setting.hosts > 1

    def to_all(self, phase: Phase, n: float) -> None:
        """Add the sends of ``n`` elements from every rank to every other rank at once, different ones for each."""
        phase.chain(1, network=self.network)
        phase.send(n, near=self.l - 1, far=self.l * (self.p - self.l), own=self.p - 1, peers=self.p - 1)

    def own_result(self, phase: Phase, n: float) -> None:
        """Add the decoding and copy of a rank's own sum; the compiled engine's encoder makes them in passing."""
        if not self.setting.compiled:
            phase.decode(n)
            phase.copy(n)

    def around(self, phase: Phase, n: float) -> None:
        """Add every rank's ``n`` elements around a ring: of a host's ranks only the last one sends to another host."""
        phase.chain(self.p - 1, network=self.network)
        phase.send(
            n, near=0 if self.l == 1 else self.p - 1, far=self.p - 1 if self.network else 0, own=self.p - 1
        )

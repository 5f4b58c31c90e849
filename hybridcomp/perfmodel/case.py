"""A setting whose cost is asked for, and the exchanges that formulas are made of."""

from __future__ import annotations

from dataclasses import dataclass

from hybridcomp.perfmodel.profile import Profile
from hybridcomp.perfmodel.terms import Phase, Setting


@dataclass(frozen=True, slots=True)
class Case:
    """A setting, with what a formula asks of it.

    Attributes:
        profile, setting: of whom the cost is asked.
        chunk: uncompressed bytes of a chunk.
    """

    profile: Profile
    setting: Setting
    chunk: int

    def phase(self) -> Phase:
        """A part with nothing in it yet."""
        return Phase(self.profile, self.setting, self.chunk)

    @property
    def n(self) -> float:
        """Elements."""
        return self.setting.nbytes / self.setting.itemsize

    @property
    def p(self) -> int:
        """Ranks."""
        return self.setting.ranks

    @property
    def h(self) -> int:
        """Hosts."""
        return self.setting.hosts

    @property
    def l(self) -> int:  # noqa: E743  (its name in the formulas)
        """Ranks on the fullest host."""
        return self.setting.ranks_per_host

    @property
    def network(self) -> bool:
        """Whether any message leaves a host."""
        return self.setting.hosts > 1

    def to_all(self, phase: Phase, n: float) -> None:
        """Every rank sends ``n`` elements, its own for each, to every other rank at once."""
        phase.chain(1, network=self.network)
        phase.send(n, near=self.l - 1, far=self.l * (self.p - self.l), own=self.p - 1, peers=self.p - 1)

    def own_result(self, phase: Phase, n: float) -> None:
        """A rank takes the decoded sum of its shard, which the compiled engine's encoder leaves it in passing."""
        if not self.setting.compiled:
            phase.decode(n)
            phase.copy(n)

    def around(self, phase: Phase, n: float) -> None:
        """Every rank's ``n`` elements go around a ring: of a host's ranks only the last one sends to another host."""
        phase.chain(self.p - 1, network=self.network)
        phase.send(
            n, near=0 if self.l == 1 else self.p - 1, far=self.p - 1 if self.network else 0, own=self.p - 1
        )

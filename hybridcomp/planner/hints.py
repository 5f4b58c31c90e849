"""Say what beside the printed plans would be faster: another order of the hosts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridcomp.planner.cluster import Cluster
from hybridcomp.planner.hostorder import HostOrder, faster_order
from hybridcomp.planner.plan import Plan


@dataclass(frozen=True)
class Hints:
    """Hints about a plan; all of them are predictions.

    Attributes:
        chosen: the one that is taken.
        cluster: what they run on.
        order: of the hosts, in which the chosen one is faster.
    """

    chosen: Plan
    cluster: Cluster
    order: HostOrder | None

    def lines(self, number: int) -> list[str]:
        """Return a line for each hint; ``number`` is the chosen plan's, from 1."""
        return self._order_line(number)

    def _order_line(self, number: int) -> list[str]:
        if self.order is None:
            return []
        saved = 1 - self.order.seconds / self.chosen.prediction.seconds
        layers = self.order.stage_layers
        cut = "" if layers is None else f" with layers {_spaced(layers)}"
        return [
            f"Hosts in the order {_spaced(self.order.hosts)} of the profile's, in the launcher's host file, would take "
            f"{self.order.seconds:.3g} s a step of plan {number}{cut}: {saved:.1%} less."
        ]

    def record(self) -> dict[str, Any]:
        """Return them as JSON: only what the cluster's description asks for."""
        found: dict[str, Any] = {}
        if self.cluster.uneven:
            found["host_order"] = None if self.order is None else dataclasses.asdict(self.order)
        return found


def find_hints(chosen: Plan, cluster: Cluster) -> Hints:
    """Find what would be faster than a plan on a cluster."""
    return Hints(chosen, cluster, faster_order(chosen, cluster))


def _spaced(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))

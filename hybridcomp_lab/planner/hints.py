"""Suggest what beside the printed plans would be faster: another order of the hosts, and swapping."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridcomp_lab.planner.budget import policy_of
from hybridcomp_lab.planner.cluster import Cluster
from hybridcomp_lab.planner.hostorder import HostOrder, faster_order
from hybridcomp_lab.planner.plan import Plan
from hybridcomp_lab.planner.swap import Swapping, with_swapping


@dataclass(frozen=True)
class Hints:
    """Hints about some plans; all of them are predictions.

    Attributes:
        plans: plans in the order in which they are printed.
        chosen: plan that is taken.
        cluster: cluster that they run on.
        order: order of the hosts in which the chosen plan is faster; None for none.
        swapped: prediction with swapping of each plan that computes blocks again, by the plan's place from 0.
    """

    plans: Sequence[Plan]
    chosen: Plan
    cluster: Cluster
    order: HostOrder | None
    swapped: dict[int, Swapping]

    def lines(self, number: int) -> list[str]:
        """Return a line for each hint; ``number`` is the chosen plan's, from 1."""
        return [*self._order_line(number), *self._swap_line()]

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

    def _swap_line(self) -> list[str]:
        if not self.swapped:
            return []
        at, best = min(self.swapped.items(), key=lambda pair: pair[1].seconds)
        if best.blocks == 0:
            return ["With swapping no plan would be faster: no backward pass hides a block's."]
        return [
            f"With swapping, which the trainer does not do, plan {at + 1} would take {best.seconds:.3g} s a step, not "
            f"{self.plans[at].prediction.seconds:.3g}: {best.blocks} of a stage's {best.recomputed} recomputed blocks "
            "would be swapped."
        ]

    def record(self) -> dict[str, Any]:
        """Return the hints in JSON's types: only those that the cluster's description asks for."""
        found: dict[str, Any] = {}
        if self.cluster.uneven:
            found["host_order"] = None if self.order is None else dataclasses.asdict(self.order)
        if self.cluster.swap is not None:
            found["swapping"] = [
                {"plan": at + 1, **dataclasses.asdict(swapped)} for at, swapped in self.swapped.items()
            ]
        return found


def find_hints(plans: Sequence[Plan], chosen: Plan, cluster: Cluster) -> Hints:
    """Find orders of the hosts and swapping that would be faster than plans.

    Args:
        plans: plans that are printed.
        chosen: plan that is taken, for which an order of the hosts is looked for.
        cluster: cluster that they run on.
    """
    found = {at: with_swapping(plan.config, cluster, policy_of(plan.codecs)) for at, plan in enumerate(plans)}
    swapped = {at: swapping for at, swapping in found.items() if swapping is not None}
    return Hints(plans, chosen, cluster, faster_order(chosen, cluster), swapped)


def _spaced(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))

"""Find an order of the hosts in which a plan would be faster.

Ranks fill hosts in the order in which the launcher is given them, so the order says which stages of a pipeline a host
has: slow links do least harm at the pipeline's ends, which send once where stages between send twice, and slow
processors where they hold up no fast processor of the same stage.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hybridcomp_lab.planner.budget import policy_of
from hybridcomp_lab.planner.cluster import Cluster
from hybridcomp_lab.planner.placement import predict_best_cut
from hybridcomp_lab.planner.plan import Plan

_EVERY = 24  # different orders up to which all are predicted: as many as 4 hosts have
_LEAST = 0.99  # an order counts as faster up to this ratio of seconds

Kind = tuple[float, float]
"""Speed and rate of a host: hosts that have the same ones may change places."""


@dataclass(frozen=True)
class HostOrder:
    """Order of the hosts in which a plan takes less time.

    Attributes:
        hosts: places in the description of the cluster, from 1.
        stage_layers: layers of each stage in this order; None: all stages have equally many.
        seconds: predicted seconds of a step.
    """

    hosts: tuple[int, ...]
    stage_layers: tuple[int, ...] | None
    seconds: float


def faster_order(plan: Plan, cluster: Cluster) -> HostOrder | None:
    """Find an order of a cluster's hosts in which a plan takes at least 1 % less time.

    All different orders are predicted, each with the best cut, if they are at most 24; otherwise the hosts sorted by
    speed and by rate, up and down, and with the slowest links at the ends.

    Returns:
        The fastest such order; None where there is none, or hosts are alike, or there is no pipeline.
    """
    if plan.config.pp == 1 or not cluster.uneven:
        return None
    kinds = [
        (cluster.speeds[host] if cluster.speeds else 1.0, cluster.rate(host)) for host in range(cluster.hosts)
    ]
    found = []
    for order in _orders(kinds, plan.config.dp * plan.config.tp // cluster.ranks_per_host):
        moved = dataclasses.replace(
            cluster,
            speeds=tuple(kinds[host][0] for host in order),
            rates=tuple(kinds[host][1] for host in order),
        )
        config, prediction = predict_best_cut(plan.config, moved, policy_of(plan.codecs))
        found.append(HostOrder(tuple(host + 1 for host in order), config.stage_layers, prediction.seconds))
    best = min(found, key=lambda order: order.seconds)
    return best if best.seconds <= _LEAST * plan.prediction.seconds else None


def _orders(kinds: Sequence[Kind], together: int) -> list[tuple[int, ...]]:
    """Return the orders to try, as places of hosts from 0.

    Args:
        kinds: kinds of the hosts.
        together: hosts of one stage, among which the order does not matter.
    """
    every = list(itertools.islice(_arrangements(Counter(kinds), max(1, together)), _EVERY + 1))
    if len(every) > _EVERY:
        by_speed, by_rate = sorted(kinds), sorted(kinds, key=lambda kind: kind[::-1])
        ends = [*by_rate[::2], *by_rate[1::2][::-1]]
        every = [by_speed, by_speed[::-1], by_rate, by_rate[::-1], ends]
    found = []
    for arrangement in every:
        left: dict[Kind, Iterator[int]] = {
            kind: iter([host for host, own in enumerate(kinds) if own == kind]) for kind in set(kinds)
        }
        found.append(tuple(next(left[kind]) for kind in arrangement))
    return found


def _arrangements(counts: Counter[Kind], together: int) -> Iterator[list[Kind]]:
    """Yield the orders of so many hosts of each kind that differ in which hosts are ``together``."""
    if not counts.total():
        yield []
        return
    for first in _choices(sorted(counts.items()), min(together, counts.total())):
        for rest in _arrangements(counts - Counter(first), together):
            yield [*first, *rest]


def _choices(counts: Sequence[tuple[Kind, int]], size: int) -> Iterator[list[Kind]]:
    """Yield the ways to take ``size`` hosts, given the number of each kind."""
    if size == 0:
        yield []
        return
    for at, (kind, count) in enumerate(counts):
        for taken in range(min(count, size), 0, -1):
            for rest in _choices(counts[at + 1 :], size - taken):
                yield [kind] * taken + rest

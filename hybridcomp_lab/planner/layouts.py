"""List the layouts of a job: each split of its ranks, with schedules and micro-batches."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hybridcomp.errors import ConfigError
from hybridcomp_lab.planner.budget import LossBudget
from hybridcomp_lab.train.checks import check_config
from hybridcomp_lab.train.config import TrainConfig

_VIRTUAL = (2, 4)  # stages of a rank, with schedule interleaved
_MOST_MICRO_BATCHES = 1024
_NEAR = 4  # a value named instead of a wrong one is at most so many times as large or as small


@dataclass(frozen=True)
class Wish:
    """Job to be planned.

    Attributes:
        model: configuration that has the model's size, and all settings that a plan does not decide.
        batch: sequences of a step.
        budget: loss that the training may risk.
        tp_across_hosts: whether ranks of tp may be on several hosts.
    """

    model: TrainConfig
    batch: int
    budget: LossBudget = "safe"
    tp_across_hosts: bool = False


def layouts(wish: Wish, hosts: int, ranks_per_host: int) -> list[TrainConfig]:
    """Return every layout of a job on so many ranks.

    Schedules that change what a step computes (2bw) are there for an aggressive budget alone.

    Raises:
        ConfigError: there is none; names values near those given that have one.
    """
    if wish.batch < 1:
        raise ConfigError(f"--batch must be at least 1, not {wish.batch}")
    found = [
        config
        for pp, dp, tp in _splits(wish, hosts, ranks_per_host)
        for config in _of_split(wish, pp, dp, tp)
    ]
    if not found:
        raise ConfigError(_without(wish, hosts, ranks_per_host))
    return found


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, smallest first."""
    return [n for n in range(1, number + 1) if number % n == 0]


def _splits(wish: Wish, hosts: int, ranks_per_host: int) -> Iterator[tuple[int, int, int]]:
    """Yield each (pp, dp, tp) of which every axis divides what it splits."""
    ranks, model = hosts * ranks_per_host, wish.model
    for tp in divisors(ranks):
        if model.heads % tp or (ranks_per_host % tp and not wish.tp_across_hosts):
            continue
        for pp in divisors(ranks // tp):
            dp = ranks // tp // pp
            if model.layers % pp == 0 and wish.batch % dp == 0 and wish.batch // dp >= pp:
                yield pp, dp, tp


def _of_split(wish: Wish, pp: int, dp: int, tp: int) -> Iterator[TrainConfig]:
    share = wish.batch // dp  # sequences of a step on a replica
    sizes = [size for size in divisors(share) if pp <= share // size <= _MOST_MICRO_BATCHES]
    for size, (schedule, virtual) in itertools.product(sizes, _schedules(wish, pp)):
        layout: dict[str, Any] = {
            **{"pp": pp, "dp": dp, "tp": tp, "schedule": schedule, "virtual_stages": virtual},
            **{"micro_batch_size": size, "micro_batches": share // size, "recompute": "none"},
        }
        config = dataclasses.replace(wish.model, **layout)
        try:
            check_config(config)
        except ConfigError:  # this schedule or size is not for this split
            continue
        yield config


def _schedules(wish: Wish, pp: int) -> list[tuple[str, int]]:
    if pp == 1:
        return [("1f1b", 1)]
    found = [("1f1b", 1), ("gpipe", 1), *(("interleaved", virtual) for virtual in _VIRTUAL)]
    return [*found, ("2bw", 1)] if wish.budget == "aggressive" else found


def _without(wish: Wish, hosts: int, ranks_per_host: int) -> str:
    """Return the error's text: no split divides, and which near values do."""
    model = wish.model
    batches = (
        b
        for b in _around(wish.batch)
        if any(_splits(dataclasses.replace(wish, batch=b), hosts, ranks_per_host))
    )
    counts = (h for h in _around(hosts) if any(_splits(wish, h, ranks_per_host)))
    offers = [
        *(f"--batch {batch}" for batch in itertools.islice(batches, 1)),
        *(f"--hosts {count}" for count in itertools.islice(counts, 1)),
    ]
    works = f"; nearest that works: {' or '.join(offers)}" if offers else ""
    return (
        f"{hosts * ranks_per_host} ranks cannot be split: pp must divide {model.layers} layers, tp {model.heads} heads "
        f"and the {ranks_per_host} ranks of a host, dp the batch of {wish.batch}, with pp micro-batches or more for "
        f"each replica{works}"
    )


def _around(value: int) -> Iterator[int]:
    """Yield numbers ever farther from a value."""
    for distance in range(1, _NEAR * value):
        if value - distance >= max(1, value // _NEAR):
            yield value - distance
        if value + distance <= _NEAR * value:
            yield value + distance

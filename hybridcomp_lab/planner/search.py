"""Find the best plans of a job: list layouts, drop those that do not fit, estimate, and predict the best."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hybridcomp.errors import ConfigError
from hybridcomp.policy import Policy
from hybridcomp_lab.planner.budget import AxisCodec, LossBudget, codecs_of, policy_of
from hybridcomp_lab.planner.cluster import Cluster
from hybridcomp_lab.planner.estimate import Estimate, Estimator
from hybridcomp_lab.planner.layouts import Wish, layouts
from hybridcomp_lab.planner.placement import predict_best_cut
from hybridcomp_lab.planner.plan import Plan
from hybridcomp_lab.planner.recompute import PLANNED, least_of_all, least_that_fits
from hybridcomp_lab.planner.step.prediction import predict_step
from hybridcomp_lab.train.config import TrainConfig

_PREDICTED = 32  # layouts, at least, whose steps are replayed
_OF_A_KIND = 3  # layouts with one split and schedule among them, at most
_MOST_PASSES = 20_000  # passes of all ranks in the replay of a step, at most: some ten seconds
_EQUAL = 1.01  # steps within this factor are equally fast: then the mildest codec is taken

Told = Callable[[int, int], None]


def find_plans(wish: Wish, cluster: Cluster, count: int, told: Told = lambda done, total: None) -> list[Plan]:
    """Find the best plans of a job, the fastest first; one of each split and schedule.

    Args:
        wish: job to plan.
        cluster: cluster that it is to run on.
        count: number of plans that are wanted; there may be fewer.
        told: called with the number of predictions made so far, and in all.

    Raises:
        ConfigError: no split divides, or nothing fits the memory: names values that would work.
    """
    found = [config for config in layouts(wish, cluster.hosts, cluster.ranks_per_host) if _quick(config)]
    fitting = _fitting(found, cluster, wish.budget)
    estimator = Estimator(cluster, wish.budget)
    ranked = sorted((estimator.estimate(config) for config in fitting), key=lambda one: one.seconds)
    candidates = _candidates(ranked, max(_PREDICTED, 3 * count))
    done, total = 0, len(candidates) + min(count, len({_kind(one.config) for one in candidates}))
    best: dict[tuple[object, ...], Plan] = {}
    for one in candidates:
        config, prediction = predict_best_cut(one.config, cluster, policy_of(one.codecs))
        plan = Plan(config, one.codecs, prediction)
        known = best.get(_kind(one.config))
        if known is None or _speed(plan) > _speed(known):
            best[_kind(one.config)] = plan
        done += 1
        told(done, total)
    plans = []
    for plan in sorted(best.values(), key=_speed, reverse=True)[:count]:
        plans.append(_mildest(plan, cluster, wish.budget))
        done += 1
        told(done, total)
    return sorted(plans, key=_speed, reverse=True)


def _speed(plan: Plan) -> float:
    return plan.prediction.samples_per_second


def _kind(config: TrainConfig) -> tuple[object, ...]:
    return config.pp, config.dp, config.tp, config.schedule, config.virtual_stages


def _quick(config: TrainConfig) -> bool:
    """Tell whether a replay of a step takes no longer than a user would wait."""
    return config.pp * config.virtual_stages * config.micro_batches <= _MOST_PASSES


def _predicted(config: TrainConfig, codecs: Mapping[str, AxisCodec], cluster: Cluster) -> Plan:
    return Plan(config, codecs, predict_step(config, cluster, policy_of(codecs)))


def _candidates(ranked: Sequence[Estimate], count: int) -> list[Estimate]:
    """Return the best estimates, few of each kind."""
    taken: dict[tuple[object, ...], int] = {}
    found: list[Estimate] = []
    for one in ranked:
        kind = _kind(one.config)
        if taken.get(kind, 0) < _OF_A_KIND:
            taken[kind] = taken.get(kind, 0) + 1
            found.append(one)
        if len(found) == count:
            break
    return found


def _mildest(plan: Plan, cluster: Cluster, budget: LossBudget) -> Plan:
    """Take back each axis's compression as far as the step stays as fast: hidden messages need not be small."""
    for axis, codec in plan.codecs.items():
        limit = plan.prediction.seconds * _EQUAL
        options = codecs_of(axis, budget)
        for milder in options[: options.index(codec)]:
            other = _predicted(plan.config, {**plan.codecs, axis: milder}, cluster)
            if other.prediction.seconds <= limit:
                plan = other
                break
    return plan


# -- memory ----------------------------------------------------------------------------------------------


def _strongest(config: TrainConfig, budget: LossBudget) -> Policy:
    """Return the policy of a budget whose residuals take most memory."""
    return policy_of({"dp": codecs_of("dp", budget)[-1]} if config.dp > 1 else {})


def _fitting(configs: Sequence[TrainConfig], cluster: Cluster, budget: LossBudget) -> list[TrainConfig]:
    """Return the layouts that fit a rank's memory, each with the least recomputation.

    Raises:
        ConfigError: none fits: names the one that needs least.
    """
    found = (least_that_fits(config, cluster.memory, _strongest(config, budget)) for config in configs)
    fitting = [config for config in found if config is not None]
    if fitting:
        return fitting
    needs = (least_of_all(config, _strongest(config, budget)) for config in configs)
    least, config = min(needs, key=lambda pair: pair[0])
    least /= PLANNED
    raise ConfigError(
        f"nothing fits {(cluster.memory or 0.0) / 2**30:.3g} GiB a rank: the least is {least / 2**30:.3g} GiB, with pp "
        f"{config.pp}, dp {config.dp}, tp {config.tp}, micro-batches of {config.micro_batch_size} and "
        f"{len(config.recomputed(0))} blocks of a stage recomputed; --memory {_rounded_up(least)} works, or more ranks"
    )


def _rounded_up(nbytes: float) -> str:
    """Return a size that --memory takes, not below ``nbytes``."""
    mebibytes = -(-nbytes // 2**20)
    return f"{mebibytes:.0f}M" if mebibytes < 2**13 else f"{-(-mebibytes // 2**10):.0f}G"

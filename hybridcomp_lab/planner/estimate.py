"""Estimate a step in closed form, to choose the layouts that are worth a prediction.

After PipeDream-2BW's planner (Narayanan et al. 2021, arXiv 2006.09503): the slowest stage's passes of a micro-batch, or
its sends if they take longer, times micro-batches; the time to fill the pipeline; and the rest of the replicas'
sums. It knows no waiting of one rank for another, and so it only ranks layouts: its seconds are not for people.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridcomp.arrays import DType
from hybridcomp.codecs import Codec
from hybridcomp.policy import Message, Policy
from hybridcomp_lab.planner.budget import AxisCodec, LossBudget, codecs_of, policy_of
from hybridcomp_lab.planner.cluster import Cluster
from hybridcomp_lab.planner.compute import Work
from hybridcomp_lab.planner.step import messages, traffic
from hybridcomp_lab.planner.step import stages as shapes
from hybridcomp_lab.planner.step.buckets import buckets
from hybridcomp_lab.planner.step.messages import LATE
from hybridcomp_lab.planner.step.passes import pass_seconds, seconds_of
from hybridcomp_lab.planner.step.traffic import Cost
from hybridcomp_lab.train.config import EMBEDDING, TrainConfig

_OVERLAP = 0.8  # share of the last backward pass beside which replicas' sums go on


@dataclass(frozen=True)
class Estimate:
    """Estimate of a layout.

    Attributes:
        config: the layout.
        codecs: allowed codec that costs least, for each axis.
        seconds: seconds of a step.
    """

    config: TrainConfig
    codecs: Mapping[str, AxisCodec]
    seconds: float


class Estimator:
    """Estimator of layouts, which keeps the values that they have in common.

    Args:
        cluster: cluster that they run on.
        budget: loss budget, which says which codecs are allowed.
    """

    def __init__(self, cluster: Cluster, budget: LossBudget) -> None:
        self._cluster, self._budget = cluster, budget
        self._once: dict[tuple[object, ...], float] = {}

    def estimate(self, config: TrainConfig) -> Estimate:
        """Estimate a layout with the best codec of each axis."""
        rough = _Rough(config, self._cluster)
        codecs: dict[str, AxisCodec] = {}
        seconds: dict[str, float] = {}
        for axis in config.axes:
            options = codecs_of(axis, self._budget)
            if getattr(config, axis, 2) == 1:
                options = options[:1]
            costs = [self._axis(rough, config, axis, codec) for codec in options]
            best = min(range(len(options)), key=costs.__getitem__)
            codecs[axis], seconds[axis] = options[best], costs[best]
        passes = rough.compute + seconds["tp"]
        fill = 0.0 if config.schedule == "2bw" else (config.pp - 1) / config.virtual_stages
        left = max(seconds["dp"] - _OVERLAP * rough.last_backward, 0.1 * seconds["dp"])
        whole = max(passes, seconds["pp"]) * config.micro_batches + (passes + seconds["pp"]) * fill
        return Estimate(config, codecs, whole + left + seconds.get(EMBEDDING, 0.0) + rough.update)

    def _axis(self, rough: _Rough, config: TrainConfig, axis: str, codec: AxisCodec) -> float:
        if axis not in ("dp", EMBEDDING):
            return rough.axis(axis, policy_of({axis: codec}))
        key = axis, codec.name, config.pp, config.dp, config.tp, config.virtual_stages
        if key not in self._once:
            self._once[key] = rough.axis(axis, policy_of({axis: codec}))
        return self._once[key]


class _Rough:
    """Seconds that an estimate of one layout adds up.

    Attributes:
        compute: seconds of the slowest rank's passes of one micro-batch.
        last_backward: seconds of its backward pass.
        update: seconds of the optimizer.
    """

    def __init__(self, config: TrainConfig, cluster: Cluster) -> None:
        self._config, self._cluster = config, cluster
        self._stages = shapes.stages_of(config)
        self._per_host = min(cluster.ranks_per_host, config.dp * config.tp)
        by_rank = [[s for s in self._stages if s.index % config.pp == pp] for pp in range(config.pp)]
        passes = [
            tuple(map(sum, zip(*(pass_seconds(s, config, cluster.compute) for s in mine), strict=True)))
            for mine in by_rank
        ]
        elements = max(sum(stage.elements for stage in mine) for mine in by_rank)
        update = seconds_of(cluster.compute, shapes.optimizer(elements), Work("step"))
        self.compute = self._slowest([forward + backward for forward, backward in passes])
        self.last_backward = self._slowest([backward for _, backward in passes])
        self.update = self._slowest([update] * config.pp)

    def _slowest(self, seconds: Sequence[float]) -> float:
        """Return the seconds of the slowest rank of the pipeline.

        Args:
            seconds: seconds of each rank at speed 1. On hosts that differ the layers will be cut (:mod:`.placement`) so
                that all ranks take about as long: all work over all speeds.
        """
        cluster, size = self._cluster, self._config.dp * self._config.tp
        share = 1.0 if cluster.cores is None else max(1.0, cluster.ranks / cluster.cores)
        if not cluster.uneven:
            return max(1.0 / min(cluster.speeds, default=1.0), share) * max(seconds)
        speeds = [cluster.slowest(range(pp * size, (pp + 1) * size)) for pp in range(len(seconds))]
        return max(sum(seconds) / sum(speeds), share * sum(seconds) / len(seconds))

    def axis(self, axis: str, policy: Policy) -> float:
        """Return the seconds of an axis's messages: in a micro-batch; for dp and an embedding, in a step."""
        if axis == EMBEDDING:
            return self._embedding(policy)
        if getattr(self._config, axis) == 1:
            return 0.0
        return {"dp": self._dp, "pp": self._pp, "tp": self._tp}[axis](policy)

    def _alone(self, cost: Cost, groups: int, ranks: Sequence[int]) -> float:
        """Return the seconds of a collective beside those of so many groups on the same hosts."""
        far = len({self._cluster.host(rank) for rank in ranks}) > 1
        return cost.seconds + cost.link * (groups - 1 if far else 0)

    def _dp(self, policy: Policy) -> float:
        config = self._config
        if config.shard != "none":
            return 0.0
        ranks = [dp * config.tp for dp in range(config.dp)]
        hosts = len({self._cluster.host(rank) for rank in ranks})

        def cost(nbytes: int, codec: Codec, feedback: str | None) -> Cost:
            return messages.collective(
                self._cluster, ranks, "all_reduce", nbytes, DType.FLOAT32, codec, feedback
            )

        totals = []
        for stage in {len(s.blocks): s for s in self._stages}.values():
            parts = buckets(stage, config, policy, hosts, cost)
            totals.append(sum(self._alone(bucket.cost, config.tp, ranks) for bucket in parts))
        return max(totals) * config.virtual_stages

    def _tp(self, policy: Policy) -> float:
        config = self._config
        ranks = range(config.tp)
        hosts = len({self._cluster.host(rank) for rank in ranks})
        most = max(
            sum(len(s.blocks) for s in self._stages if s.index % config.pp == pp) for pp in range(config.pp)
        )
        again = config.virtual_stages * max(len(config.recomputed(stage.index)) for stage in self._stages)
        total = 0.0
        for phase in ("forward", "backward"):
            message = messages.of_layer(config, "all_reduce", phase, hosts)
            cost = messages.chosen(self._cluster, ranks, message, policy)
            sums = 2 * (most + (again if phase == "forward" else 0))
            total += sums * self._alone(cost, config.dp, ranks)
        return total

    def _pp(self, policy: Policy) -> float:
        config, cluster = self._config, self._cluster
        away = config.dp * config.tp  # ranks from one stage to the next
        far = away * (config.pp - 1) >= cluster.ranks_per_host
        shape = (config.micro_batch_size, config.seq_len, config.d_model)
        dtype = shapes.compute_dtype(config)
        links = traffic.links_of(
            cluster.profile, min(cluster.rates, default=cluster.profile.network.bandwidth)
        )
        total = 0.0
        for phase in ("forward", "backward"):
            nbytes = math.prod(shape) * dtype.itemsize
            message = Message(
                "pp", "send", phase, dtype, nbytes, None, LATE, shape, hosts=cluster.hosts if far else 1
            )
            cost = traffic.send(links, nbytes, dtype, policy.choose(message).codec, far)
            total += cost.seconds + cost.link * (self._per_host - 1)
        return total * config.virtual_stages

    def _embedding(self, policy: Policy) -> float:
        config = self._config
        ends = [0, (config.pp - 1) * config.dp * config.tp]
        cost = messages.chosen(self._cluster, ends, messages.of_embedding(config), policy)
        return self._alone(cost, self._per_host, ends)

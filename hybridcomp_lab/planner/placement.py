"""Choose how many layers each rank of a pipeline has, on hosts that differ in speed or in their links.

The recurrence is that of PipeDream's partitioner (Narayanan et al. 2019), as FusionAI (Tang et al. 2023, arXiv
2309.01172) and others have it for devices that differ: the slowest of the first k ranks with the first j layers takes

    dp[j][k] = min over i of max(dp[i][k - 1], sum of cost_{i..j} / speed_k + cut bytes / bw_k).

The recurrence ignores how a schedule fills and waits, so a cut is taken where the replay of a step says that it is
faster.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from hybridcomp.policy import Policy
from hybridcomp_lab.planner.cluster import Cluster
from hybridcomp_lab.planner.compute import Work
from hybridcomp_lab.planner.recompute import least_that_fits
from hybridcomp_lab.planner.step.passes import block_seconds, pass_seconds
from hybridcomp_lab.planner.step.prediction import StepPrediction, predict_step
from hybridcomp_lab.planner.step.programs import Program, Start
from hybridcomp_lab.planner.step.writing import Writer
from hybridcomp_lab.train.config import TrainConfig

_EQUAL = 1 + 1e-9  # factor within which seconds are equal: their sums are in another order


def cut_layers(
    seconds: Sequence[Sequence[float]], fixed: Sequence[float], least: int = 1, most: int | None = None
) -> tuple[int, ...]:
    """Cut layers into consecutive parts, one for each rank, so that the slowest rank takes the least time.

    Among equally good cuts, the one with the least sum of squares of the ranks' seconds is taken: little work in all,
    since that fills a pipeline, and no more on one rank than on another.

    Args:
        seconds: seconds of each layer on each rank, [ranks][layers].
        fixed: seconds of each rank however many layers it has: of its messages and its other operations.
        least: fewest layers of a rank.
        most: most layers of a rank; None: any number.

    Returns:
        The number of layers of each rank.

    Raises:
        ValueError: the number of layers cannot be cut so.
    """
    ranks, layers = len(seconds), len(seconds[0])
    most = layers if most is None else most
    if not ranks * least <= layers <= ranks * most:
        raise ValueError(f"{ranks} ranks with {least} to {most} layers each cannot have {layers}")
    before = [[0.0, *itertools.accumulate(row)] for row in seconds]

    def starts(j: int) -> range:
        """Return the layers at which the part that ends before layer j may begin."""
        return range(max(0, j - most), j - least + 1)

    def part(k: int, i: int, j: int) -> float:
        return before[k][j] - before[k][i] + fixed[k]

    slowest = [0.0] + [math.inf] * layers
    for k in range(ranks):
        slowest = [
            min((max(slowest[i], part(k, i, j)) for i in starts(j)), default=math.inf)
            for j in range(layers + 1)
        ]
    limit = slowest[layers] * _EQUAL
    squares = [0.0] + [math.inf] * layers
    chosen: list[list[int]] = []
    for k in range(ranks):
        options = [
            [(squares[i] + part(k, i, j) ** 2, i) for i in starts(j) if part(k, i, j) <= limit]
            for j in range(layers + 1)
        ]
        best = [min(row, default=(math.inf, 0)) for row in options]
        squares = [sum_ for sum_, _ in best]
        chosen.append([i for _, i in best])
    cut, end = [], layers
    for row in reversed(chosen):
        cut.append(end - row[end])
        end = row[end]
    return tuple(reversed(cut))


def predict_best_cut(
    config: TrainConfig, cluster: Cluster, policy: Policy
) -> tuple[TrainConfig, StepPrediction]:
    """Predict a layout with its own cut, and on hosts that differ also with the cuts of the recurrence.

    Args:
        config: layout; all stages have equally many layers, or ``stage_layers`` gives the number of each.
        cluster: cluster that it runs on.
        policy: policy that names the messages' codecs.

    Returns:
        The layout with the fastest cut, with as much recomputation as that needs to fit the cluster's memory, and the
        prediction of its step.

    Raises:
        ConfigError: see :func:`~hybridcomp_lab.planner.step.prediction.predict_step`.
    """
    options = [config, *_placed(config, cluster, policy)]
    found = [(option, predict_step(option, cluster, policy)) for option in options]
    return min(found, key=lambda pair: pair[1].seconds)


def _placed(config: TrainConfig, cluster: Cluster, policy: Policy) -> list[TrainConfig]:
    """Return a layout with the cuts of the recurrence: with the messages' seconds, and as if passes hid them all."""
    if config.pp == 1 or not cluster.uneven:
        return []
    seconds, fixed, messages = _costs(config, cluster, policy)
    busy = [rest + sent for rest, sent in zip(fixed, messages, strict=True)]
    found = (_that_fits(config, cluster, policy, seconds, each) for each in (busy, fixed))
    return list(dict.fromkeys(option for option in found if option is not None and option.cut != config.cut))


def _that_fits(
    config: TrainConfig,
    cluster: Cluster,
    policy: Policy,
    seconds: Sequence[Sequence[float]],
    fixed: Sequence[float],
) -> TrainConfig | None:
    """Return the layout with the best cut in which no rank has more layers than fit its memory; None for none."""
    most = config.layers - (config.pp - 1) * config.virtual_stages
    while most * config.pp >= config.layers:
        parts = cut_layers(seconds, fixed, config.virtual_stages, most)
        cut = dataclasses.replace(config, stage_layers=_stages(parts, config.virtual_stages))
        fitting = least_that_fits(cut, cluster.memory, policy)
        if fitting is not None:
            return fitting
        most = max(parts) - 1
    return None


def _stages(parts: Sequence[int], virtual: int) -> tuple[int, ...]:
    """Return the layers of each stage, given those of each rank: rank r has the stages r, r + ranks and so on."""
    return tuple(part // virtual + (turn < part % virtual) for turn in range(virtual) for part in parts)


def _costs(
    config: TrainConfig, cluster: Cluster, policy: Policy
) -> tuple[list[list[float]], list[float], list[float]]:
    """Return seconds of a micro-batch on each rank of the pipeline: of each layer, of the rest, and of its sends' link.

    The embedding and the head are in the rest of the ranks that have them.
    """
    compute, micro = cluster.compute, config.micro_batches
    # The first step of 2bw has passes of the second one, too; its messages are those of 1f1b.
    like = dataclasses.replace(config, schedule="1f1b") if config.schedule == "2bw" else config
    writer = Writer(like, cluster, policy)
    ahead, back = block_seconds(config, compute)
    again = config.recompute == "blocks" and config.recompute_blocks is None
    block = ahead + back + ahead * again
    directions = 1 if config.schedule == "local" else 2  # no stage gets another one's gradients there
    replicas = 2 if config.dp > 1 and config.shard == "none" else 0
    seconds, fixed, messages = [], [], []
    for pp, program in enumerate(writer.programs(1)):
        mine = [stage for stage in writer.stages if stage.index % config.pp == pp]
        count = sum(len(stage.blocks) for stage in mine)
        rest = sum(sum(pass_seconds(stage, config, compute)) for stage in mine) - count * block
        sends, within = _messages(program)
        ends = sum((stage.index > 0) + (stage.index + 1 < stage.count) for stage in mine)
        rest += directions * ends * compute.seconds(Work("send"))
        rest += replicas * len(mine) * compute.seconds(Work("replica"))
        seconds.append([block / program.speed + within / micro / count] * config.layers)
        fixed.append(rest / program.speed)
        messages.append(sends / micro)
    return seconds, fixed, messages


def _messages(program: Program) -> tuple[float, float]:
    """Return the seconds of a rank's messages in a step: of sends to other stages, on the link; and of tp."""
    sends = within = 0.0
    for start in program.instructions:
        if isinstance(start, Start) and (start.to is not None or start.axis == "tp"):
            stream = start.axis if start.to is None else f"{start.axis} to {start.to}"
            share = max(program.loads.get(stream, {}).values(), default=1)
            if start.to is not None:
                sends += start.cost.link * share
            else:
                within += start.cost.seconds + start.cost.link * (share - 1)
    return sends, within

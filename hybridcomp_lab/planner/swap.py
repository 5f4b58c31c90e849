"""Predict what swapping activations to a host's memory would save a plan. The trainer swaps nothing.

After KARMA (Wahib et al. 2020, arXiv 2008.11421): a block's activations are swapped where their bytes over the
bandwidth to the host's memory hide behind the backward pass, and computed again where they do not. A stage swaps the
first of its blocks, which its backward pass needs last, so the backward pass of all its other blocks hides the fetches.
Blocks are put away in the other direction, behind a forward and a backward pass, which is no tighter.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridcomp.policy import Policy
from hybridcomp_lab.planner.cluster import Cluster
from hybridcomp_lab.planner.recompute import with_blocks
from hybridcomp_lab.planner.step.memory import block_activations
from hybridcomp_lab.planner.step.passes import block_seconds, pass_seconds
from hybridcomp_lab.planner.step.prediction import predict_step
from hybridcomp_lab.planner.step.stages import stages_of
from hybridcomp_lab.train.config import TrainConfig


@dataclass(frozen=True)
class Swapping:
    """Prediction of a plan that swaps blocks which it otherwise computes again.

    Attributes:
        blocks: swapped blocks of a stage, at most.
        recomputed: blocks of a stage that are computed again without swapping, at most.
        seconds: seconds of a step.
    """

    blocks: int
    recomputed: int
    seconds: float


def with_swapping(config: TrainConfig, cluster: Cluster, policy: Policy) -> Swapping | None:
    """Predict a layout that swaps, instead of computing again, as many blocks as a backward pass hides.

    Args:
        config: the layout.
        cluster: cluster with the bandwidth of swapping.
        policy: policy that names the messages' codecs.

    Returns:
        The prediction; None where the cluster has no such bandwidth, or nothing is computed again.

    Raises:
        ConfigError: see :func:`~hybridcomp_lab.planner.step.prediction.predict_step`.
    """
    again = max(len(config.recomputed(stage)) for stage in range(config.stages))
    if cluster.swap is None or again == 0:
        return None
    fewer = (with_blocks(config, count) for count in range(again))
    best = next((option for option in fewer if _hides(config, option, cluster)), config)
    left = max(len(best.recomputed(stage)) for stage in range(config.stages))
    return Swapping(again - left, again, predict_step(best, cluster, policy).seconds)


def _hides(config: TrainConfig, option: TrainConfig, cluster: Cluster) -> bool:
    """Tell whether each stage's backward pass hides its swapping, where only ``option``'s blocks are computed again."""
    assert cluster.swap is not None
    size = config.dp * config.tp
    _, back = block_seconds(config, cluster.compute)
    for stage in stages_of(option):
        swapped = len(config.recomputed(stage.index)) - len(option.recomputed(stage.index))
        first = stage.index % config.pp * size
        _, backward = pass_seconds(stage, option, cluster.compute)
        beside = (backward - swapped * back) / cluster.slowest(range(first, first + size))
        if swapped * block_activations(config) / cluster.swap > beside:
            return False
    return True

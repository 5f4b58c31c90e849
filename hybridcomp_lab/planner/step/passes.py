"""Compute the cost of a micro-batch's passes through a stage, without messages and waiting."""

from __future__ import annotations

from hybridcomp_lab.planner.compute import ComputeProfile, Work
from hybridcomp_lab.planner.step import stages as shapes
from hybridcomp_lab.planner.step.stages import StageShape
from hybridcomp_lab.train.config import TrainConfig


def seconds_of(compute: ComputeProfile, *works: Work) -> float:
    """Return the seconds of executions one after the other."""
    return sum(compute.seconds(work) for work in works)


def block_seconds(config: TrainConfig, compute: ComputeProfile) -> tuple[float, float]:
    """Return the seconds of a block's forward and backward pass, without a second forward pass."""
    block = [work for part in shapes.block_parts(config) for work in part]
    return seconds_of(compute, *block), seconds_of(
        compute, *(shapes.backward(work, config) for work in block)
    )


def pass_seconds(stage: StageShape, config: TrainConfig, compute: ComputeProfile) -> tuple[float, float]:
    """Return the seconds of a stage's forward and backward pass; blocks that are computed again are in the latter."""
    ahead, back = block_seconds(config, compute)
    ends = [shapes.norm(config), shapes.head(config)] * stage.has_head
    ends += [shapes.embedding(config)] * (stage.index == 0)
    forward = len(stage.blocks) * ahead + seconds_of(compute, *ends, Work("pass"))
    backward = seconds_of(
        compute, *(shapes.backward(work, config) for work in ends), Work("pass", "backward")
    )
    again = len(config.recomputed(stage.index)) * ahead
    return forward, backward + len(stage.blocks) * back + again

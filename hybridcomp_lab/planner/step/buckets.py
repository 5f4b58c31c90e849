"""Lay out the buckets in which replicas sum a stage's gradients, as DistributedDataParallel does, and cost them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from hybridcomp.arrays import DType
from hybridcomp.codecs import Codec
from hybridcomp.policy import Policy
from hybridcomp_lab.planner.step.messages import LATE
from hybridcomp_lab.planner.step.stages import StageShape
from hybridcomp_lab.planner.step.traffic import NONE, NOTHING, Cost
from hybridcomp_lab.train.config import EMBEDDING, EXCHANGE_MOMENTA, TrainConfig

_FP32 = 4


@dataclass(frozen=True)
class Bucket:
    """Gradients that are summed together.

    Attributes:
        number: position in the order in which buckets are ready.
        block: block whose backward pass completes it; None: the embedding's, the stage's last one.
        cost: cost of its sums.
        coded: number of compressed sums among them.
    """

    number: int
    block: int | None
    cost: Cost
    coded: int


def exchanged(config: TrainConfig, policy: Policy) -> tuple[Policy, str]:
    """Return the policy of what replicas exchange in a late step, gradients or momenta, and its section."""
    if config.optimizer not in EXCHANGE_MOMENTA:
        return policy, "dp"
    from hybridcomp_lab.train.optimizer.momentum import section_of_momenta  # noqa: PLC0415  (imports torch)

    return section_of_momenta(policy)


def buckets(
    stage: StageShape,
    config: TrainConfig,
    policy: Policy,
    hosts: int,
    cost: Callable[[int, Codec, str | None], Cost],
) -> list[Bucket]:
    """Return the buckets of a stage.

    Args:
        stage: stage that has the gradients.
        config: configuration with the size of a bucket.
        policy: policy that names the codecs; momenta go by what the optimizer makes of it.
        hosts: number of hosts that the replicas are on.
        cost: function that returns the cost of a sum of so many bytes by a codec and a form of error feedback.
    """
    from hybridcomp.torch.hook.plan import make_split  # noqa: PLC0415  (imports torch)

    policy, axis = exchanged(config, policy)
    limit = config.bucket_mb * 2**20
    groups: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    size = 0
    # The parts of backward complete gradients from the last layer to the first.
    shared = EMBEDDING in config.axes  # a shared embedding's gradient is summed over stages, too
    left_out = ("embed.tokens.weight", "head.weight") if shared else ()
    for name, shape in reversed(stage.parameters):
        if name in left_out:
            continue
        if size >= limit:
            groups.append([])
            size = 0
        groups[-1].append((name, shape))
        size += _FP32 * math.prod(shape)
    found = []
    for number, group in enumerate(filter(None, groups)):
        last = group[-1][0]
        block = int(last.split(".")[1]) if last.startswith("blocks.") else None
        if block is None and not last.startswith("embed."):
            block = stage.blocks[-1]  # norm and head alone are ready when the last block's backward begins
        if not policy.codecs(axis, "all_reduce"):
            nbytes = sum(_FP32 * math.prod(shape) for _, shape in group)
            found.append(Bucket(number, block, cost(nbytes, NONE, None), 0))
            continue
        split = make_split(policy, axis, DType.FLOAT32, group, LATE, stage.index, hosts)
        costs = [cost(_FP32 * piece.size, piece.choice.codec, piece.choice.feedback) for piece in split.alone]
        coded = sum(piece.choice.codec != NONE for piece in split.alone)
        small = _FP32 * sum(piece.size for piece in split.small)
        if small:
            costs.append(cost(small, NONE, None))
        found.append(Bucket(number, block, sum(costs, NOTHING), coded))
    return found

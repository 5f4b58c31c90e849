"""Choose how many blocks of each stage keep their activations, and how many compute them again: after KARMA.

Wahib et al. 2020 (arXiv 2008.11421) choose for each layer to keep, to swap or to recompute. Blocks of a GPT are alike,
so only their number matters, and the smallest that fits is the fastest, since each costs a forward pass more and spares
the same bytes. The trainer swaps nothing; :mod:`.swap` predicts what that would save.
"""

from __future__ import annotations

import bisect
import dataclasses

from hybridcomp.policy import Policy
from hybridcomp_lab.planner.step.memory import memory_of
from hybridcomp_lab.planner.step.stages import stages_of
from hybridcomp_lab.train.config import TrainConfig

PLANNED = 0.95
"""Share of a rank's memory that a plan fills: the memory that libraries keep for themselves is not counted."""


def with_blocks(config: TrainConfig, count: int) -> TrainConfig:
    """Return a layout in which each stage computes its first ``count`` blocks again."""
    if count == 0:
        return dataclasses.replace(config, recompute="none", recompute_blocks=None)
    most = max(config.cut)
    return dataclasses.replace(config, recompute="blocks", recompute_blocks=None if count >= most else count)


def least_that_fits(config: TrainConfig, limit: float | None, policy: Policy) -> TrainConfig | None:
    """Return the layout with the least recomputation that fits a rank's memory; None if none does.

    Args:
        config: the layout.
        limit: bytes of memory of a rank; None: any layout fits.
        policy: policy whose error feedback keeps residuals.
    """
    if limit is None or needed(with_blocks(config, 0), policy) <= PLANNED * limit:
        return with_blocks(config, 0)
    room, most = PLANNED * limit, max(config.cut)
    partly = range(1, most)
    found = bisect.bisect_left(
        partly, True, key=lambda count: needed(with_blocks(config, count), policy) <= room
    )
    if found < len(partly):
        return with_blocks(config, partly[found])
    # With all blocks computed again, room for the activations of one of them comes on top.
    whole = with_blocks(config, most)
    return whole if needed(whole, policy) <= room else None


def least_of_all(config: TrainConfig, policy: Policy) -> tuple[float, TrainConfig]:
    """Return the fewest bytes of a rank's memory that a layout can do with, and the layout with that recomputation."""
    most = max(config.cut)
    options = (with_blocks(config, count) for count in (most - 1, most))
    return min(((needed(one, policy), one) for one in options), key=lambda pair: pair[0])


def needed(config: TrainConfig, policy: Policy) -> float:
    """Return the bytes that the fullest rank needs."""
    return memory_of(config, policy, stages_of(config)).total

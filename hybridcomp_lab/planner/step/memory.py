"""Count the bytes that a rank holds while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridcomp.policy import Policy
from hybridcomp_lab.planner.step.buckets import exchanged
from hybridcomp_lab.planner.step.orders import order
from hybridcomp_lab.planner.step.stages import StageShape, item_bytes, vocabulary
from hybridcomp_lab.train.config import TrainConfig

_FP32 = 4
_AHEAD = 3  # steps after which a schedule that does not empty the pipeline has filled it


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank's memory by purpose.

    Attributes:
        parameters: weights, in as many versions as the schedule keeps.
        gradients: gradients of the weights.
        moments: moments of the optimizer.
        activations: activations kept for backward passes, at their maximum.
        residuals: residuals of error feedback.
        buffers: messages on their way, and temporary tensors of one layer's passes.
    """

    parameters: float
    gradients: float
    moments: float
    activations: float
    residuals: float
    buffers: float

    @property
    def total(self) -> float:
        """Return the sum of all parts."""
        return (
            self.parameters + self.gradients + self.moments + self.activations + self.residuals + self.buffers
        )


def memory_of(config: TrainConfig, policy: Policy, stages: Sequence[StageShape]) -> Memory:
    """Return the memory of the fullest rank."""
    return max((_of(config, policy, stages, pp) for pp in range(config.pp)), key=lambda memory: memory.total)


def _of(config: TrainConfig, policy: Policy, stages: Sequence[StageShape], pp: int) -> Memory:
    mine = [stage for stage in stages if stage.index % config.pp == pp]
    weights = float(_FP32 * sum(stage.elements for stage in mine))
    versions = 2 if config.schedule == "2bw" else 1
    shards = config.dp if config.shard == "zero1" else 1
    sent, section = exchanged(config, policy)
    feedback = any(
        rule.feedback
        for one, axis in ((policy, "dp"), (sent, section))
        for rule in (one.base, *one.axes.values(), *one.entries.get(axis, {}).values())
    )
    message = config.micro_batch_size * config.seq_len * config.d_model * item_bytes(config)
    buffers = 2.0 * message * ((config.pp > 1) + (config.tp > 1))
    # The activations of a stage's last blocks are free again when the first blocks are computed again.
    if any(len(config.recomputed(stage.index)) == len(stage.blocks) for stage in mine):
        buffers += block_activations(config)
    return Memory(
        versions * weights,
        weights,
        _moments(config) * weights / shards,
        _most_kept(config, mine, pp),
        weights if feedback and config.dp > 1 else 0.0,
        buffers,
    )


def _moments(config: TrainConfig) -> int:
    """Return the number of values of a weight's size that the optimizer keeps."""
    if config.optimizer == "sgd":
        return 1 if config.momentum else 0
    return 2


def _most_kept(config: TrainConfig, mine: Sequence[StageShape], pp: int) -> float:
    """Return the most bytes of activations that wait for backward passes at once."""
    sizes = {stage.index: stage_activations(config, stage) for stage in mine}
    held = most = 0.0
    actions = order(config.schedule, pp, config.pp, config.virtual_stages, config.micro_batches, _AHEAD)
    for action in actions:
        if action.kind == "forward":
            held += sizes[action.stage]
            most = max(most, held)
        elif action.kind == "backward":
            held -= sizes[action.stage]
    return most


def stage_activations(config: TrainConfig, stage: StageShape) -> float:
    """Return the bytes that a forward pass of a stage keeps for its backward pass."""
    tokens = config.micro_batch_size * config.seq_len
    again = len(config.recomputed(stage.index))
    kept = again * float(tokens * config.d_model * item_bytes(config))
    kept += (len(stage.blocks) - again) * block_activations(config)
    if stage.has_head:  # the norm's input and output, the logits, and their logarithms of softmax
        kept += tokens * (2 * config.d_model * item_bytes(config) + 2 * vocabulary(config) * _FP32)
    return kept


def block_activations(config: TrainConfig) -> float:
    """Return the bytes that a block keeps: inputs of its norms and products, queries, keys, values, the MLP's inside.

    In units of the residual stream: the two norms' inputs and outputs (4), queries, keys and values (3), attention's
    output (1, and 1 as the next product's input), the GELU's input and output (4 each). All but the first four are
    split over tp. With sequence parallelism the norms' inputs are too, and their outputs are gathered for the products,
    which keep them whole.
    """
    unit = config.micro_batch_size * config.seq_len * config.d_model * item_bytes(config)
    whole = 2 + 2 / config.tp if config.sequence_parallel else 4.0
    return unit * (whole + 13 / config.tp)

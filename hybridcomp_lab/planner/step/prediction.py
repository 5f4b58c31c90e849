"""Predict a training step on a cluster."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from hybridcomp.errors import ConfigError
from hybridcomp.policy import Policy, load_policy
from hybridcomp_lab.planner.cluster import Cluster
from hybridcomp_lab.planner.step.memory import Memory, memory_of
from hybridcomp_lab.planner.step.programs import Compute, Program, Start
from hybridcomp_lab.planner.step.replay import Replay, Span, unsynchronised
from hybridcomp_lab.planner.step.writing import Writer
from hybridcomp_lab.train.checks import check_config
from hybridcomp_lab.train.config import CYCLIC, TrainConfig

_AHEAD = 4  # steps of schedules that go on into the next one; the last ones are as all others


@dataclass(frozen=True)
class StepPrediction:
    """Prediction of one training step.

    Attributes:
        seconds: seconds from one step to the next.
        samples_per_second: sequences per second of all replicas.
        compute: seconds of a processor for which the busiest rank computes.
        exposed: seconds by axis for which a rank's computation waits for messages; of the rank that waits longest.
            ``world`` is the wait for all ranks' reports at the step's end.
        wire_bytes: bytes of a step by axis, as sent by the busiest rank.
        memory: memory of the fullest rank.
        spans: spans of each rank of the pipeline in the step, for the first replica and part.
        unsynchronised: seconds of the same step if no rank waited for another: a baseline, by which no plan is chosen.
    """

    seconds: float
    samples_per_second: float
    compute: float
    exposed: Mapping[str, float]
    wire_bytes: Mapping[str, float]
    memory: Memory
    spans: tuple[Span, ...]
    unsynchronised: float = math.nan


def predict_step(config: TrainConfig, cluster: Cluster, policy: Policy | None = None) -> StepPrediction:
    """Predict a step of a configuration.

    Args:
        config: model and its layout.
        cluster: cluster that it runs on, with exactly as many ranks as the layout needs.
        policy: policy of the messages; None: the one that ``config.policy`` names.

    Raises:
        ConfigError: the configuration is wrong, does not fit the cluster, or is one that cannot be predicted.
        PolicyError: there is no such policy.
    """
    check_config(config)
    if config.ranks != cluster.ranks:
        raise ConfigError(
            f"dp * pp * tp ({config.ranks}) must be the cluster's number of ranks, "
            f"{cluster.hosts} hosts * {cluster.ranks_per_host} = {cluster.ranks}"
        )
    if config.schedule in CYCLIC:
        raise ConfigError(
            f"schedule {config.schedule} is not predicted; allowed: gpipe, 1f1b, interleaved, 2bw, local"
        )
    if config.sync is not None:
        raise ConfigError(
            f"steps of replicas that synchronise rarely are not predicted: leave sync {config.sync} out"
        )
    if config.tp_autoencoder:
        raise ConfigError(
            f"steps with an autoencoder are not predicted: leave tp_autoencoder {config.tp_autoencoder} out"
        )
    if config.synthetic_labels:
        raise ConfigError("steps with synthetic labels are not predicted: leave synthetic_labels out")
    if config.pp_neurons:
        raise ConfigError(
            f"steps whose stages send a share of the values are not predicted: leave pp_neurons {config.pp_neurons} out"
        )
    rules = load_policy(config.policy or "hybrid") if policy is None else policy
    steps = _AHEAD if config.schedule in ("2bw", "local") else 1
    writer = Writer(config, cluster, rules)
    programs = writer.programs(steps)
    replayed = Replay(programs, cluster.cores, cluster.waiting).run()
    first, last = _period(replayed.marks)
    length = last - first
    counted = max(1, len(replayed.marks) // 2)
    exposed: dict[str, float] = {}
    waits: dict[tuple[int, str], float] = defaultdict(float)
    for program, axis, begin, end in replayed.waits:
        waits[program, axis] += max(0.0, min(end, last) - max(begin, first)) / counted
    for (_, axis), seconds in waits.items():
        exposed[axis] = max(exposed.get(axis, 0.0), seconds)
    step = length / counted
    return StepPrediction(
        step,
        config.dp * config.replica_batch / step,
        max(_computed(program) for program in programs) / steps,
        exposed,
        _wire(programs, steps),
        memory_of(config, rules, writer.stages),
        tuple(
            Span(s.rank, s.stream, s.name, max(s.begin, first) - first, min(s.end, last) - first)
            for s in replayed.spans
            if s.end > first and s.begin < last
        ),
        unsynchronised(programs, cluster.cores, steps),
    )


def _period(marks: Mapping[int, float]) -> tuple[float, float]:
    """Return the times between which steps are as all others: the second half of them."""
    ends = [marks[step] for step in sorted(marks)]
    if len(ends) == 1:
        return 0.0, ends[0]
    return ends[len(ends) - len(ends) // 2 - 1], ends[-1]


def _computed(program: Program) -> float:
    return sum(i.seconds / program.speed for i in program.instructions if isinstance(i, Compute))


def _wire(programs: list[Program], steps: int) -> dict[str, float]:
    most: dict[str, float] = {}
    for program in programs:
        sent: dict[str, float] = defaultdict(float)
        for instruction in program.instructions:
            if isinstance(instruction, Start):
                sent[instruction.axis] += instruction.cost.wire / steps
        for axis, nbytes in sent.items():
            most[axis] = max(most.get(axis, 0.0), nbytes)
    return most

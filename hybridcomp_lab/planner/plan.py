"""Define a plan: a layout, a codec for each axis, and the prediction of its step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridcomp.arrays import DType
from hybridcomp.errors import ConfigError
from hybridcomp.files import write_text
from hybridcomp.policy import Message
from hybridcomp.policy.message import MOMENTUM
from hybridcomp_lab.planner.budget import NONE, AxisCodec, policy_of, policy_text
from hybridcomp_lab.planner.step.buckets import exchanged
from hybridcomp_lab.planner.step.messages import LATE
from hybridcomp_lab.planner.step.prediction import StepPrediction
from hybridcomp_lab.train.config import EXCHANGE_MOMENTA, TrainConfig
from hybridcomp_lab.train.reading import to_toml

_ALWAYS = ("dp", "pp", "tp", "schedule", "micro_batches", "micro_batch_size", "recompute")
_UNWRITTEN = ("config", "policy", "global_batch")


@dataclass(frozen=True)
class Plan:
    """Way to run a job.

    Attributes:
        config: layout.
        codecs: codec of each axis.
        prediction: prediction of a step.
    """

    config: TrainConfig
    codecs: Mapping[str, AxisCodec]
    prediction: StepPrediction

    @property
    def used(self) -> dict[str, AxisCodec]:
        """Return the codecs of the axes that send anything."""
        return {axis: codec for axis, codec in self.codecs.items() if getattr(self.config, axis, 2) > 1}

    @property
    def compresses(self) -> bool:
        """Tell whether any axis has a codec other than ``none``."""
        return any(codec != NONE for codec in self.used.values())

    @property
    def codec_names(self) -> dict[str, str]:
        """Return the names of these codecs; where replicas exchange momenta, dp's is the warm-up's."""
        names = {axis: codec.name for axis, codec in self.used.items()}
        if "dp" in names and self.config.optimizer in EXCHANGE_MOMENTA:
            sent, section = exchanged(self.config, policy_of(self.codecs))
            large = Message(
                section, "all_reduce", "backward", DType.FLOAT32, 2**40, step=LATE, shape=(2**19, 2**19)
            )
            choice = sent.choose(large)
            names[MOMENTUM] = " + ".join(filter(None, (choice.codec.name, choice.feedback)))
        return names

    def record(self, best: float) -> dict[str, Any]:
        """Return the plan in JSON's types; seconds, bytes, samples/s.

        Args:
            best: samples/s of the best plan.
        """
        config, found = self.config, self.prediction
        fields = (
            "pp",
            "dp",
            "tp",
            "schedule",
            "virtual_stages",
            "micro_batches",
            "micro_batch_size",
            "recompute",
            "recompute_blocks",
            *(["stage_layers"] if config.stage_layers is not None else []),
        )
        return {
            **{name: getattr(config, name) for name in fields},
            "codecs": self.codec_names,
            "samples_per_second": found.samples_per_second,
            "share_of_best": found.samples_per_second / best,
            "step_seconds": found.seconds,
            "compute_seconds": found.compute,
            "exposed_seconds": dict(found.exposed),
            "wire_bytes": dict(found.wire_bytes),
            "memory_bytes": dataclasses.asdict(found.memory) | {"total": found.memory.total},
        }


def write_plan(plan: Plan, path: Path, heading: str) -> list[Path]:
    """Write the trainer's configuration of a plan, and its policy beside it.

    Args:
        plan: plan to write.
        path: path of the configuration, ``NAME.toml``; the policy becomes ``NAME.policy.toml``.
        heading: comment at the top of both files.

    Returns:
        The paths of the files.

    Raises:
        ConfigError: the path has another suffix, or a file cannot be written.
    """
    if path.suffix != ".toml":
        raise ConfigError(f"--write {path}: its suffix must be .toml")
    policy = path.with_suffix(".policy.toml")
    defaults = TrainConfig()
    fields = {
        field.name: getattr(plan.config, field.name)
        for field in dataclasses.fields(plan.config)
        if field.name not in _UNWRITTEN
        and (field.name in _ALWAYS or getattr(plan.config, field.name) != getattr(defaults, field.name))
    }
    # Keep the path as given: relative to the directory in which the training starts.
    fields["policy"] = str(policy) if plan.compresses else "none"
    texts = {path: f"# {heading}\n{to_toml(fields)}"}
    if plan.compresses:
        texts[policy] = f"# {heading}\n{policy_text(plan.used)}"
    for file, text in texts.items():
        write_text(file, text)
    return list(texts)


def best_of(plans: Sequence[Plan]) -> float:
    """Return the samples/s of the fastest plan."""
    return max(plan.prediction.samples_per_second for plan in plans)

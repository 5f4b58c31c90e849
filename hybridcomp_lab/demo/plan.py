"""Define the runs of the demonstration: the cluster, the model, the policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridcomp.errors import ConfigError
from hybridcomp.policy import load_policy

BASELINE = "none"
UNSHAPED = "unshaped"


@dataclass(frozen=True)
class Run:
    """Training run of the demonstration.

    Attributes:
        name: name of the run and of its directory.
        policy: policy that the run compresses by.
        rate: speed of the links, "none" when they are unshaped.
        steps: optimizer steps.
    """

    name: str
    policy: str
    rate: str
    steps: int


@dataclass(frozen=True, kw_only=True)
class DemoPlan:
    """Cluster, model and policies of the demonstration; runs differ in policy, rate and steps alone.

    The defaults are short: starting ranks takes a good part of their time.
    """

    hosts: int = 4
    ppn: int = 1
    rate: str = "200mbit"
    pp: int = 2
    dp: int = 2
    tp: int = 1

    layers: int = 8
    d_model: int = 256
    heads: int = 4
    seq_len: int = 128
    micro_batches: int = 2
    micro_batch_size: int = 1
    lr: float = 1e-3
    seed: int = 1
    data: str | None = None

    steps: int = 30
    warmup_steps: int = 12
    evaluations: int = 2  # number over the run, the last at its end
    eval_batches: int = 8
    policies: tuple[str, ...] = (BASELINE, "naive", "hybrid")
    unshaped_steps: int = 10  # steps of the baseline without the link's limit: enough to time one

    def check(self) -> None:
        """Raise ConfigError or PolicyError where the plan cannot be run or compared."""
        if self.pp * self.dp * self.tp != self.hosts * self.ppn:
            raise ConfigError(
                f"pp * dp * tp is {self.pp * self.dp * self.tp}, "
                f"but hosts * ppn is {self.hosts * self.ppn}: there is one rank for each part of the mesh"
            )
        if self.steps < 10:
            raise ConfigError(f"the demonstration takes at least 10 steps to tell anything, not {self.steps}")
        if BASELINE not in self.policies:
            raise ConfigError(f"policies must hold {BASELINE!r}: the others are compared with it")
        if len(set(self.policies)) != len(self.policies):
            raise ConfigError("a policy is named twice")
        for name in self.policies:
            load_policy(name)
        if wrong := [name for name in self.policies if not name.replace("-", "").replace("_", "").isalnum()]:
            raise ConfigError(f"policies of the demonstration are presets by name, not {wrong[0]!r}")

    def runs(self, *, shaped: bool = True) -> list[Run]:
        """Return the runs in order; the baseline's unshaped one comes first, where links can be shaped."""
        comparison = [Run(policy, policy, self.rate, self.steps) for policy in self.policies]
        if not shaped:
            return comparison
        return [Run(UNSHAPED, BASELINE, "none", min(self.unshaped_steps, self.steps)), *comparison]

    def command(self, run: Run, out: Path) -> list[str]:
        """Return the command line of one rank of ``run``, which writes into ``out``."""
        values: dict[str, object] = {
            "pp": self.pp,
            "dp": self.dp,
            "tp": self.tp,
            "policy": run.policy,
            "layers": self.layers,
            "d-model": self.d_model,
            "heads": self.heads,
            "seq-len": self.seq_len,
            "micro-batches": self.micro_batches,
            "micro-batch-size": self.micro_batch_size,
            "lr": self.lr,
            "warmup-steps": self.warmup_steps,
            "seed": self.seed,
            "steps": run.steps,
            "eval-every": max(1, self.steps // self.evaluations) if run.name != UNSHAPED else 0,
            "eval-batches": self.eval_batches if run.name != UNSHAPED else 1,
            "out": out,
        }
        if self.data is not None:
            values["data"] = self.data
        return [
            "hybridcomp",
            "train",
            *(text for name, value in values.items() for text in _flag(name, value)),
        ]

    @property
    def tokens_per_step(self) -> int:
        """Return the number of tokens in one optimizer step."""
        return self.dp * self.micro_batches * self.micro_batch_size * self.seq_len

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the axes of the mesh that have more than one rank."""
        return tuple(axis for axis in ("dp", "pp", "tp") if getattr(self, axis) > 1)


FULL = DemoPlan(ppn=2, tp=2, steps=100, evaluations=5, unshaped_steps=15)
"""Plan of the README: tensor parallelism inside each host, the other axes between hosts, and more steps."""


def _flag(name: str, value: object) -> Sequence[str]:
    return (f"--{name}", str(value))

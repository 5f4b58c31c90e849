"""Define the runs of a study: variants, each for its loss over seeds and for its speed over links."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hybridcomp.results.record import SETTLING_STEPS
from hybridcomp_lab.train.config import TrainConfig
from hybridcomp_lab.train.sync import parse_sync

Fields = Mapping[str, Any]
"""Fields of :class:`~hybridcomp_lab.train.config.TrainConfig`."""


@dataclass(frozen=True)
class Variant:
    """Configuration that is compared with others.

    Attributes:
        name: name in tables and pictures.
        fields: fields of the trainer, beyond those that all variants share; ``policy`` may name one of the study's.
        series: place that is compressed, in a sweep; None outside a sweep.
        codec: spec of the codec, in a sweep.
        parts: parts that are measured of it.
    """

    name: str
    fields: Fields
    series: str | None = None
    codec: str | None = None
    parts: tuple[str, ...] = ("loss", "speed")


@dataclass(frozen=True)
class Loss:
    """Runs for the loss: links unshaped, for the loss does not depend on them.

    Attributes:
        seeds: seeds, with each of which each variant runs once.
        fields: fields of the trainer.
    """

    seeds: tuple[int, ...]
    fields: Fields


@dataclass(frozen=True)
class Speed:
    """Runs for the speed: short, all variants in turn, several rounds of that, at every rate.

    Attributes:
        rates: rates of the links, as :class:`~hybridcomp.net.Rate` has them.
        rounds: number of runs of each variant at each rate.
        fields: fields of the trainer.
        cores: cores of the hosts, as :func:`~hybridcomp.net.hosts.cores_of` reads them; None: all of this machine's.
    """

    rates: tuple[str, ...]
    rounds: int
    fields: Fields
    cores: str | None = None


Kind = Literal["faster", "lower_loss", "same_loss", "fewer_bytes"]


@dataclass(frozen=True)
class Expectation:
    """Expected result of a study: of two variants, the first is better, or as good.

    Attributes:
        kind: ``faster``: more tokens per second at ``rate``; ``lower_loss``: the mean over the seeds;
            ``same_loss``: the mean of the differences in pairs of the same seed is at most ``within`` of the other's
            mean; ``fewer_bytes``: sent per step on ``axis``, or on all axes.
        variants: names of the two variants.
        rate: rate of the links, for ``faster``.
        axis: axis for ``fewer_bytes``; None: all.
        by: smallest sufficient ratio, for ``faster`` and ``fewer_bytes``.
        within: largest sufficient difference, for ``same_loss``, as a share of the other's mean loss.
    """

    kind: Kind
    variants: tuple[str, str]
    rate: str | None = None
    axis: str | None = None
    by: float = 1.0
    within: float = 0.005


@dataclass(frozen=True)
class Run:
    """Training run of a study.

    Attributes:
        variant: variant that runs.
        part: ``loss`` or ``speed``.
        rate: rate of the links.
        number: seed of a run for the loss, round from 1 of one for the speed.
        fields: fields of the trainer that are not at their defaults.
        cores: cores of the hosts, as :class:`Speed` has them.
    """

    variant: Variant
    part: Literal["loss", "speed"]
    rate: str
    number: int
    fields: Fields
    cores: str | None = None

    @property
    def name(self) -> str:
        """Return the run's name, for people, and, made safe, for its folder."""
        what = f"seed {self.number}" if self.part == "loss" else f"{self.rate} round {self.number}"
        return f"{self.part} {self.variant.name} {what}"

    @property
    def folder(self) -> str:
        """Return the name of this run's own folder: readable, and different where the names are."""
        safe = re.sub(r"[^A-Za-z0-9.=-]+", "_", self.name)
        return f"{safe}-{hashlib.sha256(self.name.encode()).hexdigest()[:6]}"

    @property
    def steps(self) -> int:
        """Return the number of optimizer steps."""
        return int(self.fields.get("steps", TrainConfig.steps))

    def command(self, out: Path, policies: Mapping[str, Path]) -> list[str]:
        """Return the command line of one rank, which writes into ``out``; ``policies`` are files of the study's own."""
        values = dict(self.fields)
        policy = str(values.get("policy"))
        if policy in policies:
            values["policy"] = str(policies[policy])
        if values.get("checkpoint_every"):
            values["resume"] = "auto"
        values["out"] = str(out)
        return ["hybridcomp", "train", *(text for key, value in values.items() for text in _flag(key, value))]


def _flag(key: str, value: object) -> list[str]:
    name = key.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", str(value)]


def _with_whole_rounds(fields: Fields) -> int:
    """Return the number of steps to time: the steps asked for, or one round of rare synchronisations after settling."""
    every, asked = parse_sync(str(fields["sync"])).every, int(fields.get("steps", TrainConfig.steps))
    # All parameters are averaged after the last step, which is in no round.
    return max(asked, SETTLING_STEPS + every + 1)


@dataclass(frozen=True, kw_only=True)
class Study:
    """Study that can run.

    Attributes:
        name: name of its file, without the suffix.
        title: title of the report.
        about: paragraph for the report.
        hosts: number of the lab's hosts.
        ppn: ranks on each host.
        baseline: name of the variant that the others are compared with.
        fields: fields of the trainer, for all runs.
        variants: variants in the order of the tables.
        policies: TOML texts of the study's own policies, by name.
        loss: runs for the loss, or None.
        speed: runs for the speed, or None.
        expectations: results that the study is to show.
    """

    name: str
    title: str
    about: str
    hosts: int
    ppn: int
    baseline: str
    fields: Fields
    variants: tuple[Variant, ...]
    policies: Mapping[str, str] = field(default_factory=dict)
    loss: Loss | None = None
    speed: Speed | None = None
    expectations: tuple[Expectation, ...] = ()

    def runs(self, part: str | None = None) -> list[Run]:
        """Return all runs in order, or those of one part: seed by seed, then rate by rate and round by round.

        A round goes through the variants in the opposite order of the one before, so that a machine which grows
        slower is slower for all alike.
        """
        runs: list[Run] = []
        if self.loss is not None and part in (None, "loss"):
            for seed in self.loss.seeds:
                for variant in self.of("loss"):
                    given = {**self.fields, **variant.fields, **self.loss.fields, "seed": seed}
                    runs.append(Run(variant, "loss", "none", seed, given))
        if self.speed is not None and part in (None, "speed"):
            for rate in self.speed.rates:
                for number in range(1, self.speed.rounds + 1):
                    for variant in self.of("speed")[:: 1 if number % 2 else -1]:
                        given = {**self.fields, **variant.fields, "eval_batches": 0, **self.speed.fields}
                        if given.get("sync") is not None:
                            given["steps"] = _with_whole_rounds(given)
                        runs.append(Run(variant, "speed", rate, number, given, self.speed.cores))
        return runs

    def of(self, part: str) -> tuple[Variant, ...]:
        """Return the variants for which a part is measured."""
        return tuple(variant for variant in self.variants if part in variant.parts)

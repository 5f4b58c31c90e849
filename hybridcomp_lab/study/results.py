"""Evaluate a study's runs: losses over seeds, speeds over links, and whether its expectations held."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hybridcomp.results.pairs import paired
from hybridcomp.results.record import SETTLING_STEPS
from hybridcomp_lab.study.plan import Expectation, Study
from hybridcomp_lab.study.runner import Done
from hybridcomp_lab.train.sync import parse_sync


@dataclass(frozen=True)
class Losses:
    """Validation losses of a variant at the end of its runs.

    Attributes:
        by_seed: nats per token; NaN for a run that diverged.
        gap: mean over the seeds of the loss above the baseline's with the same seed; NaN if one diverged.
        gaps: loss above the baseline's, seed by seed.
        curve: mean over the seeds at each evaluation, by step.
        wire_bytes: bytes sent by all ranks, per step and axis, mean over the seeds.
        plain_bytes: the same uncompressed.
        suppressed: share of messages that replicas with events did not send; None without events.
    """

    by_seed: Mapping[int, float]
    gap: float
    gaps: Mapping[int, float]
    curve: Mapping[int, float]
    wire_bytes: Mapping[str, float] = field(default_factory=dict)
    plain_bytes: Mapping[str, float] = field(default_factory=dict)
    suppressed: float | None = None

    @property
    def mean(self) -> float:
        """Return the mean over the seeds."""
        return statistics.fmean(self.by_seed.values())

    @property
    def spread(self) -> float:
        """Return the standard deviation over the seeds; 0 for one seed, NaN if one diverged."""
        values = list(self.by_seed.values())
        if not all(math.isfinite(value) for value in values):
            return math.nan
        return statistics.stdev(values) if len(values) > 1 else 0.0


@dataclass(frozen=True)
class Speeds:
    """Speeds of a variant at one rate.

    Attributes:
        samples_per_s: sequences per second, the median of the rounds.
        ratio: ``samples_per_s`` over the baseline's of the same round, the median; 1 for the baseline.
        ratios: ratios round by round.
        step_seconds: median of all settled steps; of means over rounds where replicas synchronise rarely.
        wire_bytes: bytes sent by all ranks, per step and axis.
        plain_bytes: the same uncompressed.
        gradient_bytes: most bytes of gradients, or of data in their place, that a rank held at once; 0 if not known.
    """

    samples_per_s: float
    ratio: float
    ratios: Sequence[float]
    step_seconds: float
    wire_bytes: Mapping[str, float]
    plain_bytes: Mapping[str, float]
    gradient_bytes: int = 0


@dataclass(frozen=True)
class Verdict:
    """Verdict on an expectation.

    Attributes:
        expectation: expectation that it is about.
        held: whether the expectation held.
        sentence: verdict in words, with the figures.
    """

    expectation: Expectation
    held: bool
    sentence: str


@dataclass(frozen=True)
class Results:
    """Results of all runs that have ended.

    Attributes:
        study: study of the runs.
        kind: kind of the lab.
        losses: losses by variant.
        speeds: speeds by rate, then by variant.
        verdicts: verdicts on the expectations whose runs have all ended.
        parameters: number of the model's parameters.
        commands: command lines that repeat the runs, by name of the run.
        commits: commits whose code ran, in the order of the runs; an empty one is of runs of which it is not known.
    """

    study: Study
    kind: str
    losses: Mapping[str, Losses]
    speeds: Mapping[str, Mapping[str, Speeds]]
    verdicts: Sequence[Verdict] = ()
    parameters: int = 0
    commands: Mapping[str, str] = field(default_factory=dict)
    commits: Sequence[str] = ()


def results_of(study: Study, runs: Sequence[Done]) -> Results:
    """Collect the results of the runs; variants or rates with missing runs are left out."""
    losses = _losses(study, runs)
    speeds = {rate: _speeds(study, runs, rate) for rate in (study.speed.rates if study.speed else ())}
    found = [_verdict(expectation, losses, speeds) for expectation in study.expectations]
    return Results(
        study,
        runs[0].kind if runs else "",
        losses,
        {rate: rows for rate, rows in speeds.items() if rows},
        [verdict for verdict in found if verdict is not None],
        max((int(done.record.start.get("parameters", 0)) for done in runs), default=0),
        {done.run.name: done.command for done in runs},
        tuple(dict.fromkeys(done.commit for done in runs)),
    )


def _losses(study: Study, runs: Sequence[Done]) -> dict[str, Losses]:
    seeds = study.loss.seeds if study.loss else ()
    found = {(d.run.variant.name, d.run.number): d for d in runs if d.run.part == "loss"}
    result = {}
    for variant in study.of("loss"):
        mine = {seed: found.get((variant.name, seed)) for seed in seeds}
        base = {seed: found.get((study.baseline, seed)) for seed in seeds}
        ended = {seed: done for seed, done in mine.items() if done is not None}
        if not ended or len(ended) < len(seeds):
            continue
        by_seed = {seed: _loss(done) for seed, done in ended.items()}
        gaps = {
            seed: value - _loss(done) for seed, value in by_seed.items() if (done := base[seed]) is not None
        }
        gap = statistics.fmean(gaps.values()) if gaps else math.nan
        runs_of_it = list(ended.values())
        result[variant.name] = Losses(
            by_seed,
            gap,
            gaps,
            _curve(runs_of_it),
            _mean_bytes(runs_of_it, "wire_bytes"),
            _mean_bytes(runs_of_it, "plain_bytes"),
            _suppressed(runs_of_it),
        )
    return result


def _mean_bytes(runs: Sequence[Done], kind: str) -> dict[str, float]:
    each = [_bytes(done, kind) for done in runs if not done.diverged]
    return {axis: statistics.fmean(one[axis] for one in each) for axis in (each[0] if each else ())}


def _suppressed(runs: Sequence[Done]) -> float | None:
    shares = [done.record.summary.get("replicas", {}).get("suppressed") for done in runs if not done.diverged]
    known = [float(share) for share in shares if share is not None]
    return statistics.fmean(known) if known else None


def _loss(done: Done) -> float:
    return math.nan if done.diverged else done.record.val_loss


def _curve(runs: Sequence[Done]) -> dict[int, float]:
    curves = [{row["step"]: row["loss"] for row in done.record.evaluations} for done in runs]
    common = [step for step in curves[0] if all(step in curve for curve in curves)]
    return {step: statistics.fmean(curve[step] for curve in curves) for step in common}


def _speeds(study: Study, runs: Sequence[Done], rate: str) -> dict[str, Speeds]:
    by_variant: dict[str, dict[int, Done]] = {}
    for done in runs:
        if done.run.part == "speed" and done.run.rate == rate and not done.diverged:
            by_variant.setdefault(done.run.variant.name, {})[done.run.number] = done
    base = {number: _samples_per_s(done) for number, done in by_variant.get(study.baseline, {}).items()}
    result = {}
    for variant in study.of("speed"):
        mine = by_variant.get(variant.name, {})
        each = {number: _samples_per_s(done) for number, done in mine.items()}
        ratios = [value / base[number] for number, value in each.items() if number in base]
        if not ratios:
            continue
        last = max(mine.items())[1]
        result[variant.name] = Speeds(
            statistics.median(each.values()),
            statistics.median(ratios),
            ratios,
            statistics.median(seconds for done in mine.values() for seconds in _step_seconds(done)),
            _bytes(last, "wire_bytes"),
            _bytes(last, "plain_bytes"),
            max(last.record.summary.get("gradient_bytes", [0])),
        )
    return result


def _step_seconds(done: Done) -> list[float]:
    """Return the seconds whose median counts: of settled steps, or means over rounds of rare synchronisations."""
    seconds = [float(row["step_seconds"]) for row in done.record.train]
    every, rounds = _rounds(done)
    if rounds:
        starts = range(SETTLING_STEPS, SETTLING_STEPS + rounds * every, every)
        return [statistics.fmean(seconds[first : first + every]) for first in starts]
    return seconds[SETTLING_STEPS:] or seconds


def _bytes(done: Done, kind: str) -> dict[str, float]:
    """Return the bytes of all ranks, per step and axis."""
    every, rounds = _rounds(done)
    if rounds:
        first = SETTLING_STEPS - 1
        before, after = (done.record.train[step][kind] for step in (first, first + rounds * every))
        return {axis: (count - before[axis]) / (rounds * every) for axis, count in after.items()}
    summary = done.record.summary
    return {axis: count / int(summary["steps"]) for axis, count in summary[kind].items()}


def _rounds(done: Done) -> tuple[int, int]:
    """Return the steps from one rare synchronisation to the next, and how many such rounds follow the first steps."""
    sync = done.record.start["config"].get("sync")
    if sync is None:
        return 1, 0
    every = parse_sync(sync).every
    # Any steps in a row, as many as a round has, synchronise each parameter once. After the last step of all comes one
    # more average, which is in no round.
    return every, max(0, len(done.record.train) - SETTLING_STEPS - 1) // every


def _samples_per_s(done: Done) -> float:
    config = done.record.start["config"]
    # The median step, not the mean: another process of this machine that takes the cores for a moment should
    # not be charged to a variant.
    return float(
        done.record.train[-1]["tokens"]
        / done.record.train[-1]["step"]
        / config["seq_len"]
        / statistics.median(_step_seconds(done))
    )


def _verdict(
    expectation: Expectation, losses: Mapping[str, Losses], speeds: Mapping[str, Mapping[str, Speeds]]
) -> Verdict | None:
    first, second = expectation.variants
    if expectation.kind.endswith("loss"):
        if first not in losses or second not in losses:
            return None
        return _loss_verdict(expectation, losses[first], losses[second])
    rows = speeds.get(expectation.rate or next(iter(speeds), ""), {})
    if first not in rows or second not in rows:
        return None
    return _speed_verdict(expectation, rows[first], rows[second])


def _loss_verdict(expectation: Expectation, mine: Losses, other: Losses) -> Verdict:
    first, second = expectation.variants
    what = f"{first} {mine.mean:.4f}, {second} {other.mean:.4f}"
    if expectation.kind == "lower_loss":
        # A loss that diverged is above every other.
        held = math.isfinite(mine.mean) and not other.mean <= mine.mean
        return Verdict(expectation, held, f"{first} ends at a lower loss than {second}: {what}")
    gap, noise = paired(
        [mine.by_seed[seed] - other.by_seed[seed] for seed in other.by_seed if seed in mine.by_seed]
    )
    share = gap / other.mean
    told = f" ± {noise:.4f}" if math.isfinite(noise) else ""
    return Verdict(
        expectation,
        share <= expectation.within,
        f"{first} ends at the loss of {second}, within {expectation.within:.1%} of it: {share:+.2%}, in pairs of a "
        f"seed {gap:+.4f}{told} ({what})",
    )


def _speed_verdict(expectation: Expectation, mine: Speeds, other: Speeds) -> Verdict:
    first, second = expectation.variants
    if expectation.kind == "faster":
        ratio = statistics.median(a / b for a, b in zip(mine.ratios, other.ratios, strict=False))
        what = f"{first} is faster than {second} at {expectation.rate}: {ratio:.2f} times"
    else:
        axes = [expectation.axis] if expectation.axis else list(mine.wire_bytes)
        ratio = sum(other.wire_bytes[a] for a in axes) / max(1.0, sum(mine.wire_bytes[a] for a in axes))
        where = f" on {expectation.axis}" if expectation.axis else ""
        what = f"{first} sends fewer bytes than {second}{where}: {ratio:.2f} times"
    asked = f" (asked: {expectation.by:g})" if expectation.by != 1 else ""
    return Verdict(expectation, ratio >= expectation.by, what + asked)

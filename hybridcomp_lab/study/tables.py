"""Make a study's tables, for the terminal, for Markdown and for the report's page."""

from __future__ import annotations

import math

from hybridcomp.style import Table
from hybridcomp_lab.study.results import Losses, Results, Speeds


def tables(results: Results) -> list[Table]:
    """Make the tables for which the runs have figures."""
    made = [_speed(results, rate) for rate in results.speeds]
    if results.losses:
        made.insert(0, _loss(results))
    return made


def _loss(results: Results) -> Table:
    seeds = results.study.loss.seeds if results.study.loss else ()
    rows = []
    by_events = any(losses.suppressed is not None for losses in results.losses.values())
    for name, losses in results.losses.items():
        sent = sum(losses.wire_bytes.values())
        rows.append(
            [
                name,
                _nats(losses.mean),
                f"{losses.spread:.4f}" if math.isfinite(losses.spread) else "",
                "" if name == results.study.baseline else _gap(losses),
                *(_nats(losses.by_seed[seed]) for seed in seeds),
                _megabytes(sent) if sent else "",
                _times(losses),
                *([_share(losses.suppressed)] if by_events else []),
            ]
        )
    steps = (
        results.study.loss.fields.get("steps", results.study.fields.get("steps")) if results.study.loss else 0
    )
    return Table(
        f"Validation loss after {steps} steps",
        (
            "variant",
            "mean",
            "spread",
            f"above {results.study.baseline}",
            *(f"seed {seed}" for seed in seeds),
            "MB",
            "ratio",
            *(["suppressed"] if by_events else []),
        ),
        rows,
        "Nats per token on held-out text. Spread: standard deviation over the seeds. Above: mean of the differences "
        "to the baseline's run of the same seed, and their smallest and largest. MB: 10^6 bytes that all ranks send in "
        "a step, the mean over all steps. Ratio: uncompressed bytes over those."
        + (" Suppressed: share of messages that were not sent." if by_events else ""),
    )


def _gap(losses: Losses) -> str:
    if not math.isfinite(losses.gap):
        return "diverged"
    low, high = min(losses.gaps.values()), max(losses.gaps.values())
    return f"{losses.gap:+.4f} ({low:+.4f} to {high:+.4f})"


def _nats(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "diverged"


def _speed(results: Results, rate: str) -> Table:
    rows = []
    axes = next(iter(results.speeds[rate].values())).wire_bytes
    # Where all runs hold the same bytes, the column is left out.
    holds = len({speeds.gradient_bytes for speeds in results.speeds[rate].values()}) > 1
    for name, speeds in results.speeds[rate].items():
        rows.append(
            [
                name,
                f"{speeds.samples_per_s:,.1f}",
                _ratio(speeds),
                f"{speeds.step_seconds * 1e3:,.0f}",
                *(_megabytes(speeds.wire_bytes[axis]) for axis in axes),
                _times(speeds),
                *([_megabytes(speeds.gradient_bytes)] if holds else []),
            ]
        )
    where = "links unshaped" if rate == "none" else f"links at {rate}"
    return Table(
        f"Speed, {where}",
        (
            "variant",
            "samples/s",
            f"x {results.study.baseline}",
            "step ms",
            *(f"{axis} MB" for axis in axes),
            "ratio",
            *(["gradients MB"] if holds else []),
        ),
        rows,
        "Samples are sequences. x: the ratio to the baseline's run of the same round, the median and, in brackets, the "
        "smallest and the largest. MB: 10^6 bytes that all ranks send in a step. Ratio: uncompressed bytes over those."
        + (
            " Gradients: 10^6 bytes that a rank holds of them, or of their factors, at most." if holds else ""
        ),
    )


def _ratio(speeds: Speeds) -> str:
    if all(ratio == 1 for ratio in speeds.ratios):
        return "1"
    return f"{speeds.ratio:.3f} ({min(speeds.ratios):.3f} to {max(speeds.ratios):.3f})"


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.3g}"


def _times(sent_by: Speeds | Losses) -> str:
    sent = sum(sent_by.wire_bytes.values())
    return f"{sum(sent_by.plain_bytes.values()) / sent:.2f}" if sent else ""


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"

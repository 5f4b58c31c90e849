"""Compare the demonstration's runs: a table, its interpretation in words, and files of both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hybridcomp.results.record import RunRecord
from hybridcomp_lab.demo.plan import BASELINE, UNSHAPED
from hybridcomp_lab.demo.runner import Outcome


@dataclass(frozen=True)
class Row:
    """One policy beside the baseline.

    Attributes:
        name: name of the policy.
        tokens_per_s: tokens per second of training.
        speedup: ``tokens_per_s`` over the baseline's.
        val_loss: nats per token on held-out text, at the end; NaN or infinite when it diverged.
        loss_change: relative difference to the baseline's, 0.01 is 1 % worse; NaN when it diverged.
        wire_bytes: bytes sent by all ranks, per axis.
        seconds: seconds of training, without evaluations.
    """

    name: str
    tokens_per_s: float
    speedup: float
    val_loss: float
    loss_change: float
    wire_bytes: dict[str, int]
    seconds: float


@dataclass(frozen=True)
class Report:
    """Comparison of one demonstration's runs.

    Attributes:
        axes: mesh axes whose traffic is shown.
        rows: one for each policy, the baseline's among them.
        share: part of the baseline's step that the shaped link costs; None where links cannot be shaped.
        sentences: interpretation of the figures.
    """

    axes: tuple[str, ...]
    rows: tuple[Row, ...]
    share: float | None
    sentences: tuple[str, ...]

    @property
    def headings(self) -> tuple[str, ...]:
        """Return the headings of the table."""
        traffic = (f"{axis} MB" for axis in self.axes)
        return ("policy", "tokens/s", "x none", "val loss", "vs none", *traffic, "seconds")

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """Return the rows of the table as text; megabytes are 10^6 bytes."""
        return [_cells(row, self.axes) for row in self.rows]


def compare(outcome: Outcome) -> Report:
    """Compare the runs with the baseline among them."""
    records = {name: record for name, record in outcome.records.items() if name != UNSHAPED}
    base = records[BASELINE]
    rows = tuple(_row(record, base) for record in records.values())
    share = None
    if UNSHAPED in outcome.records:
        share = 1 - outcome.records[UNSHAPED].step_seconds / base.step_seconds
    return Report(outcome.plan.axes, rows, share, tuple(_sentences(rows, share, outcome)))


def _row(record: RunRecord, base: RunRecord) -> Row:
    change = record.val_loss / base.val_loss - 1
    return Row(
        name=record.name,
        tokens_per_s=record.tokens_per_s,
        speedup=record.tokens_per_s / base.tokens_per_s,
        val_loss=record.val_loss,
        loss_change=change if math.isfinite(change) else math.nan,
        wire_bytes=record.wire_bytes,
        seconds=float(record.summary["seconds"]),
    )


def _sentences(rows: Sequence[Row], share: float | None, outcome: Outcome) -> list[str]:
    plan = outcome.plan
    base = outcome.records[BASELINE]
    where = f"{plan.hosts} hosts at {plan.rate}" if share is not None else "shared memory"
    said = [
        f"{plan.pp * plan.dp * plan.tp} ranks (pp {plan.pp}, dp {plan.dp}, tp {plan.tp}) on {where} "
        f"trained a GPT of {base.start['parameters'] / 1e6:.1f} million parameters for {plan.steps} steps of "
        f"{plan.tokens_per_step} tokens, from the same seed and data each time."
    ]
    if share is None:
        said.append("No link was shaped here, so the loss and the bytes count, and speed is not the point.")
    else:
        free = outcome.records[UNSHAPED].step_seconds
        said.append(
            f"Waiting for the {plan.rate} links was {share:.0%} of the uncompressed step: "
            f"{base.step_seconds:.2f} s, against {free:.2f} s with the links unshaped."
        )
    for row in rows:
        if row.name == BASELINE:
            continue
        ratio = sum(base.wire_bytes.values()) / max(1, sum(row.wire_bytes.values()))
        loss = (
            "its loss diverged"
            if math.isnan(row.loss_change)
            else f"a validation loss {_worse(row.loss_change)}"
        )
        said.append(
            f"{row.name}: {row.speedup:.2f} times the tokens per second, {loss}, "
            f"{ratio:.1f} times fewer bytes sent."
        )
    seen = plan.steps * plan.tokens_per_step
    said.append(f"The losses are those of a model early in training, which has seen {seen:,} tokens.")
    return said


def _worse(change: float) -> str:
    if abs(change) < 0.0005:
        return "the same within 0.05 %"
    return f"{abs(change):.1%} {'higher' if change > 0 else 'lower'}"


def _cells(row: Row, axes: Sequence[str]) -> tuple[str, ...]:
    change = "diverged" if math.isnan(row.loss_change) else f"{row.loss_change:+.1%}"
    return (
        row.name,
        f"{row.tokens_per_s:,.0f}",
        f"{row.speedup:.2f}",
        f"{row.val_loss:.3f}",
        "" if row.name == BASELINE else change,
        *(f"{row.wire_bytes.get(axis, 0) / 1e6:,.1f}" for axis in axes),
        f"{row.seconds:.0f}",
    )

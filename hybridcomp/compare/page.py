"""Write a comparison's results: a table, results.json, a picture, and a page that needs no other file.

Importing this module loads matplotlib, which takes a second.
"""

from __future__ import annotations

import dataclasses
import datetime
import html
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from hybridcomp import style
from hybridcomp.compare.plan import BASELINE, Plan
from hybridcomp.compare.results import BLOCKS, Gap, Results, Row
from hybridcomp.compare.runner import RESULTS
from hybridcomp.files import write_bytes, write_text
from hybridcomp.results.pictures import png, run_styles, smoothed
from hybridcomp.results.provenance import provenance
from hybridcomp.style import Table, picture_text

_NOTE = (
    "ms: of an optimizer step, the median; beside it the 10th to the 90th percentile of all steps. Times: the "
    "baseline's median over this one's, round by round; their median, smallest and largest (of one round there is no "
    "spread). MB between hosts: "
    "10^6 bytes that left hosts in a step, of all hosts together, as their network interfaces counted. Waiting: "
    "share of a step in which a collective was under way and nothing was computed, on the rank that waits least. "
    "Loss: mean over the last half of the steps and over ranks. Above baseline: mean of the differences of the "
    f"same round, rank and step, with the half-width of its 95 % interval, from {BLOCKS} blocks of steps; to tell: "
    "steps that a comparison needs to tell a difference of that size from noise. It is one seed's: whether a "
    "small one stays shows over several seeds."
)


_ALTERNATIVE = (
    "Left: milliseconds of a step for each candidate, with their spread. Right: loss over the steps. The table above "
    "holds the same figures."
)


def table_of(results: Results, plan: Plan) -> Table:
    """Return the table of a comparison."""
    where = f" in a lab {plan.lab}" if plan.lab is not None else ""
    ranks = f"{results.ranks} ranks on {results.hosts} host{'s' * (results.hosts > 1)}{where}"
    of_rounds = "one round" if plan.rounds == 1 else f"each of {plan.rounds} rounds"
    return Table(
        f"{ranks}, {results.device}; {plan.steps} steps in {of_rounds}",
        (
            "candidate",
            "ms a step",
            "10-90 %",
            "times",
            "MB between hosts",
            "waiting",
            "loss",
            "above baseline",
            "to tell",
        ),
        [_cells(row, results) for row in results.rows],
        _NOTE,
    )


def _cells(row: Row, results: Results) -> Sequence[str]:
    base = row.candidate.name == BASELINE
    name = f"{BASELINE} ({results.backend})" if base else row.candidate.name
    if row.failure is not None:
        return (name, "failed", *[""] * 7)
    low, high = row.quantiles
    sent = "?" if row.between_bytes is None else f"{row.between_bytes / 1e6:,.3g}{'*' * row.counted}"
    return (
        name,
        _ms(row.step_ms),
        f"{_ms(low)}-{_ms(high)}",
        "1" if base else _ratio(row.ratios, row.ratio),
        sent,
        "?" if row.waiting is None else f"{row.waiting:.0%}",
        f"{row.end_loss:.4f}" if math.isfinite(row.end_loss) else "not finite" if row.not_finite else "",
        "" if row.gap is None else _gap(row.gap),
        "" if row.gap is None else _needed(row.gap),
    )


def _ms(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _ratio(ratios: Sequence[float], median: float) -> str:
    return f"{median:.2f}" + (f" ({min(ratios):.2f}-{max(ratios):.2f})" if len(ratios) > 1 else "")


def _gap(gap: Gap) -> str:
    if not math.isfinite(gap.mean):
        return "diverged"
    if gap.mean == 0 and gap.margin == 0:
        return "the same"
    return f"{gap.mean:+.2g} ± {gap.margin:.2g}"


def _needed(gap: Gap) -> str:
    if not math.isfinite(gap.mean):
        return ""
    if gap.told:
        return "told"
    needed = gap.needed
    return "" if needed is None else f"{needed:,} steps" if needed < 10**6 else "over 10^6 steps"


def as_json(results: Results, plan: Plan) -> dict[str, Any]:
    """Return a comparison in the types of JSON; numbers that are not finite are null."""
    return {
        "command": list(plan.command),
        "lab": None if plan.lab is None else str(plan.lab),
        "steps": plan.steps,
        "warmup": plan.warmup,
        "rounds": plan.rounds,
        "ranks": results.ranks,
        "hosts": results.hosts,
        "backend": results.backend,
        "device": results.device,
        "repeatable": results.repeatable,
        "rows": [_finite(_row(row)) for row in results.rows],
        "take": None if results.take is None else results.take.name,
        "advice": results.advice,
        "notes": list(results.notes),
    }


def _row(row: Row) -> dict[str, Any]:
    values = dataclasses.asdict(row)
    candidate = values.pop("candidate")
    gap = None if row.gap is None else values["gap"] | {"told": row.gap.told, "needed": row.gap.needed}
    return {"candidate": candidate["name"], "variables": candidate["variables"], **values, "gap": gap,
            "ratio": row.ratio}  # fmt: skip


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def write_report(results: Results, plan: Plan, out: Path) -> Path:
    """Write ``results.json``, ``compare.png`` and ``compare.html``; return the page's path.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    origin = provenance("none" if plan.lab is None else str(plan.lab))
    drawn = picture(results)
    write_bytes(out / "compare.png", drawn)
    page = out / "compare.html"
    write_text(page, _page(results, plan, (drawn, picture(results, style.DARK)), origin["machine"]))
    write_text(out / RESULTS, json.dumps(origin | as_json(results, plan), indent=1) + "\n")
    return page


def _page(results: Results, plan: Plan, pictures: tuple[bytes, bytes], machine: Mapping[str, str]) -> str:
    when = datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    table = table_of(results, plan)
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in results.notes)
    failures = "".join(
        f"<h3>{html.escape(row.candidate.name)}</h3><pre>{html.escape(row.failure)}</pre>"
        for row in results.rows
        if row.failure is not None
    )
    return style.page(
        "hybridcomp compare",
        f"""<h1>With compression and without</h1>
<p class="when">{when}</p>
{_advice(results)}
<p>{html.escape(table.title)}</p>
{style.table(table.headings, table.rows)}
<ul>{notes}</ul>
{style.image(*pictures, _ALTERNATIVE)}
<p>{html.escape(table.note)}</p>
{f"<h2>Failures</h2>{failures}" if failures else ""}
<h2>Command</h2>
<pre>{html.escape(shlex.join(plan.command))}</pre>
<h2>Machine</h2>
{style.table(("what", "which"), list(machine.items()), kind="words")}
""",
    )


def _advice(results: Results) -> str:
    said, line = results.advice_and_line
    return f"<p><strong>{html.escape(said)}</strong></p>" + (
        f"<pre>{html.escape(line)}</pre>" if line else ""
    )


def picture(results: Results, scheme: style.Scheme = style.LIGHT) -> bytes:
    """Return a picture as PNG: milliseconds of a step with their spread, and the loss over the steps."""
    rows = [row for row in results.rows if row.failure is None]
    styles = run_styles(scheme)
    with mpl.rc_context(scheme.settings):
        figure = Figure(figsize=(11.5, 4.4), dpi=150, layout="constrained")
        speeds, losses = figure.subplots(1, 2, width_ratios=(1, 1.5))
        for position, row in enumerate(rows):
            colour, marker = styles[position % len(styles)]
            low, high = row.quantiles
            spread = [[max(0.0, row.step_ms - low)], [max(0.0, high - row.step_ms)]]
            speeds.bar(position, row.step_ms, color=colour, width=0.65)
            speeds.errorbar(position, row.step_ms, spread, color=scheme.ink, capsize=3, linewidth=1)
            curve = smoothed([math.nan if loss is None else loss for loss in row.curve])
            every = max(1, len(curve) // 8)
            losses.plot(
                range(1, len(curve) + 1),
                curve,
                color=colour,
                marker=marker,
                markevery=(position % every, every),
                markersize=5,
                linewidth=1.4,
                label=picture_text(row.candidate.name),
            )
        speeds.set_xticks(
            range(len(rows)), [picture_text(row.candidate.name) for row in rows], rotation=30, ha="right"
        )
        speeds.set_ylabel("ms a step (median; 10th to 90th percentile)")
        speeds.set_title("Time of a step")
        losses.set_xlabel("optimizer step, after the warm-up")
        losses.set_ylabel("loss (smoothed)")
        losses.set_title("Loss of the program, same seed and steps")
        losses.grid(alpha=0.25)
        losses.legend(frameon=False)
        return png(figure)

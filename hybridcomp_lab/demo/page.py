"""Make the demonstration's HTML page, which needs no other file."""

from __future__ import annotations

import datetime
import html
from collections.abc import Mapping, Sequence
from typing import Any

from hybridcomp import style
from hybridcomp.style import table
from hybridcomp_lab.demo.report import Report
from hybridcomp_lab.demo.runner import Outcome

TRAFFIC = ("axis", "op", "codec", "calls", "raw_bytes", "plain_bytes", "wire_bytes", "reason")
TRAFFIC_HEADINGS = ("axis", "operation", "codec", "calls", "given", "uncompressed", "sent", "why")


_ALTERNATIVE = (
    "Left: loss over wall time for each policy. Right: bytes sent per axis of parallelism for each policy. The table "
    "above holds the same figures."
)


def page(outcome: Outcome, report: Report, pictures: tuple[bytes, bytes], machine: Mapping[str, str]) -> str:
    """Return the page: the findings in words, the table, the picture, and how it was measured.

    Args:
        outcome: runs of the demonstration.
        report: what is made of them.
        pictures: PNG for light screens, and for dark ones.
        machine: facts about the machine, by name.
    """
    when = datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    words = "".join(f"<li>{html.escape(text)}</li>" for text in (*report.sentences, *outcome.notes))
    commands = "".join(
        f"<h3>{html.escape(name)}</h3><pre>{html.escape(text)}</pre>"
        for name, text in outcome.commands.items()
    )
    details = "".join(
        f"<details><summary>{html.escape(name)}</summary>{_traffic(record.summary['comm'])}</details>"
        for name, record in outcome.records.items()
        if record.summary.get("comm")
    )
    return style.page(
        "hybridcomp demo",
        f"""<h1>hybridcomp: training over slow links</h1>
<p class="when">{when}, {outcome.seconds / 60:.1f} minutes in all</p>
<ul>{words}</ul>
{table(report.headings, report.cells)}
<p>val loss: nats per token on held-out text, at the end. dp, pp, tp MB: 10<sup>6</sup> bytes that all
ranks sent for data, pipeline and tensor parallelism while training; the last stays inside a host,
where it uses shared memory. Seconds are those of training, without start and evaluations.</p>
{style.image(*pictures, _ALTERNATIVE)}
<h2>What was compressed, and why</h2>
<p>As rank 0 counted it; bytes are those of that rank.</p>
{details}
<h2>Machine</h2>
{table(("what", "which"), list(machine.items()), kind="words")}
<h2>Commands</h2>
{commands}
""",
    )


def _traffic(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of a communicator's statistics."""
    shown = [
        [f"{row[key]:,}" if isinstance(row[key], int) else str(row[key] or "") for key in TRAFFIC]
        for row in rows
    ]
    return table(TRAFFIC_HEADINGS, shown)

"""Write a demo's comparison as files: numbers, a picture, a page.

Importing this module loads matplotlib, which takes a second.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybridcomp import style
from hybridcomp.files import write_bytes, write_text
from hybridcomp.results.provenance import provenance
from hybridcomp_lab.demo.page import page
from hybridcomp_lab.demo.picture import draw
from hybridcomp_lab.demo.report import Report, compare
from hybridcomp_lab.demo.runner import Outcome


def write_report(outcome: Outcome, out: Path) -> Report:
    """Write ``results.json``, ``demo.png`` and ``demo.html`` into ``out`` and return the comparison."""
    report = compare(outcome)
    origin = provenance(outcome.kind)
    values: dict[str, Any] = {
        "plan": asdict(outcome.plan),
        "kind": outcome.kind,
        "share": report.share,
        "rows": [asdict(row) for row in report.rows],
        "step_seconds": {name: record.step_seconds for name, record in outcome.records.items()},
        "commands": outcome.commands,
        **origin,
        "seconds": outcome.seconds,
        "sentences": [*report.sentences, *outcome.notes],
    }
    write_text(out / "results.json", json.dumps(values, indent=2) + "\n")
    picture = draw(outcome, report)
    write_bytes(out / "demo.png", picture)
    on_dark = draw(outcome, report, style.DARK)
    write_text(out / "demo.html", page(outcome, report, (picture, on_dark), origin["machine"]))
    return report

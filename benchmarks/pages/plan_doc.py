"""Write docs/plan.md's figures of predicted and measured training steps from the result file.

python benchmarks/pages/plan_doc.py            # rewrite docs/plan.md between its STEPS markers
python benchmarks/pages/plan_doc.py --check    # exit 1 if docs/plan.md and the file differ
"""

from __future__ import annotations

import json
from typing import Any

from page import RESULTS, ROOT, rewrite

Row = dict[str, Any]


def said(figures: Row) -> str:
    """Return errors in words."""
    parts = [
        f"{name} {figures[name]:.1%}" for name in ("geometric mean", "mean", "95th percentile", "largest")
    ]
    return f"{', '.join(parts)}, Spearman's rank correlation {figures['spearman']:.2f}"


def made(record: Row) -> str:
    """Return everything between the markers."""
    figures, rows = record["figures"], record["unseen"]
    lines = [
        f"Relative errors over {len(rows)} trainings that no fit has seen, none left out: "
        f"{said(figures['predicted'])}. "
        f"The same without waiting of ranks for each other: {said(figures['unsynchronised'])}.",
        "",
        "| training | measured ms | predicted | over measured | without waiting |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in sorted(rows, key=lambda row: float(row["predicted"] / row["median"])):
        ms = " | ".join(f"{row[key] * 1e3:.0f}" for key in ("median", "predicted"))
        ratio = row["predicted"] / row["median"]
        lines.append(f"| {row['name']} | {ms} | {ratio:.2f} | {row['unsynchronised'] * 1e3:.0f} |")
    return "\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    found = json.loads((RESULTS / "planner" / "steps.json").read_text())
    rewrite(ROOT / "docs" / "plan.md", __file__, STEPS=made(found))

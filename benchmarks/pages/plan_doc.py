"""Write docs/plan.md's figures of predicted and measured training steps from the result file.

python benchmarks/pages/plan_doc.py            # rewrite docs/plan.md between its STEPS markers
python benchmarks/pages/plan_doc.py --check    # exit 1 if docs/plan.md and the file differ
"""

from __future__ import annotations

import json
from typing import Any

from page import RESULTS, ROOT, rewrite

Row = dict[str, Any]


def percent(figures: Row, key: str) -> str:
    return f"{figures[key]['geometric_mean_error']:.1%}"


def made(record: Row) -> str:
    """Return everything between the markers."""
    figures, rows = record["figures"], record["unseen"]
    lines = [
        f"Geometric mean error {percent(figures, 'predicted')}, at most {figures['predicted']['largest']:.0%}, over "
        f"{len(rows)} trainings that no fit has seen, none left out; without waiting of ranks for each other "
        f"{percent(figures, 'unsynchronised')}. Spearman's rank correlation {figures['predicted']['spearman']:.2f} "
        f"({figures['unsynchronised']['spearman']:.2f}).",
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

"""Write docs/observing.md's table of where a step's time went in the lab, and its picture, from the result files.

python benchmarks/pages/report_doc.py            # rewrite both
python benchmarks/pages/report_doc.py --check    # exit 1 if docs/observing.md and the files differ
"""

from __future__ import annotations

import sys
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from page import RESULTS, ROOT, origins, read, rewrite

from hybridcomp.breakdown.page import COLOURS
from hybridcomp.breakdown.split import KINDS
from hybridcomp.style import PICTURE

PAGE = ROOT / "docs" / "observing.md"
FOLDER = RESULTS / "report"
POLICIES = ("none", "hybrid")
PARTS = ("compute", *KINDS)
HATCHES = {"encode": "xx", "decode": "..", "waiting": "//"}

Row = dict[str, Any]


def mean(record: Row, kind: str, axis: str | None = None) -> float:
    """Return ms of a step on an average rank."""
    found = record["ranks"] if axis is None else record["axes"][axis]
    return 1e3 * float(found[kind]["mean"])


def table(records: dict[str, Row]) -> str:
    """Return the parts of a step, then what each axis exposes."""
    lines = ["| policy | step | " + " | ".join(PARTS) + " | exposed |", "|---|" + "---:|" * (len(PARTS) + 2)]
    for policy, record in records.items():
        exposed = sum(mean(record, kind) for kind in KINDS)
        cells = [f"{mean(record, part):,.0f}" for part in ("step", *PARTS)]
        lines.append(f"| `{policy}` | {' | '.join(cells)} | {exposed / mean(record, 'step'):.0%} |")
    lines += ["", "| policy | axis | exposed | " + " | ".join(KINDS) + " | hidden |"]
    lines.append("|---|---|" + "---:|" * (len(KINDS) + 2))
    for policy, record in records.items():
        for axis in record["axes"]:
            cells = [f"{mean(record, kind, axis):,.0f}" for kind in ("exposed", *KINDS, "hidden")]
            lines.append(f"| `{policy}` | {axis} | {' | '.join(cells)} |")
    return "\n" + "\n".join(lines) + "\n"


def draw(records: dict[str, Row]) -> Figure:
    """Draw a bar for each policy, stacked of a step's parts."""
    figure = Figure(figsize=(7, 2.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    names = list(records)
    left = [0.0] * len(names)
    for part in PARTS:
        widths = [mean(records[name], part) for name in names]
        axes.barh(
            names,
            widths,
            left=left,
            color=COLOURS[part],
            hatch=HATCHES.get(part),
            edgecolor="white",
            label=part,
        )
        left = [at + width for at, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("ms of a step, mean of 8 ranks")
    axes.legend(ncols=len(PARTS), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    return figure


def main() -> None:
    """Write both."""
    files = {policy: read(FOLDER / f"{policy}.json") for policy in POLICIES}
    records = {policy: found["rows"][0] for policy, found in files.items()}
    if "--check" not in sys.argv[1:]:
        with mpl.rc_context(PICTURE):
            draw(records).savefig(FOLDER / "split.png")
    rewrite(PAGE, __file__, REPORT=f"{table(records)}\n{origins(files)}\n")


if __name__ == "__main__":
    main()

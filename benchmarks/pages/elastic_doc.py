"""Write a run of `make members` into docs/elastic.md, and draw it, from the result files.

python benchmarks/pages/elastic_doc.py            # rewrite the page between its MEMBERS markers, and the pictures
python benchmarks/pages/elastic_doc.py --check    # exit 1 if the page and the files differ
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from page import RESULTS, ROOT, origin, read, rewrite
from plot_codecs import save

from hybridcomp.style import PICTURE, SERIES

PAGE = ROOT / "docs" / "elastic.md"
LINKS = {"200mbit": "200 Mb/s", "1gbit": "1 Gb/s"}
WINDOW = 5.0  # seconds of which tokens/s are shown
FAULTS = {"kill": "killed", "cut": "link cut", "stop": "stopped"}


def speeds(curve: list[list[float]]) -> tuple[list[float], list[float]]:
    """Return times, and the tokens/s around each, of a run's curve."""
    last, times, values = curve[-1][0], [], []
    when = curve[0][0] + WINDOW
    while when <= last:
        tokens = [max((row[1] for row in curve if row[0] <= at), default=0.0) for at in (when - WINDOW, when)]
        times.append(when - WINDOW / 2)
        values.append((tokens[1] - tokens[0]) / WINDOW)
        when += 1.0
    return times, values


def draw(record: dict[str, Any]) -> Figure:
    """Draw loss and tokens/s over time."""
    figure = Figure(figsize=(9.5, 5.5), dpi=110)
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    curve = [row for row in record["curve"] if row[0] >= 0]
    above.plot([row[0] for row in curve], [row[3] for row in curve], color=SERIES[0])
    above.set_ylabel("loss (nats)")
    below.plot(*speeds(curve), color=SERIES[0])
    below.set_ylim(bottom=0)
    below.set_ylabel(f"tokens/s, in {WINDOW:g} s")
    below.set_xlabel("seconds")
    for fault in record["faults"]:
        for axes in (above, below):
            axes.axvspan(fault["began"], fault["back"], color=SERIES[1], alpha=0.15, linewidth=0)
        where = (fault["began"], above.get_ylim()[1])
        above.annotate(f"host {fault['host']}: {FAULTS[fault['fault']]}", where, va="top", fontsize=9)
    figure.tight_layout()
    return figure


def written(rate: str, record: dict[str, Any]) -> str:
    """Return what was measured as Markdown."""
    low, high = record["memory_kib"], record["descriptors"]
    final = [values["tokens"][-1] for values in record["losses"].values()]
    steps = [values["step"][-1] for values in record["losses"].values()]
    many = len(record["faults"])
    return "\n".join(
        [
            f"![loss and tokens/s](../benchmarks/results/members/{rate}.png)",
            "",
            f"Four hosts at {LINKS[rate]}, policy `{record['policy']}`, {many} faults in {record['seconds']:.0f} s; "
            "shaded: from the fault to the first step that the host commits again.",
            "",
            "| | |",
            "|---|---|",
            f"| tokens/s, of what the replicas that are there do undisturbed | {record['of_undisturbed']:.2f} |",
            f"| loss at the end, beside undisturbed runs of two seeds on as many tokens | {final[0]:.2f}, beside "
            f"{final[1]:.2f} and {final[2]:.2f} |",
            f"| the same after as many steps | {steps[0]:.2f}, beside {steps[1]:.2f} and {steps[2]:.2f} |",
            f"| steps that several replicas committed, all with the same bits | {record['same_bits']:,} of "
            f"{record['steps']:,} |",
            f"| memory of the replica that no fault touched, early and late | {low[0] / 1024:.0f} MiB, "
            f"{low[1] / 1024:.0f} MiB |",
            f"| its descriptors | {high[0]}, {high[1]} |",
            "| other replicas that ended | none |",
            "",
            origin(record),
            "",
            f"By `{record['command']}`.",
        ]
    )


def main() -> None:
    """Draw, and rewrite or check the page."""
    folder: Path = RESULTS / "members"
    records = {rate: read(folder / f"{rate}.json") for rate in LINKS if (folder / f"{rate}.json").exists()}
    if "--check" not in sys.argv[1:]:
        with mpl.rc_context(PICTURE):
            for rate, record in records.items():
                save(draw(record), folder / f"{rate}.png")
    found = [written(rate, record) for rate, record in records.items()]
    rewrite(PAGE, __file__, MEMBERS="\n\n".join(found) or "No result of it is committed yet.")


if __name__ == "__main__":
    main()

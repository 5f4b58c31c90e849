"""Write the table of DDP steps in docs/performance.md from the result files of benchmarks/ddp.py, and their picture.

python benchmarks/pages/ddp_doc.py            # rewrite the page between its DDP markers, and draw results/ddp.png
python benchmarks/pages/ddp_doc.py --check    # exit 1 if the page and the files differ
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from page import RESULTS, ROOT, rewrite

from hybridcomp.style import SERIES

PAGE = ROOT / "docs" / "performance.md"
LINKS = {"200mbit": "200 Mb/s", "1gbit": "1 Gb/s", "none": "unshaped"}
_COLOURS = {"local": SERIES[7], "peer": SERIES[1], "ours": SERIES[0]}


def records() -> dict[str, dict[str, Any]]:
    """Read the result files, by link."""
    return {
        title: json.loads(path.read_text())
        for link, title in LINKS.items()
        if (path := RESULTS / f"ddp_{link}_4hosts.json").exists()
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    """Return the table, with a row for each way to take a step."""
    lines = [
        "| link | step | time (ms) | over local | best peer's time over this | bytes per host | of the wire's limit "
        "| cores busy | relative L2 error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for title, record in found.items():
        for row in record["rows"]:
            mine = row["kind"] == "ours"
            name = f"hook, `{row['name']}`" if mine else row["name"]
            speedup = f"**{row['speedup']:.2f}**" if mine else f"{row['speedup']:.2f}"
            fraction = "" if row["wire_fraction"] is None else f"{row['wire_fraction']:.2f}"
            lines.append(
                f"| {title} | {name} | {row['seconds'] * 1e3:.0f} | {row['over_local']:.2f} | {speedup} "
                f"| {row['link_bytes'] / 1e6:.1f} MB | {fraction} | {row['cores']:.2f} "
                f"| {row['relative_error']:.1e} |"
            )
    machine = next(iter(found.values()))["machine"]["processor"]
    return "\n".join(
        [f"4 hosts of the lab on 2 cores ({machine}), all in turn in one run a link:", "", *lines]
    )


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw bars of times over the local computation, by link."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(7, 3.2 * len(found)), layout="constrained")
    for axes, (title, record) in zip(
        figure.subplots(len(found), squeeze=False)[:, 0], found.items(), strict=True
    ):
        rows = record["rows"][::-1]
        bars = axes.barh(
            [row["name"] for row in rows],
            [row["over_local"] for row in rows],
            color=[_COLOURS[row["kind"]] for row in rows],
        )
        axes.bar_label(bars, fmt="%.2f", padding=2)
        axes.set_title(f"A step of DDP, 50 MB of gradients, 4 hosts, {title}")
        axes.set_xlabel("time over that of the local computation")
    FigureCanvasAgg(figure).print_png(path)


def main() -> None:
    found = records()
    rewrite(PAGE, __file__, DDP=table(found))
    draw(found, RESULTS / "ddp.png")


if __name__ == "__main__":
    main()

"""Write the tables of DDP steps in docs/performance.md from the result files of benchmarks/ddp.py, and their picture.

python benchmarks/pages/ddp_doc.py            # rewrite the page between their markers, and draw results/ddp.png
python benchmarks/pages/ddp_doc.py --check    # exit 1 if the page and the files differ
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from page import RESULTS, ROOT, origins, read, rewrite

from hybridcomp.style import SERIES

PAGE = ROOT / "docs" / "performance.md"
LINKS = {"200mbit": "200 Mb/s", "1gbit": "1 Gb/s", "none": "unshaped"}
_COLOURS = {"local": SERIES[7], "peer": SERIES[1], "ours": SERIES[0]}


def records(hosts: str = "4hosts") -> dict[str, dict[str, Any]]:
    """Read the result files of hosts, by link."""
    return {
        title: read(path)
        for link, title in LINKS.items()
        if (path := RESULTS / f"ddp_{link}_{hosts}.json").exists()
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
    said = "4 hosts of the lab on 2 cores, all in turn in one run a link:"
    return "\n".join([said, "", *lines, "", origins(found)])


def table_of_hosts(found: dict[str, dict[str, Any]]) -> str:
    """Return the table of hosts of several ranks, with the speed of each way over uncompressed gloo's."""
    lines = ["| link | step | time (ms) | times gloo's speed | bytes per host |", "|---|---|---|---|---|"]
    for title, record in found.items():
        gloo = next(row["seconds"] for row in record["rows"] if row["name"] == "gloo")
        for row in record["rows"]:
            if "hook, rank" in row["name"]:
                continue
            codec, over, _ = row["name"].partition(" over gloo")
            mine = f"hook{over or ' over the backend'}, `{codec}`"
            name = mine if row["kind"] == "ours" else row["name"]
            lines.append(
                f"| {title} | {name} | {row['seconds'] * 1e3:.0f} | {gloo / row['seconds']:.2f} "
                f"| {row['link_bytes'] / 1e6:.1f} MB |"
            )
    said = "8 ranks of the lab share 2 cores; in turn in one run a link:"
    return "\n".join([said, "", *lines, "", origins(found)])


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
    rewrite(PAGE, __file__, DDP=table(found), HOSTS=table_of_hosts(records("2x4")))
    draw(found, RESULTS / "ddp.png")


if __name__ == "__main__":
    main()

"""Write the tables and the picture of sums of sparse arrays in docs/performance.md from the result files.

python benchmarks/pages/sparse_doc.py            # rewrite the page between its SPARSE markers, and the picture
python benchmarks/pages/sparse_doc.py --check    # exit 1 if the page and the files differ
"""

from __future__ import annotations

import sys
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from page import RESULTS, ROOT, origins, result, rewrite

from hybridcomp.style import SERIES

LINKS = {"200mbit": "200 Mb/s", "1gbit": "1 Gb/s"}
HOSTS = (4, 8)
PICTURE = RESULTS / "sparse" / "sums.png"
CLAIMS = {"sums": 6.33, "step": 3.74}  # times as fast, as arXiv:2402.07529 claims
_STYLES = {
    "none": (SERIES[7], "o"),
    "topk": (SERIES[5], "X"),
    "threshold": (SERIES[1], "D"),
    "packed": (SERIES[2], "^"),
    "bitmap": (SERIES[4], "v"),
    "bloom": (SERIES[0], "s"),
}

Record = dict[str, Any]


def short(spec: str) -> str:
    """Name a way to sum."""
    if not spec.startswith("sketch"):
        return spec.partition(":")[0]
    return "bloom" if "index=bloom" in spec else "packed" if "form=packed" in spec else "bitmap"


def read(kind: str) -> dict[tuple[str, int], Record]:
    """Read the result files of ``sums`` or ``step``, by link and hosts.

    Raises:
        ValueError: the ranks ended with different bits.
    """
    found = {}
    for link in LINKS:
        for hosts in HOSTS:
            record = result(f"sparse/{kind}_{link}_{hosts}hosts.json")
            for row in record["rows"]:
                if not row["identical"]:
                    raise ValueError(f"ranks differ: {row}")
            found[link, hosts] = record
    return found


def table(records: dict[tuple[str, int], Record]) -> list[str]:
    """Write a line for each link, number of hosts and density: times, and wire bytes beside those of ``none``."""
    lines = [
        "| link, hosts | density | best peer (ms) | " + " | ".join(f"`{name}`" for name in _STYLES) + " |",
        f"|---|---|{'---:|' * (1 + len(_STYLES))}",
    ]
    for (link, hosts), record in records.items():
        for density in dict.fromkeys(row["density"] for row in record["rows"]):
            rows = {short(row["codec"]): row for row in record["rows"] if row["density"] == density}
            plain = rows["none"]["wire_bytes"]
            best = rows["none"]["best_peer_seconds"]
            cells = [
                f"{row['seconds'] * 1e3:.1f} (**{row['speedup']:.2f}**; {row['wire_bytes'] / plain:.3f})"
                for row in (rows[name] for name in _STYLES)
            ]
            lines.append(
                f"| {LINKS[link]}, {hosts} | {density:.1%} | {best * 1e3:.1f} | {' | '.join(cells)} |"
            )
    return lines


def named(records: dict[tuple[str, int], Record]) -> dict[str, Record]:
    """Return the records by what the table calls them."""
    return {f"{LINKS[link]}, {hosts}": record for (link, hosts), record in records.items()}


def errors(records: dict[tuple[str, int], Record]) -> str:
    """Return the largest relative L2 error of each way to sum, in words."""
    worst: dict[str, float] = {}
    for record in records.values():
        for row in record["rows"]:
            name = short(row["codec"])
            worst[name] = max(worst.get(name, 0.0), row["relative_error"])
    return ", ".join(f"`{name}` {worst[name]:.1e}" for name in _STYLES)


def claim(kind: str, records: dict[tuple[str, int], Record]) -> str:
    """Compare the sketches with the paper's claim."""
    parts = []
    for name in ("bitmap", "bloom"):
        rows = [
            (row, record["link"], record["hosts"])
            for record in records.values()
            for row in record["rows"]
            if short(row["codec"]) == name
        ]
        best, link, hosts = max(rows, key=lambda found: found[0]["speedup"])
        slower = sum(row["speedup"] < 1 for row, _, _ in rows)
        parts.append(
            f"`{name}` at best {best['speedup']:.2f} times the best dense peer ({best['density']:.1%}, "
            f"{LINKS[link]}, {hosts} hosts), slower than it in {slower} of {len(rows)}"
        )
    return f"The paper claims {CLAIMS[kind]} times. Here: {'; '.join(parts)}."


def draw(records: dict[tuple[str, int], Record]) -> None:
    """Draw the times of a sum over density: a panel for each link and number of hosts."""
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    grid = figure.subplots(len(LINKS), len(HOSTS), squeeze=False, sharex=True)
    for axes, ((link, hosts), record) in zip(grid.flat, records.items(), strict=True):
        for name, (colour, marker) in _STYLES.items():
            points = [
                (row["density"], row["seconds"] * 1e3)
                for row in record["rows"]
                if short(row["codec"]) == name
            ]
            axes.plot(*zip(*points, strict=True), label=name, color=colour, marker=marker, markersize=5)
        axes.set(xscale="log", yscale="log", title=f"{LINKS[link]}, {hosts} hosts")
        axes.set_ylabel("time of a sum (ms)")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.1%}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.grid(visible=True, which="major", alpha=0.3)
    for axes in grid[-1]:
        axes.set_xlabel("density of each rank's array")
    grid[0][0].legend(fontsize="small")
    FigureCanvasAgg(figure)
    figure.savefig(PICTURE, dpi=110)


def main() -> None:
    """Rewrite or check the page."""
    sums, steps = read("sums"), read("step")
    if "--check" not in sys.argv[1:]:
        draw(sums)
    size = next(iter(sums.values()))["rows"][0]["size"]
    length = next(iter(steps.values()))["rows"][0]["size"]
    made = [
        f"A sum of {size >> 20} MiB of float32, each rank's values at random places of its own: milliseconds, in "
        "brackets times the speed of the best of MPICH and gloo, which sum all as it is, and the wire's bytes beside "
        "those of `none`.",
        "",
        *table(sums),
        "",
        origins(named(sums)),
        "",
        "![Time of a sum over density](../benchmarks/results/sparse/sums.png)",
        "",
        f"{claim('sums', sums)} Largest relative L2 errors: {errors(sums)}.",
        "",
        "A training step: forward and backward of a transformer of 12.6 million parameters, its gradient cleared below "
        f"a threshold, and a sum of {length >> 20} MiB at that density:",
        "",
        *table(steps),
        "",
        origins(named(steps)),
        "",
        claim("step", steps),
    ]
    rewrite(ROOT / "docs" / "performance.md", __file__, SPARSE="\n".join(made))


if __name__ == "__main__":
    main()

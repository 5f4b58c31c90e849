"""Write the tables of docs/plan.md from the result files: steps predicted and measured, choices of layouts, scaling.

python benchmarks/pages/plan_doc.py            # rewrite docs/plan.md between its markers
python benchmarks/pages/plan_doc.py --check    # exit 1 if docs/plan.md and the files differ
"""

from __future__ import annotations

from typing import Any

from page import ROOT, origin, result, rewrite

Row = dict[str, Any]
ENOUGH = 1.05  # times the fastest


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


def chosen(cases: list[Row]) -> str:
    """Return a table of the chosen and the fastest layout of each job."""
    good = sum(case["of_fastest"] <= ENOUGH for case in cases)
    lines = [
        f"The choice is within {ENOUGH - 1:.0%} of the fastest in {good} of {len(cases)} jobs.",
        "",
        "| job, link | chosen | ms | fastest | ms | over fastest | slowest over fastest |",
        "|---|---|---:|---|---:|---:|---:|",
    ]
    for case in cases:
        times = {row["name"].partition(": ")[2]: f"{row['median'] * 1e3:.0f}" for row in case["layouts"]}
        both = " | ".join(f"{case[of]} | {times[case[of]]}" for of in ("chosen", "fastest"))
        lines.append(
            f"| {case['case']} | {both} | {case['of_fastest']:.2f} | {case['slowest_of_fastest']:.2f} |"
        )
    return "\n" + "\n".join(lines) + "\n"


def scaled(rows: list[Row]) -> str:
    """Return a table of steps by ranks."""
    lines = ["| training | measured ms | predicted | over measured |", "|---|---:|---:|---:|"]
    for row in rows:
        ms = " | ".join(f"{row[key] * 1e3:.0f}" for key in ("median", "predicted"))
        lines.append(f"| {row['name']} | {ms} | {row['predicted'] / row['median']:.2f} |")
    return "\n" + "\n".join(lines) + "\n"


def placed(cases: list[Row]) -> str:
    """Return a table of pipelines on hosts that differ."""
    lines = [
        "| hosts | layers of a stage | even cut ms | planner's | times as fast | predicted | off by |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for case in cases:
        cut = " ".join(map(str, case["planner"]["fields"]["stage_layers"]))
        ms = " | ".join(f"{case[of]['measured'] * 1e3:.0f}" for of in ("even", "planner"))
        ratios = f"{case['measured_ratio']:.2f} | {case['predicted_ratio']:.2f} | {case['ratio_error']:+.1%}"
        hosts = f"{case['rate']}; cores {case['cores']}"
        lines.append(f"| {case['name']}: {hosts} | {cut} | {ms} | {ratios} |")
    return "\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    found, choices, sizes, hosts = (
        result(f"planner/{name}.json") for name in ("steps", "choices", "scaled", "placement")
    )
    rewrite(
        ROOT / "docs" / "plan.md",
        __file__,
        STEPS=f"{made(found)}\n{origin(found)}\n",
        CHOICES=f"{chosen(choices['rows'])}\n{origin(choices)}\n",
        SCALED=f"{scaled(sizes['rows'])}\n{origin(sizes)}\n",
        PLACED=f"{placed(hosts['cases'])}\n{origin(hosts)}\n",
    )

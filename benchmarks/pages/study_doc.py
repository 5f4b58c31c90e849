"""Write the tables of docs/study.md from the studies' results.

python benchmarks/pages/study_doc.py            # rewrite the page between its markers
python benchmarks/pages/study_doc.py --check    # exit 1 if the page and the files differ
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from page import RESULTS, ROOT, put

PAGE = ROOT / "docs" / "study.md"
MARK = re.compile(r"(<!-- BEGIN (\S+) -->\n).*?(<!-- END \2 -->)", re.S)


def report(name: str) -> str:
    """What a study's report says, and its pictures."""
    folder = RESULTS / name
    text = (folder / "report.md").read_text(encoding="utf-8")
    pictures = sorted(path.name for path in folder.glob("*.png"))
    shown = "\n\n".join(f"![{Path(one).stem}](../benchmarks/results/{name}/{one})" for one in pictures)
    machine = json.loads((folder / "results.json").read_text())["machine"]["processor"]
    return f"{shown}\n\n{text}\nMeasured on: {machine}.\n"


def losses(name: str) -> str:
    """Return the part about losses of a study's report: its speeds were measured again, in a run of their own."""
    text = (RESULTS / name / "report.md").read_text(encoding="utf-8")
    about_losses, _, _ = text.partition("**Speed")
    shown = [line for line in text.splitlines() if line.startswith("- ") and " faster " not in line]
    return f"![loss](../benchmarks/results/{name}/loss.png)\n\n{about_losses}" + "\n".join(shown) + "\n"


def pipelines(_: str) -> str:
    """Steps of pipelines by micro-batches."""
    values = _load("schedules/pipelines.json")
    lines = [
        "| micro-batches | schedule | step (ms) | limit (ms) | step over 2BW's | that of the limits "
        "| weight versions | stashes by rank | weights off |",
        "|---:|---|---:|---:|---:|---:|---:|---|---:|",
    ]
    for row in values["rows"]:
        base = next(r for r in values["rows"] if _key(r) == ("2bw", row["micro_batches"]))
        lines.append(
            f"| {row['micro_batches']} | {row['schedule']} | {row['step_seconds'] * 1e3:.0f} "
            f"| {row['limit_seconds'] * 1e3:.0f} | {row['step_seconds'] / base['step_seconds']:.3f} "
            f"| {row['limit_seconds'] / base['limit_seconds']:.3f} | {max(row['weight_versions'])} "
            f"| {', '.join(map(str, row['stashes']))} | {row['weights_off']:.1g} |"
        )
    return "\n".join(lines) + "\n"


def _key(row: dict[str, Any]) -> tuple[str, int]:
    return row["schedule"], row["micro_batches"]


def cyclic(_: str) -> str:
    """Activations and link rates of cyclic data parallelism."""
    lines = [
        "| N | schedule | activations alive | by the rule | of data parallelism's | (N + 1) / (2N) "
        "| busiest time-step of all links over the mean | by the rule | of one link | MB a step "
        "| bytes a parameter |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for hosts in (2, 4, 8):
        values = _load(f"schedules/cyclic_{hosts}hosts.json")
        base = values["rows"][0]
        lines += [
            f"| {hosts} | {row['schedule']} | {row['activations']} | {row['activations_rule']} "
            f"| {row['activations'] / base['activations']:.4g} | {(hosts + 1) / (2 * hosts):.4g} "
            f"| {row['total_peak_over_mean']:.2f} | {row['total_rule']:.2f} | {row['link_peak_over_mean']:.2f} "
            f"| {row['bytes_per_step'] / 1e6:.2f} | {row['state_per_parameter']:.1f} |"
            for row in values["rows"]
        ]
    return "\n".join(lines) + "\n"


def techniques(_: str) -> str:
    """Steps with each technique of Optimus-CC, and without it."""
    values = _load("techniques.json")
    lines = [
        "| technique | variant | step (ms) | exposed (ms) | MB a step | last loss |",
        "|---|---|---:|---:|---|---:|",
    ]
    for row in values["rows"]:
        sent = ", ".join(f"{axis} {count / 1e6:.3f}" for axis, count in row["wire_bytes"].items() if count)
        lines.append(
            f"| {row['technique']} | {row['variant']} | {row['step'] * 1e3:.0f} | {row['exposed'] * 1e3:.0f} "
            f"| {sent} | {row['loss']:.4f} |"
        )
    return "\n".join(lines) + "\n"


def _load(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


WRITERS = {"policies": losses, "pipelines": pipelines, "cyclic-balance": cyclic, "techniques": techniques}


def main() -> None:
    """Rewrite or check the page."""
    text = PAGE.read_text(encoding="utf-8")
    put(PAGE, MARK.sub(lambda found: found[1] + WRITERS.get(found[2], report)(found[2]) + found[3], text))


if __name__ == "__main__":
    main()

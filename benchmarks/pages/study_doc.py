"""Write the tables of docs/study.md from the studies' results.

python benchmarks/pages/study_doc.py            # rewrite the page between its markers
python benchmarks/pages/study_doc.py --check    # exit 1 if the page and the files differ
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from page import RESULTS, ROOT, origin, origins, put, result

PAGE = ROOT / "docs" / "study.md"
MARK = re.compile(r"(<!-- BEGIN (\S+) -->\n).*?(<!-- END \2 -->)", re.S)


def report(name: str) -> str:
    """Return the text of a study's report, after its pictures."""
    folder = RESULTS / name
    text = (folder / "report.md").read_text(encoding="utf-8")
    pictures = sorted(path.name for path in folder.glob("*.png"))
    shown = "\n\n".join(f"![{Path(one).stem}](../benchmarks/results/{name}/{one})" for one in pictures)
    return f"{shown}\n\n{text}\n{origin(result(f'{name}/results.json'))}\n"


def losses(name: str) -> str:
    """Return the part about losses of a study's report: its speeds were measured again, in a run of their own."""
    text = (RESULTS / name / "report.md").read_text(encoding="utf-8")
    about_losses, _, _ = text.partition("**Speed")
    shown = [line for line in text.splitlines() if line.startswith("- ") and " faster " not in line]
    where = origin(result(f"{name}/results.json"))
    return (
        f"![loss](../benchmarks/results/{name}/loss.png)\n\n{about_losses}"
        + "\n".join([*shown, "", where])
        + "\n"
    )


def pipelines(_: str) -> str:
    """Return the table of pipelines' steps by micro-batches."""
    values = result("schedules/pipelines.json")
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
    return _with_origin(lines, values)


def _key(row: dict[str, Any]) -> tuple[str, int]:
    return row["schedule"], row["micro_batches"]


def cyclic(_: str) -> str:
    """Return the table of activations and link rates of cyclic data parallelism."""
    lines = [
        "| N | schedule | activations alive | by the rule | of data parallelism's | (N + 1) / (2N) "
        "| busiest time-step of all links over the mean | by the rule | of one link | MB a step "
        "| bytes a parameter |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    files = {hosts: result(f"schedules/cyclic_{hosts}hosts.json") for hosts in (2, 4, 8)}
    for hosts, values in files.items():
        base = values["rows"][0]
        lines += [
            f"| {hosts} | {row['schedule']} | {row['activations']} | {row['activations_rule']} "
            f"| {row['activations'] / base['activations']:.4g} | {(hosts + 1) / (2 * hosts):.4g} "
            f"| {row['total_peak_over_mean']:.2f} | {row['total_rule']:.2f} | {row['link_peak_over_mean']:.2f} "
            f"| {row['bytes_per_step'] / 1e6:.2f} | {row['state_per_parameter']:.1f} |"
            for row in values["rows"]
        ]
    lines += ["", origins({f"N = {hosts}": values for hosts, values in files.items()})]
    return "\n".join(lines) + "\n"


def techniques(name: str) -> str:
    """Return the table of steps with each technique of Optimus-CC, and without it."""
    values = result(f"{name}.json")
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
    return _with_origin(lines, values)


def dlrm(_: str) -> str:
    """Return the table of a recommendation model's speeds and AUC by how its rows travel."""
    values = result("dlrm.json")
    lines = [
        "| links | rows | samples/s | times gloo | ratio | AUC | to uncompressed | farthest |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    gloo = {row["rate"]: row["samples_per_second"] for row in values["rows"] if row["variant"] == "gloo"}
    for row in values["rows"]:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        lines.append(
            f"| {row['rate']} | {row['variant']} | {row['samples_per_second']:,.0f} "
            f"| {row['samples_per_second'] / gloo[row['rate']]:.2f} | {ratio} | {row['auc']:.5f} "
            f"| {row['auc_difference']:+.5f} | {row['auc_farthest']:.5f} |"
        )
    return _with_origin(lines, values)


def time_to_loss(_: str) -> str:
    """Return the table of seconds until a loss, with a rule that adapts and by static ratios."""
    values = result("adapt/time_to_loss.json")
    lines = [
        "| links | variant | to the loss, s | over the best static ratio's | all steps, s | last loss | MB sent |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in values["rows"]:
        took = [
            r["seconds"]
            for r in values["rows"]
            if r["rate"] == row["rate"] and r["variant"].startswith("top-k")
        ]
        best = min((one for one in took if one is not None), default=None)
        known = row["seconds"] is not None and best is not None
        lines.append(
            f"| {row['rate']} | {row['variant']} | {format(row['seconds'], '.1f') if known else 'never'} "
            f"| {format(row['seconds'] / best, '.2f') if known else ''} | {row['all_steps']:.1f} "
            f"| {row['loss']:.4f} | {row['MB']:.1f} |"
        )
    picture = "![loss over seconds](../benchmarks/results/adapt/time_to_loss.png)"
    machine = values["machine"]["processor"]
    # A rate may have been measured later, on another machine.
    used = {row["rate"]: ", ".join(row.get("processors", [machine])) for row in values["rows"]}
    files = {rate: {**values, "machine": {"processor": name}} for rate, name in used.items()}
    return "\n".join([picture, "", *lines, "", origins(files), ""])


def fsdp_loss(_: str) -> str:
    """Return the table of losses under FSDP2 by the form of error feedback."""
    values = result("fsdp_loss.json")
    lines = [
        "| gradients under FSDP2 | loss | spread over the seeds | to gloo |",
        "|---|---:|---:|---|",
    ]
    lines += [
        f"| {row['variant']} | {row['loss']:.4f} | {row['spread']:.4f} "
        f"| {row['gap']:+.4f} ({row['least_gap']:+.4f} to {row['largest_gap']:+.4f}) |"
        for row in values["rows"]
    ]
    return _with_origin(lines, values)


def _with_origin(lines: list[str], values: dict[str, Any]) -> str:
    return "\n".join([*lines, "", origin(values), ""])


WRITERS = {
    "policies": losses,
    "pipelines": pipelines,
    "cyclic-balance": cyclic,
    "techniques": techniques,
    "techniques_20mbit": techniques,
    "dlrm": dlrm,
    "time-to-loss": time_to_loss,
    "fsdp-loss": fsdp_loss,
}


def main() -> None:
    """Rewrite or check the page."""
    text = PAGE.read_text(encoding="utf-8")
    put(PAGE, MARK.sub(lambda found: found[1] + WRITERS.get(found[2], report)(found[2]) + found[3], text))


if __name__ == "__main__":
    main()

"""Write the findings of an hour of planted faults into docs/failures.md, from the result file.

python benchmarks/pages/chaos_doc.py            # rewrite the page between its CHAOS markers
python benchmarks/pages/chaos_doc.py --check    # exit 1 if the page and the file differ
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from page import ROOT, origin, result, rewrite

PAGE = ROOT / "docs" / "failures.md"
#: Groups of the faults that scenarios count, by how their names begin; a count in no group is not of a fault.
GROUPS = {
    "signals and deaths": ("SIG",),
    "messages": ("message ",),
    "links": ("link ",),
    "checkpoints": ("a checkpoint's file", "a save", "a training"),
    "resources": ("short of", "allocations", "threads refused"),
    "in long lives": (
        *(
            "callback raises",
            "codecs differ",
            "policies differ",
            "rank late",
            "receive cancelled",
            "never freed",
        ),
        *("fork", "tags come round"),
    ),
}
NOT_POSSIBLE = "not possible here"


def group_of(fault: str) -> str | None:
    """Return the group of a fault."""
    return next((group for group, starts in GROUPS.items() if fault.startswith(starts)), None)


def written(found: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    faults: Counter[str] = Counter()
    sorts: dict[str, Counter[str]] = {group: Counter() for group in GROUPS}
    for fault, count in found["faults"].items():
        group = group_of(fault)
        if group is not None and NOT_POSSIBLE not in fault:
            faults[group] += count
            sorts[group][fault.partition(" in ")[0] if fault.startswith("SIG") else fault] += count
    scenarios = sum(found["scenarios"].values())
    lines = [
        f"`make chaos`: {found['minutes']:.0f} minutes, seed {found['seed']}, {scenarios} "
        f"scenarios, {found['operations']:,} operations, {len(found['findings'])} findings"
        f"{': ' if found['findings'] else ''}{', '.join(f['scenario'] for f in found['findings'])}.",
        "",
        "| faults | planted | of which |",
        "|---|---:|---|",
        *(
            f"| {group} | {faults[group]:,} | {', '.join(f'{sort} {count}' for sort, count in sorts[group].items())} |"
            for group in GROUPS
        ),
        "",
        origin(found),
        "",
        "How operations and processes ended, on each rank: "
        + ", ".join(f"{what} {count:,}" for what, count in found["outcomes"].items())
        + ".",
    ]
    absent = [fault for fault in found["faults"] if NOT_POSSIBLE in fault]
    if absent:
        lines += ["", f"Not tried: {', '.join(absent)}."]
    return "\n".join(lines)


def main() -> None:
    """Rewrite or check the page."""
    rewrite(PAGE, __file__, CHAOS=written(result("chaos.json")))


if __name__ == "__main__":
    main()

"""Write the measurements of docs/codecs.md from the result files.

python benchmarks/pages/codecs_doc.py            # rewrite docs/codecs.md between its RESULTS markers
python benchmarks/pages/codecs_doc.py --check    # exit 1 if docs/codecs.md and the files differ
"""

from __future__ import annotations

import json
from typing import Any

from page import RESULTS, ROOT, rewrite

PAGE = ROOT / "docs" / "codecs.md"
BUSY = 0.5  # cores that other programs used before a run, from which on speeds are not worth keeping
OPERATIONS = ("encode", "decode", "decode_add")

Row = dict[str, Any]


def name(row: Row) -> str:
    return f"`{row['name']}`" if row.get("ours", True) else row["name"]


def why_not(row: Row) -> str | None:
    return f"FAILED: {row['failed']}" if "failed" in row else row.get("missing")


def speed_table(record: Row, *, ours: bool) -> list[str]:
    """Bits and speeds, GB/s and in brackets the ratio to memcpy; a row for each instruction set."""
    lines = [
        "| | kernels | bits per value | encode | decode | decode_add | NaN and infinity |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for row in record["rows"]:
        if row.get("ours", True) is not ours:
            continue
        why = why_not(row)
        if why is not None:
            lines.append(f"| {name(row)} | | {why} | | | | |")
            continue
        kept = "kept" if row["keeps_nan"] else "**lost**"
        bits = f"{row['sets']['Gaussian']['bits']:.2f}"
        by_isa = row.get("by_isa", {record["machine"]["kernels"] if ours else "": row})
        for isa, speeds in by_isa.items():
            if isa == "portable" and len(by_isa) > 1:
                continue  # for processors that are not made any more
            cells = " | ".join(f"{speeds[op]['gb_s']:.2f} ({speeds[op]['ratio']:.2f})" for op in OPERATIONS)
            lines.append(f"| {name(row)} | {isa} | {bits} | {cells} | {kept} |")
    return lines


def error_table(record: Row) -> list[str]:
    """Relative L2 error and largest error by data set, bits where they depend on the data."""
    sets = list(record["sets"])
    lines = ["| | " + " | ".join(sets) + " |", "|---|" + "---:|" * len(sets)]
    for row in record["rows"]:
        if why_not(row) is not None:
            continue
        cells = [row["sets"][key] for key in sets]
        varies = max(c["bits"] for c in cells) - min(c["bits"] for c in cells) > 0.01
        text = [
            "exact" + (f", {c['bits']:.2f} bits" if varies else "")
            if c["peak"] == 0
            else f"{number(c['l2'])}, {number(c['peak'])}" + (f", {c['bits']:.2f} bits" if varies else "")
            for c in cells
        ]
        lines.append(f"| {name(row)} | " + " | ".join(text) + " |")
    return lines


def number(value: float) -> str:
    return f"{value:.2f}" if 0.1 <= value < 10 else f"{value:.1e}"


def asked_table(record: Row) -> list[str]:
    lines = ["| | kernels | | asked: at least | measured | |", "|---|---|---|---:|---:|---|"]
    for row in record["asked"]:
        measured = "not measured" if row["met"] is None else f"{row['measured']:.2f}"
        met = {True: "met", False: "**not met**", None: ""}[row["met"]]
        asked = f"{row['times']:g} x {row['than']}"
        lines.append(
            f"| `{row['spec']}` | {row.get('isa', '')} | {row['operation']} | {asked} | {measured} | {met} |"
        )
    return lines


def size_table(record: Row) -> list[str]:
    """Ratio to memcpy of as many float32: encode / decode_add."""
    cases = list(dict.fromkeys((row["size"], row["dtype"]) for row in record["rows"]))
    lines = [
        "| | " + " | ".join(f"{size}, {dtype}" for size, dtype in cases) + " |",
        "|---|" + "---:|" * len(cases),
    ]
    names = list(dict.fromkeys(row["name"] for row in record["rows"]))
    found = {(row["name"], row["size"], row["dtype"]): row for row in record["rows"]}
    slow = {(f["name"], f["size"], f["dtype"], f["operation"]) for f in record["fallen"]}
    for spec in names:
        cells = []
        for case in cases:
            row = found[(spec, *case)]
            if "failed" in row:
                cells.append("FAILED")
                continue
            parts = [
                f"**{row[op]['ratio']:.2f}**" if (spec, *case, op) in slow else f"{row[op]['ratio']:.2f}"
                for op in ("encode", "decode_add")
            ]
            cells.append(" / ".join(parts))
        lines.append(f"| `{spec}` | " + " | ".join(cells) + " |")
    return lines


def below_asked(asked: list[Row], sizes: Row) -> list[str]:
    """Where a speed that was asked for, of memcpy, is under three quarters of it at another size or dtype."""
    best = asked[0].get("isa") if asked else None  # with which the sizes are measured
    least = {
        (row["spec"], row["operation"]): row["times"]
        for row in asked
        if row["than"] == "memcpy" and row.get("isa") == best
    }
    return [
        f"`{row['name']}` {operation} at {row['size']} {row['dtype']}: {row[operation]['ratio']:.2f}"
        for row in sizes["rows"]
        if "failed" not in row
        for operation in OPERATIONS
        if row[operation]["ratio"] < 0.75 * least.get((row["name"], operation), 0)
    ]


def made() -> str:
    """Everything between the markers."""
    record = json.loads((RESULTS / "codecs.json").read_text())
    sizes = json.loads((RESULTS / "codecs_sizes.json").read_text())
    machine, packages = record["machine"], record["machine"]["packages"]
    not_met = sum(row["met"] is False for row in record["asked"])
    peak = "largest error relative to the largest magnitude"
    blocks = [
        [
            f"{machine['processor']}, kernels for {machine['kernels']}; {packages}. "
            f"{record['elements']:,} float32 values ({record['elements'] * 4 / 2**20:.0f} MiB), "
            f"{record['threads']} thread, cores that other programs used before it: "
            f"{machine['load']}. GB/s of input, in brackets the ratio to a memcpy of the same buffer "
            "timed in turn with it; medians; Gaussian data. Every codec's promise is checked before its speed is "
            "taken.",
        ],
        ["![Error against bits per value](../benchmarks/results/codecs_error.png)"],
        ["![Speed against bits per value](../benchmarks/results/codecs_speed.png)"],
        speed_table(record, ours=True),
        ["What else there is, in the same run (to add, a peer decodes and adds):"],
        speed_table(record, ours=False),
        [f"Errors: relative L2 error, {peak}, and the bits per value where they depend on the data."],
        [f"*{key}*: {says}." for key, says in record["sets"].items()],
        error_table(record),
        [f"Speeds that were asked for: {not_met} of {len(record['asked'])} not met in this run."],
        asked_table(record),
        [
            "Other sizes and types: encode / decode_add as a ratio to memcpy of as many float32; **bold** where it is "
            f"lower by more than a quarter than at {sizes['base']} float32. Small arrays are taken in turn, so that "
            f"none is in the cache. The load before this run was {sizes['machine']['load']}, the comparison above "
            "included.",
        ],
        size_table(sizes),
        [
            "Under three quarters of what was asked for at 16 Mi float32: "
            + ("; ".join(below_asked(record["asked"], sizes)) or "none")
            + "."
        ],
    ]
    busy = machine["load"]
    if busy > BUSY:
        blocks.insert(
            0,
            [
                f"**Other programs were busy on this machine (load {busy:.0f}): the errors and sizes below are right, "
                "the speeds are not worth keeping.**"
            ],
        )
    return "\n\n".join("\n".join(block) for block in blocks)


def main() -> None:
    rewrite(PAGE, "RESULTS", __file__, made())


if __name__ == "__main__":
    main()

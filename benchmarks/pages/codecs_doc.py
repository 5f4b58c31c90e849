"""Write the measurements of docs/codecs.md from the result files.

python benchmarks/pages/codecs_doc.py            # rewrite docs/codecs.md between its RESULTS markers
python benchmarks/pages/codecs_doc.py --check    # exit 1 if docs/codecs.md and the files differ
"""

from __future__ import annotations

from typing import Any

from page import RESULTS, ROOT, codec_records, origin, origins, rewrite

PAGE = ROOT / "docs" / "codecs.md"
BUSY = 0.5  # cores that other programs used before a run; from there on speeds are not worth keeping
OPERATIONS = ("encode", "decode", "decode_add")

Row = dict[str, Any]


def name(row: Row) -> str:
    return f"`{row['name']}`" if row.get("ours", True) else row["name"]


def why_not(row: Row) -> str | None:
    return f"FAILED: {row['failed']}" if "failed" in row else row.get("missing")


def kernels(record: Row, isa: str) -> str:
    """Name the kernels that were timed; for forced ones also the best instruction set of the machine."""
    own: str = record["machine"]["kernels"]
    return isa if isa == own else f"{isa}, of {own}"


def speed_table(records: list[Row], *, ours: bool) -> list[str]:
    """Return bits, speeds in GB/s and ratios to memcpy in brackets: a row for each instruction set of each machine."""
    lines = [
        "| | kernels | bits per value | encode | decode | decode_add | NaN and infinity |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for spec in dict.fromkeys(row["name"] for record in records for row in record["rows"]):
        for record, row in ((r, row) for r in records for row in r["rows"] if row["name"] == spec):
            if row.get("ours", True) is not ours:
                continue
            own = record["machine"]["kernels"]
            why = why_not(row)
            if why is not None:
                lines.append(f"| {name(row)} | {own} | {why} | | | | |")
                continue
            kept = "kept" if row["keeps_nan"] else "**lost**"
            bits = f"{row['sets']['Gaussian']['bits']:.2f}"
            for isa, speeds in row.get("by_isa", {own: row}).items():
                if isa == "portable" != own:
                    continue  # portable kernels are for processors that are not made any more
                cells = " | ".join(
                    f"{speeds[op]['gb_s']:.2f} ({speeds[op]['ratio']:.2f})" for op in OPERATIONS
                )
                lines.append(f"| {name(row)} | {kernels(record, isa)} | {bits} | {cells} | {kept} |")
    return lines


def error_table(record: Row) -> list[str]:
    """Return relative L2 error and largest error by data set, with bits where they depend on the data."""
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


def asked_table(records: list[Row]) -> list[str]:
    lines = ["| | kernels | | asked: at least | measured | |", "|---|---|---|---:|---:|---|"]
    for record in records:
        for row in record["asked"]:
            if row["met"] is None:
                continue  # a peer or an instruction set that the machine lacks
            measured, met = f"{row['measured']:.2f}", "met" if row["met"] else "**not met**"
            asked = f"{row['times']:g} x {row['than']}"
            which = kernels(record, row.get("isa", record["machine"]["kernels"]))
            lines.append(f"| `{row['spec']}` | {which} | {row['operation']} | {asked} | {measured} | {met} |")
    return lines


def size_table(record: Row) -> list[str]:
    """Return the ratios encode / decode_add to memcpy of as many float32."""
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
    """Return where a speed is under three quarters of the ratio to memcpy that was asked for, by size and dtype."""
    best = asked[0].get("isa") if asked else None  # the instruction set with which the sizes are measured
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


def run_of(record: Row) -> str:
    """Say where and how a file was measured."""
    machine = record["machine"]
    missing = {row["name"] for row in codec_records(RESULTS)[-1]["rows"]} - {
        r["name"] for r in record["rows"]
    }
    older = (
        f" An earlier version's: without {', '.join(f'`{m}`' for m in sorted(missing))}." if missing else ""
    )
    busy = (
        " **Other programs were busy: its speeds are not worth keeping.**" if machine["load"] > BUSY else ""
    )
    beside = f" Ours beside it: {machine['beside']}." if "beside" in machine else ""
    return (
        f"* `{machine['kernels']}`: {machine['processor']}; {machine['packages']}. Cores that other programs used "
        f"before it: {machine['load']}.{beside}{older}{busy}"
    )


def made() -> str:
    """Return everything between the markers."""
    records, sizes = codec_records(RESULTS), codec_records(RESULTS, "_sizes")
    first = records[0]
    judged = [row for record in records for row in record["asked"] if row["met"] is not None]
    where = origins({f"on {record['machine']['kernels']}": record for record in records})
    peak = "largest error relative to the largest magnitude"
    blocks = [
        [
            f"{first['elements']:,} float32 values ({first['elements'] * 4 / 2**20:.0f} MiB), "
            f"{first['threads']} thread. GB/s of input, in brackets the ratio to a memcpy of the same buffer timed in "
            "turn with it; medians; Gaussian data. Every codec's promise is checked before its speed is taken. The "
            "kernels are of the machine's best instruction set, or of another one that it was told to use "
            "(`avx2, of avx512`):",
        ],
        [run_of(record) for record in records],
        ["![Error against bits per value](../benchmarks/results/codecs_error.png)"],
        ["![Speed against bits per value](../benchmarks/results/codecs_speed.png)"],
        speed_table(records, ours=True),
        [where],
        ["Other packages in the same runs (to add, a peer decodes and adds):"],
        speed_table(records, ours=False),
        [where],
        [f"Errors: relative L2 error, {peak}, and the bits per value where they depend on the data."],
        [f"*{key}*: {says}." for key, says in first["sets"].items()],
        error_table(records[-1]),
        [origin(records[-1])],
        [
            f"Speeds that were asked for: {sum(not row['met'] for row in judged)} of {len(judged)} not met in these "
            "runs."
        ],
        asked_table(records),
        [where],
        [
            "Other sizes and types: encode / decode_add as a ratio to memcpy of as many float32; **bold** where it is "
            f"lower by more than a quarter than at {sizes[0]['base']} float32. Small arrays are taken in turn, so that "
            "none is in the cache."
        ],
    ]
    for record, sized in zip(records, sizes, strict=True):
        machine = sized["machine"]
        blocks += [
            [f"Kernels for {machine['kernels']}; the load before this run was {machine['load']}:"],
            size_table(sized),
            [origin(sized)],
            [
                "Under three quarters of what was asked for at 16 Mi float32: "
                + ("; ".join(below_asked(record["asked"], sized)) or "none")
                + "."
            ],
        ]
    return "\n\n".join("\n".join(block) for block in blocks)


def main() -> None:
    rewrite(PAGE, __file__, RESULTS=made())


if __name__ == "__main__":
    main()

"""Write the tables of the results of `make gpu`.

python benchmarks/pages/gpu_table.py runs/bench/gpu/nvidia-h200    # gpu.md there
python benchmarks/pages/gpu_table.py benchmarks/results            # of every GPU, and the largest size in docs/cuda.md
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from page import RESULTS, ROOT, origin, origins, read, rewrite

OPERATIONS = ("encode", "decode", "decode_add")
Row = dict[str, Any]


def cell(row: Row, operation: str) -> str:
    found = row[operation]
    return f"{found['gb_s']:.0f} ({found['of_floor']:.2f})"


def table(record: Row, size: str) -> list[str]:
    """Return the table of one size: codecs, then peers."""
    text = [
        f"{size} of float32, GB/s of input; in brackets the time that a copy of the bytes moved would take over the "
        f"time taken. A copy on the device moves {record['copy_gb_s'][size]:.0f} GB/s, reading and writing.",
        "",
        "| | bits per value | encode | decode | decode_add |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in record["rows"]:
        if row["size"] != size:
            continue
        if "failed" in row:
            text.append(f"| `{row['name']}` | FAILED: {row['failed']} | | | |")
        else:
            cells = " | ".join(cell(row, operation) for operation in OPERATIONS)
            text.append(f"| `{row['name']}` | {row['bits']:.2f} | {cells} |")
    for row in record["peers"]:
        if row["size"] != size:
            continue
        if "missing" in row:
            text.append(f"| {row['name']} | {row['missing']} | | | |")
        else:
            bits = f"{row['bits']:.2f}" if "bits" in row else ""
            cells = " | ".join(f"{row[op]['gb_s']:.0f}" for op in ("encode", "decode"))
            text.append(f"| {row['name']} | {bits} | {cells} | |")
    return [*text, "", origin(record), ""]


def bucket_table(records: list[Row]) -> list[str]:
    """Return the table of buckets of the DDP hook, and of an all-reduce through MPI, on ranks that share the GPU."""
    columns = (
        "total",
        "waiting",
        "messages",
        "starting",
        "host_copies",
        "python",
        "processor",
        "alone",
        "copies",
    )
    text = [
        "",
        "A bucket of the DDP hook, and an all-reduce through MPI, on ranks that share the GPU; in ms "
        "(`benchmarks/gpu_bucket.py` says what the columns are):",
        "",
        f"| | ranks | {' | '.join(columns).replace('_', ' ')} |",
        f"|---|{'---:|' * (1 + len(columns))}",
    ]
    for record in records:
        for what in ("buckets", "all_reduce"):
            for row in record[what]:
                name = "bucket" if what == "buckets" else "all-reduce"
                form = f", `{row['feedback']}`" if row.get("feedback") else ""
                cells = " | ".join(f"{row[column]:.2f}" if column in row else "" for column in columns)
                text.append(
                    f"| {name} of {row['bytes'] >> 20} MiB, `{row['codec']}`{form} | {record['ranks']} | {cells} |"
                )
    return text


def page(record: Row, ranks: Row | None, buckets: list[Row]) -> str:
    """Return the whole page."""
    about = dict(record["device"])
    name, count = about.pop("name"), about.pop("multiprocessors")
    versions = ", ".join(f"{package} {version}" for package, version in about.items())
    text = [
        "# Codecs on a GPU",
        "",
        f"{name}, {count} multiprocessors; {versions}. Made by `make gpu`: every message equals the CPU's byte for "
        "byte before its speed is taken (those of `lossless` and `powersgd` are read back).",
        "",
    ]
    for size in record["copy_gb_s"]:
        text += table(record, size)
    text += ["| | size | | asked | measured | |", "|---|---|---|---:|---:|---|"]
    for one in record["asked"]:
        met = "met" if one["met"] else "**not met**"
        text.append(
            f"| `{one['name']}` | {one['size']} | {one['operation']} | {one['asked']:g} {one['of']} "
            f"| {one['measured']:.2f} | {met} |"
        )
    text += ["", origin(record)]
    if ranks is not None:
        text += ["", f"{ranks['ranks']} ranks share the GPU:", "", "| | ms | | bits |", "|---|---:|---:|---|"]
        for row in ranks["all_reduce"]:
            what = f"all-reduce of {row['bytes'] >> 20} MiB, `{row['codec']}`"
            text.append(ranks_line(what, row, f"relative error {row['relative_error']:.2e}"))
        for row in ranks["training"]:
            text.append(
                ranks_line(f"{row['steps']} steps, `{row['policy']}`", row, f"loss {row['loss']:.4f}")
            )
        text += ["", origin(ranks)]
    if buckets:
        text += [*bucket_table(buckets), "", origins({f"{one['ranks']} ranks": one for one in buckets})]
    return "\n".join(text) + "\n"


def ranks_line(what: str, row: Row, found: str) -> str:
    bits = "the same" if row["identical"] else "**differ**"
    return f"| {what} | {row['seconds'] * 1e3:.1f} | {found} | {bits} |"


def write(folder: Path) -> Row:
    """Write the page of one GPU's results, and return the record that it shows."""
    ranks = folder / "gpu_ranks.json"
    record: Row = read(folder / "gpu.json")
    buckets = [read(path) for path in sorted(folder.glob("gpu_bucket_*.json"))]
    found = page(record, read(ranks) if ranks.exists() else None, buckets)
    if "--check" not in sys.argv[2:]:
        (folder / "gpu.md").write_text(found)
        print(found)
    return record


def main(folder: Path) -> None:
    """Write the pages of a folder's results."""
    if (folder / "gpu.json").exists():
        write(folder)
        return
    records = [write(path.parent) for path in sorted(folder.glob("gpu/*/gpu.json"), reverse=True)]
    if folder.resolve() == RESULTS:
        made: list[str] = []
        for record in records:
            largest = list(record["copy_gb_s"])[-1]
            rate = f"a copy on the device moves {record['copy_gb_s'][largest]:.0f} GB/s, reading and writing"
            made += ["", f"{record['device']['name']}, {largest}; {rate}:", "", *table(record, largest)[2:-1]]
        rewrite(ROOT / "docs" / "cuda.md", __file__, GPU="\n".join([*made, ""]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

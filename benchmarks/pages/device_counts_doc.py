"""Write the table of what a bucket costs on a device in docs/cuda.md from the result files.

python benchmarks/pages/device_counts_doc.py            # rewrite the page between its COUNTS markers
python benchmarks/pages/device_counts_doc.py --check    # exit 1 if the page and the files differ
"""

from __future__ import annotations

from page import RESULTS, ROOT, origins, read, rewrite

WAYS = ("gloo", "NCCL")  # the others are in the files
COLUMNS = ("launches", "fills", "to_host", "to_device", "on_device", "waits", "python")


def main() -> None:
    """Rewrite or check the page."""
    lines = [
        "| | ranks | launches | fills | copies to the host | to the device | on the device | waits | Python calls |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    records = [read(path) for path in sorted(RESULTS.glob("device_counts/*.json"))]
    for way in WAYS:
        for codec in dict.fromkeys(row["codec"] for row in records[0]["rows"]):
            for record in records:
                (row,) = [r for r in record["rows"] if (r["way"], r["codec"]) == (way, codec)]
                name = f"{way}, `{codec}`" + (f", `{row['feedback']}`" if row["feedback"] else "")
                cells = " | ".join(f"{row[column]:,}" for column in COLUMNS)
                lines.append(f"| {name} | {record['ranks']} | {cells} |")
    lines += ["", origins({f"{record['ranks']} ranks": record for record in records})]
    rewrite(ROOT / "docs" / "cuda.md", __file__, COUNTS="\n".join(lines))


if __name__ == "__main__":
    main()

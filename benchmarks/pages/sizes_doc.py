"""Write the table of all-reduces by size in docs/performance.md from the result files.

python benchmarks/pages/sizes_doc.py            # rewrite the page between its SIZES markers
python benchmarks/pages/sizes_doc.py --check    # exit 1 if the page and the files differ
"""

from __future__ import annotations

from typing import Any

from page import ROOT, origins, result, rewrite

PLACES = {
    "1gbit_4hosts": "1 Gb/s, 4 hosts",
    "none_4hosts": "unshaped, 4 hosts",
    "sharedmemory_4ranks": "one host, 4 ranks",
    "sharedmemory_2ranks": "one host, 2 ranks",
}
COLUMNS = {
    2**12: "4 KiB",
    2**14: "16 KiB",
    2**16: "64 KiB",
    2**18: "256 KiB",
    2**20: "1 MiB",
    2**26: "64 MiB",
}


def lines(rows: list[dict[str, Any]], value: str, digits: int, place: str) -> list[str]:
    """Write a line of the table for each codec, with one value of each size."""
    made = []
    for codec in dict.fromkeys(row["codec"] for row in rows):
        of_size = {row["size"]: row for row in rows if row["codec"] == codec}
        if of_size.keys() != COLUMNS.keys():
            raise ValueError(f"{place}, {codec}: sizes {sorted(of_size)} are not those of the table")
        cells = " | ".join(f"{of_size[size][value]:.{digits}f}" for size in COLUMNS)
        made.append(f"| {place} | `{codec.partition(':')[0]}` | {cells} |")
    return made


def table(records: dict[str, dict[str, Any]], value: str, digits: int) -> str:
    """Write a table of one value of all rows."""
    made = [
        f"| where | codec | {' | '.join(COLUMNS.values())} |",
        f"|---|---|{'---|' * len(COLUMNS)}",
    ]
    for name, record in records.items():
        place = f"[{PLACES[name]}](../benchmarks/results/sizes/{name}.json)"
        made += lines(record["rows"], value, digits, place)
    return "\n".join(made)


def main() -> None:
    """Rewrite or check the page."""
    records = {name: result(f"sizes/{name}.json") for name in PLACES}
    where = origins({PLACES[name]: record for name, record in records.items()})
    for record in records.values():
        for row in record["rows"]:
            row["core_ms"] = row["cores"] * row["seconds"] * 1e3
            if not row["identical"]:
                raise ValueError(f"ranks differ: {row}")
    made = (
        "Times the speed of the best of MPICH's own and gloo:\n\n"
        f"{table(records, 'speedup', 2)}\n\n{where}\n\n"
        "Processor time of all ranks together for one operation, in milliseconds:\n\n"
        f"{table(records, 'core_ms', 2)}\n\n{where}"
    )
    rewrite(ROOT / "docs" / "performance.md", __file__, SIZES=made)


if __name__ == "__main__":
    main()

"""Write the tables of exact compression in docs/performance.md from the result files.

python benchmarks/pages/exact_doc.py            # rewrite the page between its EXACT markers
python benchmarks/pages/exact_doc.py --check    # exit 1 if the page and the files differ
"""

from __future__ import annotations

from typing import Any

from page import ROOT, origins, result, rewrite

LINKS = {"200mbit": "200 Mb/s", "1gbit": "1 Gb/s", "none": "unshaped"}
OPERATIONS = {"allreduce": "all-reduce", "sendrecv": "send to the next rank"}
TYPES = ("bfloat16", "float32")
PEERS = {"mpi": "MPICH", "gloo": "gloo"}


def records() -> dict[tuple[str, str, str], dict[str, Any]]:
    """Read the result files, by operation, dtype and link.

    Raises:
        ValueError: the ranks of an all-reduce ended with different bits, or exact compression was not exact.
    """
    found = {}
    for operation in OPERATIONS:
        for dtype in TYPES:
            for link in LINKS:
                path = f"exact/{operation}_{dtype}_{link}_4hosts.json"
                record = result(path)
                errors = {(row["size"], row["codec"]): row["relative_error"] for row in record["rows"]}
                for row in record["rows"]:
                    if row["identical"] is False:
                        raise ValueError(f"{path}: ranks differ: {row}")
                    if row["codec"] == "exponent" and row["relative_error"] != errors[row["size"], "none"]:
                        raise ValueError(f"{path}: not exact: {row}")
                found[operation, dtype, link] = record
    return found


def table(found: dict[tuple[str, str, str], dict[str, Any]]) -> list[str]:
    """Write a line for each operation, dtype, link and size."""
    lines = [
        "| | | link | size | best peer (ms) | `none` | `exponent` | `int8` | `exponent`: x peer | x `none` | bytes of "
        "`none` | `int8`: x peer | L2 error |",
        f"|---|---|---|{'---:|' * 10}",
    ]
    for (operation, dtype, link), record in found.items():
        by_size: dict[int, dict[str, dict[str, Any]]] = {}
        for row in record["rows"]:
            by_size.setdefault(row["size"], {})[row["codec"].partition(":")[0]] = row
        for size, rows in by_size.items():
            none, exact, int8 = rows["none"], rows["exponent"], rows["int8"]
            cells = [
                OPERATIONS[operation],
                dtype,
                LINKS[link],
                f"{size >> 20} MiB",
                f"{PEERS[exact['best_peer']]} {exact['best_peer_seconds'] * 1e3:.1f}",
                *(f"{row['seconds'] * 1e3:.1f}" for row in (none, exact, int8)),
                f"**{exact['speedup']:.2f}**",
                f"{none['seconds'] / exact['seconds']:.2f}",
                f"{exact['wire_bytes'] / none['wire_bytes']:.2f}",
                f"{int8['speedup']:.2f}",
                f"{int8['relative_error']:.1e}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Rewrite or check the page."""
    found = records()
    where = {
        f"{OPERATIONS[what]} of {dtype} at {LINKS[link]}": one for (what, dtype, link), one in found.items()
    }
    said = "Times in milliseconds, Gaussian values, four ranks on four hosts:"
    made = "\n".join([said, "", *table(found), "", origins(where)])
    rewrite(ROOT / "docs" / "performance.md", __file__, EXACT=made)


if __name__ == "__main__":
    main()

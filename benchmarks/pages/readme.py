"""Write the README's measurements from the result files.

python benchmarks/pages/readme.py            # rewrite README.md between its RESULTS markers
python benchmarks/pages/readme.py --check    # exit 1 if README.md and the files differ
"""

from __future__ import annotations

import json

from page import RESULTS, ROOT, rewrite

LINKS = {
    "200mbit_4hosts": "200 Mb/s",
    "1gbit_4hosts": "1 Gb/s",
    "unshaped_4hosts": "unshaped",
    "sharedmemory_4ranks": "shared memory",
}
PEERS = {"mpi": "MPICH", "gloo": "gloo"}


def demo() -> str:
    """Return the demonstration's table and its sentences."""
    record = json.loads((RESULTS / "demo" / "results.json").read_text())
    lines = [
        "| policy | tokens/s | x none | validation loss | vs none | dp MB | pp MB | tp MB (inside a host) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        wire = row["wire_bytes"]
        change = "" if row["name"] == "none" else f"{row['loss_change']:+.1%}"
        lines.append(
            f"| `{row['name']}` | {row['tokens_per_s']:,.0f} | {row['speedup']:.2f} | {row['val_loss']:.3f} | {change} "
            f"| {wire['dp'] / 1e6:,.0f} | {wire['pp'] / 1e6:,.0f} | {wire['tp'] / 1e6:,.0f} |"
        )
    said = " ".join(record["sentences"][:2])
    return "\n".join(
        [
            f"**`make demo-full`** ({record['machine']['processor']}). {said}",
            "",
            *lines,
            "",
            "![Loss over wall time and traffic per axis](benchmarks/results/demo/demo.png)",
        ]
    )


def allreduce() -> str:
    """Return the table of all-reduces of the largest size measured, by link."""
    lines = [
        "| link | codec | time (ms) | best peer (ms) | times as fast | of the wire's limit | relative L2 error |",
        "|---|---|---|---|---|---|---|",
    ]
    slower, peers = [], set()
    for key, link in LINKS.items():
        record = json.loads((RESULTS / f"allreduce_{key}.json").read_text())
        peers |= {row["peer"] for row in record["peers"]}
        largest = max(row["size"] for row in record["rows"])
        behind = [row for row in record["rows"] if row["speedup"] < 1]
        if behind:
            least, most = (f(row["speedup"] for row in behind) for f in (min, max))
            size = max(row["size"] for row in behind) >> 20
            slower.append(f"{link} up to {size} MiB ({least:.2f} to {most:.2f} times as fast)")
        for row in record["rows"]:
            if row["size"] != largest:
                continue
            fraction = "" if row["wire_fraction"] is None else f"{row['wire_fraction']:.2f}"
            lines.append(
                f"| {link}, {largest >> 20} MiB | `{row['codec']}` | {row['seconds'] * 1e3:.0f} "
                f"| {PEERS[row['best_peer']]} {row['best_peer_seconds'] * 1e3:.0f} | **{row['speedup']:.2f}** "
                f"| {fraction} | {row['relative_error']:.1e} |"
            )
    names = " and ".join(PEERS[peer] for peer in sorted(peers, key=list(PEERS).index))
    head = (
        "**All-reduce** of Gaussian fp32 on 4 ranks, each on a host of its own (the last rows: on one machine), "
        f"2 cores in all, beside {names} in the same run; all ranks end with the same bits "
        "(`make bench`; the files are in [benchmarks/results](benchmarks/results), other operations and what was "
        "missed in [lab.md](benchmarks/results/lab.md), and "
        "[docs/performance.md](docs/performance.md) says what they mean):"
    )
    tail = f"Slower than the best peer: {'; '.join(slower) or 'at no size measured'}."
    return "\n".join([head, "", *lines, "", tail])


def exact() -> str:
    """Return the text about the gains of the policy ``exact``, and where it loses."""
    gains = {}
    for dtype in ("bfloat16", "float32"):
        for link in ("1gbit", "none"):
            record = json.loads((RESULTS / "exact" / f"allreduce_{dtype}_{link}_4hosts.json").read_text())
            rows = [row for row in record["rows"] if row["codec"] == "exponent"]
            gains[dtype, link] = max(rows, key=lambda row: row["size"])
    half, whole = gains["bfloat16", "1gbit"], gains["float32", "1gbit"]
    fast = [gains[dtype, "none"]["speedup"] for dtype in ("bfloat16", "float32")]
    return (
        "**Try `exact` first.** This policy changes no result, only the time: an all-reduce of "
        f"{half['size'] >> 20} MiB of bfloat16 over 1 Gb/s is {half['speedup']:.2f} times as fast as "
        f"{PEERS[half['best_peer']]}'s, of float32 {whole['speedup']:.2f} times as fast as "
        f"{PEERS[whole['best_peer']]}'s, and "
        "ends with the bits of an uncompressed one. Where links are faster than the processors it costs time: "
        f"{min(fast):.2f} times as fast as they, on the same two cores with unshaped links "
        "([figures](docs/performance.md#exact-and-smaller))."
    )


def main() -> None:
    rewrite(ROOT / "README.md", __file__, EXACT=exact(), RESULTS=f"{demo()}\n\n{allreduce()}")


if __name__ == "__main__":
    main()

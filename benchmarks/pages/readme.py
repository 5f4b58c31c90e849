"""Write the README's measurements from the result files.

python benchmarks/pages/readme.py            # rewrite README.md between its RESULTS markers
python benchmarks/pages/readme.py --check    # exit 1 if README.md and the files differ
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from page import RESULTS, ROOT, codec_seconds, origin, origins, read, result, rewrite

from hybridcomp.results.provenance import NOT_RECORDED

LINKS = {
    "200mbit_4hosts": "200 Mb/s",
    "1gbit_4hosts": "1 Gb/s",
    "unshaped_4hosts": "unshaped",
    "sharedmemory_4ranks": "shared memory",
}
_LARGE = 1 << 20
DDP = {
    "200 Mb/s": "ddp_200mbit_4hosts.json",
    "1 Gb/s": "ddp_1gbit_4hosts.json",
    "unshaped": "ddp_none_4hosts.json",
}
CODECS, LOSSES, DEMO = "codecs/avx512.json", "aggressive/results.json", "demo/results.json"
EXACT = {
    (dtype, link): f"exact/allreduce_{dtype}_{link}_4hosts.json"
    for dtype in ("bfloat16", "float32")
    for link in ("1gbit", "none")
}
PEERS = {"mpi": "MPICH", "gloo": "gloo"}


def demo() -> str:
    """Return the demonstration's table and its sentences."""
    record = result(DEMO)
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
            f"**`make demo-full`**. {said}",
            "",
            *lines,
            "",
            origin(record),
            "",
            "![Loss over wall time and traffic per axis](benchmarks/results/demo/demo.png)",
        ]
    )


def pays() -> str:
    """Return the table of a DDP step by link: how long it waits uncompressed, and what compression gains."""
    lines = [
        "| network between hosts | an uncompressed step, by gloo | of which waiting | `int8` "
        "| `int4` with error feedback |",
        "|---|---|---|---|---|",
    ]
    runs = {link: result(file) for link, file in DDP.items()}
    for link, record in runs.items():
        seconds = {row["name"]: row["seconds"] for row in record["rows"]}
        local, gloo = seconds["local computation"], seconds["gloo"]
        gains = [f"{gloo / seconds[name]:.1f} times as fast" for name in ("int8", "int4+ef")]
        what = "none: sockets of one machine" if link == "unshaped" else link
        lines.append(f"| {what} | {gloo * 1e3:.0f} ms | {1 - local / gloo:.0%} | {' | '.join(gains)} |")
    local, gloo, ours = _at_10_gigabits(runs["1 Gb/s"])
    lines.insert(
        4,
        f"| 10 Gb/s, *predicted* | {gloo * 1e3:.0f} ms | {1 - local / gloo:.0%} | {gloo / ours:.1f} times as fast | |",
    )
    lines.append("| NVLink, PCIe, shared memory | | | does not pay | does not pay |")
    where = {**runs, "the loss": result(LOSSES), "codecs of the prediction": result(CODECS)}
    return "\n".join(
        [
            *lines,
            "",
            origins(where),
            "",
            "A step of DDP with 50 MB of float32 gradients, four hosts with a rank each that share two cores "
            "([how](docs/performance.md#a-step-of-ddp)). `int4` with error feedback, which adds what a "
            "message has lost to the next one, is what the policy `hybrid` takes for gradients: its loss after 1,000 "
            f"steps is {_gap_of_hybrid()} above that of the uncompressed run "
            "([losses](docs/study.md#aggressive-data-parallelism)). The prediction is that of "
            "[docs/performance.md](docs/performance.md#the-limits), for hosts whose step computes as long.",
        ]
    )


def _at_10_gigabits(record: dict[str, Any]) -> tuple[float, float, float]:
    """Predict the seconds of a step over 10 Gb/s: its computation, gloo's, and that with int8."""
    rows = {row["name"]: row for row in record["rows"]}
    local = rows["local computation"]["seconds"]
    (int8,) = (row for row in result(CODECS)["rows"] if row.get("spec") == "int8:block=128")
    speeds = (int8[pass_]["gb_s"] * 1e9 for pass_ in ("encode", "decode", "decode_add"))
    codec = codec_seconds(50e6, record["ranks"], *speeds)
    share = rows["gloo"]["wire_fraction"]  # of the link's rate, as over 1 Gb/s
    wire = {name: rows[name]["link_bytes"] * 8 / 10e9 / share for name in ("gloo", "int8")}
    return local, local + wire["gloo"], local + max(wire["int8"], codec)


def _gap_of_hybrid() -> str:
    losses = result(LOSSES)["loss"]
    return f"{losses['hybrid']['gap'] / losses['gloo']['mean']:.1%}"


def allreduce() -> str:
    """Return the table of all-reduces of the largest size measured, by link."""
    lines = [
        "| link | codec | time (ms) | best peer (ms) | times as fast | of the wire's limit | relative L2 error |",
        "|---|---|---|---|---|---|---|",
    ]
    slower, peers = [], set()
    records = {link: result(f"allreduce_{key}.json") for key, link in LINKS.items()}
    for link, record in records.items():
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
    tail = f"Slower than the best peer: of these all-reduces {'; '.join(slower) or 'none'}. {_slower_in_the_lab()}"
    unlike = {origin(cell): cell for cell in _cells()}.values()  # cells of the matrix may be of several runs
    where = records | {f"lab.md{', others' * number}": cell for number, cell in enumerate(unlike)}
    return "\n".join([head, "", *lines, "", origins(where), "", tail, "", alike()])


def _slower_in_the_lab() -> str:
    """Count the cells of all operations in the lab that are slower than the best peer."""
    cells = [
        (row["size"] >= _LARGE, record["link"], row["speedup"] < 1)
        for record in _cells()
        for row in record.get("rows", ())
        if row.get("speedup") is not None
    ]
    large = [(link, slower) for is_large, link, slower in cells if is_large]
    small = [slower for is_large, _, slower in cells if not is_large]
    unshaped = sum(slower for link, slower in large if link == "none")
    return (
        f"Of all operations, sizes, codecs and links in [lab.md](benchmarks/results/lab.md): of {len(large):,} cells "
        f"of 1 MiB and more {sum(slower for _, slower in large):,}, {unshaped:,} of them on links that are as fast as "
        f"memory, and of {len(small):,} smaller ones {sum(small):,}: a short message gains nothing by being shorter."
    )


def _cells() -> Iterator[dict[str, Any]]:
    """Yield the records of the matrix of all operations."""
    for path in sorted((RESULTS / "lab").glob("*.json")):
        yield from read(path).values()


def origins_of_all() -> set[tuple[str, str]]:
    """Return commit and processor of all files that figures of this page come from."""
    names = [
        DEMO,
        *DDP.values(),
        CODECS,
        LOSSES,
        *EXACT.values(),
        *(f"allreduce_{key}.json" for key in LINKS),
    ]
    records = [*map(result, names), *_cells()]
    return {
        (record.get("commit") or NOT_RECORDED, record["machine"]["processor"].partition(",")[0])
        for record in records
    }


def alike() -> str:
    """Say whether the figures of this page are of one commit and one machine."""
    found = origins_of_all()
    commits, processors = (sorted(set(some)) for some in zip(*found, strict=True))
    if len(found) == 1 and NOT_RECORDED not in commits:
        return f"All figures of this page are of commit {commits[0]} on {processors[0]}."
    return (
        f"The figures of this page are not of one machine and one commit: processors {' and '.join(processors)}, "
        f"commits {' and '.join(commits)}. `make figures` tells which code has changed since."
    )


def exact() -> str:
    """Return the text about the gains of the policy ``exact``, and where it has none."""
    gains = {}
    records = {key: result(file) for key, file in EXACT.items()}
    for key, record in records.items():
        rows = [row for row in record["rows"] if row["codec"] == "exponent"]
        gains[key] = max(rows, key=lambda row: row["size"])
    half, whole = gains["bfloat16", "1gbit"], gains["float32", "1gbit"]
    fast = [gains[dtype, "none"]["speedup"] for dtype in ("bfloat16", "float32")]
    return (
        "**No result may change?** The policy `exact` sends all bits in fewer bytes, by the codec `exponent`, wherever "
        "that is faster. With it an all-reduce of "
        f"{half['size'] >> 20} MiB of bfloat16 over 1 Gb/s is {half['speedup']:.2f} times as fast as "
        f"{PEERS[half['best_peer']]}'s, of float32 {whole['speedup']:.2f} times as fast as "
        f"{PEERS[whole['best_peer']]}'s, and "
        "ends with the bits of an uncompressed one. Where links are faster than the processors, that codec would be "
        f"{min(fast):.2f} times as fast as they, on the same two cores with unshaped links, and `exact` leaves it "
        "([figures](docs/performance.md#exact-and-smaller)).\n\n"
        f"{origins({f'{dtype}, {link}': record for (dtype, link), record in records.items()})}"
    )


def main() -> None:
    rewrite(ROOT / "README.md", __file__, PAYS=pays(), EXACT=exact(), RESULTS=f"{demo()}\n\n{allreduce()}")


if __name__ == "__main__":
    main()

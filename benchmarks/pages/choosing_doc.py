"""Write the table of docs/choosing.md from the result files: the gain of each choice, by link.

python benchmarks/pages/choosing_doc.py            # rewrite it between its CHOICES markers
python benchmarks/pages/choosing_doc.py --check    # exit 1 if the page and the files differ
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from page import RESULTS, ROOT, rewrite

LINKS = ("200mbit", "1gbit", "none")
Row = dict[str, Any]


def main() -> None:
    lines = [
        "| what is sent | take | 200 Mb/s | 1 Gb/s | unshaped | what it costs | measured in |",
        "|---|---|---:|---:|---:|---|---|",
        *rows(),
    ]
    said = (
        "Times as fast as the best of MPICH and gloo, uncompressed, in the same run: four hosts on two cores. Below 1 "
        "it is slower. Costs are those at 1 Gb/s."
    )
    rewrite(ROOT / "docs" / "choosing.md", __file__, CHOICES="\n".join([said, "", *lines]))


def rows() -> Iterator[str]:
    exact = "[exact and smaller](performance.md#exact-and-smaller)"
    for dtype in ("bfloat16", "float32"):
        found = largest(f"exact/allreduce_{dtype}_{{}}_4hosts.json", "exponent")
        yield line(
            f"sums of {dtype} that must stay exact", "policy `exact`", found, lambda _: "nothing", exact
        )
    for codec in ("int8", "int4"):
        found = largest("sizes/{}_4hosts.json", f"{codec}:block=128", links=LINKS[1:])
        where = "[small messages](performance.md#small-messages)"
        yield line("sums of float32, 64 MiB", f"`{codec}`", found, error, where)
    where = "[a step of DDP](performance.md#a-step-of-ddp)"
    for name in ("int4+ef", "powersgd:rank=1+ef", "topk:ratio=0.01+ef", "gloo, PowerSGD hook, rank 1"):
        spec = name.removesuffix("+ef")
        take = "PyTorch's own PowerSGD hook, rank 1" if "hook" in name else f"hook, `{spec}`, feedback `ef`"
        yield line("gradients of DDP, 50 MB", take, steps(name), of_a_step, where)
    found = {}
    for link in LINKS[:2]:
        found[link] = one(
            f"sparse/sums_{link}_4hosts.json",
            lambda row: row["density"] == 0.01 and row["codec"].startswith("threshold"),
        )
    yield line(
        "sums of arrays with 1 % of values", "`threshold:abs=1e-30`", found, error,
        "[sparse sums](performance.md#sums-of-sparse-arrays)",
    )  # fmt: skip
    yield policy()


def largest(pattern: str, codec: str, links: tuple[str, ...] = LINKS) -> dict[str, Row]:
    """Return a codec's row at the largest size, by link."""
    found = {}
    for link in links:
        record = json.loads((RESULTS / pattern.format(link)).read_text())
        size = max(row["size"] for row in record["rows"])
        found[link] = next(row for row in record["rows"] if (row["codec"], row["size"]) == (codec, size))
    return found


def one(file: str, which: Callable[[Row], bool]) -> Row:
    (row,) = [row for row in json.loads((RESULTS / file).read_text())["rows"] if which(row)]
    return row


def steps(name: str) -> dict[str, Row]:
    """Return a step of DDP by link, with its speed over that of a step on gloo alone."""
    found = {}
    for link in LINKS:
        ours, gloo = (
            one(f"ddp_{link}_4hosts.json", lambda row, n=n: row["name"] == n) for n in (name, "gloo")
        )
        found[link] = {**ours, "speedup": gloo["seconds"] / ours["seconds"]}
    return found


def of_a_step(row: Row) -> str:
    return f"relative L2 error of one step {row['relative_error']:.1e}, which later steps make up for"


def error(row: Row) -> str:
    return f"relative L2 error {row['relative_error']:.1e}"


def line(what: str, take: str, found: dict[str, Row], cost: Callable[[Row], str], where: str) -> str:
    cells = [f"{found[link]['speedup']:.2f}" if link in found else "" for link in LINKS]
    return f"| {what} | {take} | {' | '.join(cells)} | {cost(found['1gbit'])} | {where} |"


def policy() -> str:
    """Return the line of the policy ``hybrid`` beside gloo: medians of the rounds' ratios."""
    speeds = json.loads((RESULTS / "policies-speed" / "results.json").read_text())["speed"]
    loss = json.loads((RESULTS / "policies" / "results.json").read_text())["loss"]
    gains = {}
    for link in LINKS[:2]:
        pairs = zip(speeds[link]["hybrid"]["ratios"], speeds[link]["gloo"]["ratios"], strict=True)
        gains[link] = {"speedup": median(ours / theirs for ours, theirs in pairs)}
    gap, spread = loss["hybrid"]["gap"], loss["none"]["spread"]
    return line(
        "a GPT over dp 2, tp 2, pp 2", "policy `hybrid`", gains,
        lambda _: f"validation loss {gap:+.4f} (seeds differ by {spread:.4f})",
        "[the study](study.md#policies-of-3d-parallelism-speed-and-loss)",
    )  # fmt: skip


if __name__ == "__main__":
    main()

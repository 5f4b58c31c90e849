"""Write the tables of docs/choosing.md from the result files: the gain of each choice by link, and what training keeps.

python benchmarks/pages/choosing_doc.py            # rewrite them between their markers
python benchmarks/pages/choosing_doc.py --check    # exit 1 if the page and the files differ
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, median
from typing import Any

from page import ROOT, origins, result, rewrite

from hybridcomp.results.pairs import paired

NOT_MEASURED = "not measured"
LINKS = ("200mbit", "1gbit", "none")
Row = dict[str, Any]


def main() -> None:
    said = (
        "Times as fast as the best of MPICH and gloo, uncompressed, in the same run: four hosts on two cores. Below 1 "
        "it is slower. Costs are those at 1 Gb/s."
    )
    choices = [
        "| what is sent | take | 200 Mb/s | 1 Gb/s | unshaped | what it costs | measured in |",
        "|---|---|---:|---:|---:|---|---|",
        *rows(),
    ]
    training = [
        "| training | take | loss, uncompressed | loss | above it, in pairs of a seed | bytes | 200 Mb/s | 1 Gb/s "
        "| measured in |",
        "|---|---|---:|---:|---|---|---:|---:|---|",
        *trainings(),
    ]
    rewrite(
        ROOT / "docs" / "choosing.md",
        __file__,
        CHOICES="\n".join([said, "", *choices, "", origins(files(SENT))]),
        TRAINING="\n".join([*training, "", origins(files(TRAINED))]),
    )


# Files of each table by what they show, for the line that says where they come from.
SENT = {
    "exact and smaller": "exact/allreduce_float32_1gbit_4hosts.json",
    "small messages": "sizes/1gbit_4hosts.json",
    "a step of DDP": "ddp_1gbit_4hosts.json",
    "sparse sums": "sparse/sums_1gbit_4hosts.json",
}
TRAINED = {
    "examples": "examples.json",
    "losses of DP on 4 hosts": "aggressive/results.json",
    "speeds of DP on 4 hosts": "aggressive-speed/results.json",
    "DP on 2 hosts": "loco/results.json",
    "FSDP2": "fsdp_loss.json",
    "losses of DP x PP x TP": "policies/results.json",
    "speeds of DP x PP x TP": "policies-speed/results.json",
    "TP across hosts": "tensor/results.json",
}


def files(names: dict[str, str]) -> dict[str, Row]:
    return {name: result(file) for name, file in names.items()}


def rows() -> Iterator[str]:
    exact = "[exact and smaller](performance.md#exact-and-smaller)"
    for dtype in ("bfloat16", "float32"):
        found = largest(f"exact/allreduce_{dtype}_{{}}_4hosts.json", "exponent")
        yield line(
            f"sums of {dtype} that must stay exact",
            "`exponent`, as `exact` where it is faster",
            found,
            lambda _: "nothing",
            exact,
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


def largest(pattern: str, codec: str, links: tuple[str, ...] = LINKS) -> dict[str, Row]:
    """Return a codec's row at the largest size, by link."""
    found = {}
    for link in links:
        record = result(pattern.format(link))
        size = max(row["size"] for row in record["rows"])
        found[link] = next(row for row in record["rows"] if (row["codec"], row["size"]) == (codec, size))
    return found


def one(file: str, which: Callable[[Row], bool]) -> Row:
    (row,) = [row for row in result(file)["rows"] if which(row)]
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


# -- what training keeps ---------------------------------------------------------------------------------


def trainings() -> Iterator[str]:
    """Yield a row for each way to train: loss and speed of a row are of the same model, layout and policy."""
    examples = "[examples](torch.md#programs-as-they-are)"
    yield example(
        "DDP", "nanogpt", "on gloo, `HYBRIDCOMP_HOOK=1`", "the hook on gloo, policy `hybrid`", examples
    )
    where = "[aggressive](study.md#aggressive-data-parallelism)"
    lost, fast = result("aggressive/results.json"), result("aggressive-speed/results.json")
    for name, later in {"hybrid": None, "lowrank": "lowrank, later", "sparse": "sparse, later"}.items():
        speeds = {link: over_steps(found, name, later) for link, found in fast["speed"].items()}
        yield study(lost, name, "gloo", f"policy `{name}`", speeds, where)
    found = result("loco/results.json")
    where = "[4 bits](study.md#loco-4-bit-gradients-by-the-form-of-their-feedback)"
    yield study(found, "4 bits, ef", "gloo", "`int4`, feedback `ef`", of_study(found, "4 bits, ef"), where)
    yield fsdp(where)
    yield example("FSDP2", "fsdp2", "`compress_fsdp`", "`compress_fsdp`", examples)
    lost, fast = result("policies/results.json"), result("policies-speed/results.json")
    where = "[policies](study.md#policies-of-3d-parallelism-speed-and-loss)"
    yield study(lost, "hybrid", "none", "policy `hybrid`", of_study(fast, "hybrid"), where)
    found = result("tensor/results.json")
    where = "[tensor](study.md#the-same-with-tensor-parallelism-across-hosts)"
    yield study(found, "hybrid", "gloo", "policy `hybrid`, tp across hosts", of_study(found, "hybrid"), where)


Gain = tuple[float, float | None]  # speed over gloo's, and by how much fewer bytes go between hosts


def of_study(found: Row, name: str) -> dict[str, Gain]:
    """Return a variant's gains by link: medians of the rounds' ratios to gloo."""
    gains = {}
    for link, rows_ in found["speed"].items():
        pairs = zip(rows_[name]["ratios"], rows_["gloo"]["ratios"], strict=True)
        gains[link] = (
            median(ours / theirs for ours, theirs in pairs),
            fewer(found, rows_[name]),
        )
    return gains


def over_steps(found: Row, first: str, later: str | None, share: float = 0.1) -> Gain:
    """Return the gains of a policy over 1,000 steps whose first ``share`` goes as ``hybrid``'s do."""
    begin, then = found["hybrid"], found[later or first]
    each = [1 / (share / a + (1 - share) / b) for a, b in zip(begin["ratios"], then["ratios"], strict=True)]
    sent = share * begin["wire_bytes"]["dp"] + (1 - share) * then["wire_bytes"]["dp"]
    return median(each), then["plain_bytes"]["dp"] / sent


def fewer(found: Row, row: Row) -> float | None:
    """Return uncompressed bytes between hosts over those sent; None if an axis sends inside hosts and between them."""
    train, ppn = found["study"]["train"], found["study"]["ppn"]
    if ppn not in (1, train.get("tp", 1)):
        return None
    inside = {"tp"} if ppn > 1 else set()
    sent, plain = (
        sum(count for axis, count in row[what].items() if axis not in inside)
        for what in ("wire_bytes", "plain_bytes")
    )
    return float(plain / sent)


def study(found: Row, name: str, baseline: str, take: str, gains: dict[str, Gain], where: str) -> str:
    train, losses = found["study"]["train"], found["loss"]
    layout = " x ".join(
        f"{axis.upper()} {train[axis]}" for axis in ("dp", "pp", "tp") if train.get(axis, 1) > 1
    )
    steps = found["study"]["loss"]["fields"]["steps"]
    what = f"{layout}, {found['parameters'] / 1e6:.1f} M parameters, {steps:,} steps"
    gaps = list(losses[name]["gaps"].values())
    return kept(what, take, losses[baseline]["mean"], losses[name]["mean"], gaps, gains, where)


def fsdp(where: str) -> str:
    found = result("fsdp_loss.json")
    losses = {(run["variant"], run["seed"]): run["loss"] for run in found["runs"]}
    seeds = sorted({seed for _, seed in losses})
    ours, theirs = ([losses[name, seed] for seed in seeds] for name in ("4 bits, ef", "gloo"))
    gaps = [a - b for a, b in zip(ours, theirs, strict=True)]
    what = f"FSDP2 on {found['hosts'] * found['ppn']} ranks, {found['steps']:,} steps"
    return kept(what, "`int4`, feedback `ef`", fmean(theirs), fmean(ours), gaps, {}, where)


def example(what: str, program: str, how: str, take: str, where: str) -> str:
    record = result("examples.json")
    (row,) = [row for row in record["rows"] if (row["program"], row["how"]) == (program, how)]
    losses = row["gloo_loss"], row["hybridcomp_loss"]
    what = f"{what}, `examples/{program}.py` on {record['hosts']} hosts"
    return kept(what, take, *losses, [losses[1] - losses[0]], {record["rate"]: (row["ratio"], None)}, where)


def kept(
    what: str,
    take: str,
    theirs: float,
    ours: float,
    gaps: Sequence[float],
    gains: dict[str, Gain],
    where: str,
) -> str:
    """Return a row."""
    mean, noise = paired(gaps)
    above = (
        f"{mean:+.4f}, one seed"
        if len(gaps) == 1
        else f"{mean:+.4f} ± {noise:.4f} ({', '.join(f'{g:+.4f}' for g in gaps)})"
    )
    ratios = {gain[1] for gain in gains.values() if gain[1] is not None}
    sent = f"{max(ratios):.1f} times fewer" if ratios else NOT_MEASURED
    speeds = [f"{gains[link][0]:.2f}" if link in gains else NOT_MEASURED for link in LINKS[:2]]
    return (
        f"| {what} | {take} | {theirs:.4f} | {ours:.4f} | {above} | {sent} | {' | '.join(speeds)} | {where} |"
    )


if __name__ == "__main__":
    main()

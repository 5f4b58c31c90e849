"""Seconds of training until a loss: a rule that adapts, beside static ratios and PyTorch's gloo.

python benchmarks/time_to_loss.py --json results.json --plot results.png
python benchmarks/time_to_loss.py --rates 200mbit --seeds 1 --steps 100 --policy mine.toml
python benchmarks/time_to_loss.py --rates 100mbit --seeds 1 --only gloo --json results.json    # one more into that file

Every variant trains a GPT on four hosts of the lab, one replica each, with links of each rate and with each seed. The
loss on held-out text is taken every some steps; its seconds are those of training alone, and between two evaluations it
is interpolated. The loss to reach is for each rate and seed the lowest that both GraVAC and some static ratio end
at, unless ``--loss`` gives one. GraVAC's decisions depend on time: so losses are taken with shaped links, and not
once for all rates as studies do. All losses must be finite. The file of ``--json`` is written after each run; the runs
that it has, of the same model, are kept and not run again. Takes root, as ``hybridcomp lab`` does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import resultfile
from programs import CheckError
from tqdm import tqdm

from hybridcomp import style
from hybridcomp.net import Lab
from hybridcomp.results.provenance import commit, facts
from hybridcomp.results.record import RunRecord, read_run

HOSTS = 4
TIMEOUT = 1800.0
MODEL = (
    "--dp 4 --layers 4 --d-model 256 --heads 4 --seq-len 64 --micro-batches 1 --micro-batch-size 4 --warmup-steps 30 "
    "--lr 1e-3 --eval-batches 16 --checkpoint-every 0"
)
RULE = """
min_bytes = 16384
exclude = ["*.bias", "*norm*"]
dp.all_reduce = {{ codec = "topk:ratio={ratio},values=(int8:block=64)", feedback = "ef"{more} }}
"""
GLOO, GRAVAC, STATIC = "gloo", "gravac", "top-k"  # the last begins the names of the static ratios


@dataclass(frozen=True)
class Run:
    """Figures of one training.

    Attributes:
        variant, rate, seed: variant, rate of the links, and seed of the run.
        steps, seconds, losses: step, seconds of training alone, and loss of each evaluation.
        wire_bytes: bytes that all ranks sent on axis dp.
        decided: step and codec of each decision.
        processor: processor of the machine that it ran on.
        commit: commit whose code ran.
    """

    variant: str
    rate: str
    seed: int
    steps: list[int]
    seconds: list[float]
    losses: list[float]
    wire_bytes: int
    decided: list[tuple[int, str]]
    processor: str = ""
    commit: str = ""


def variants(eps: float) -> dict[str, str]:
    """Return the texts of the policies by name."""
    static = {f"{STATIC} {ratio:g}": RULE.format(ratio=ratio, more="") for ratio in (0.1, 0.01, 0.001)}
    return {**static, GRAVAC: RULE.format(ratio=0.1, more=f', adapt = "gravac:eps={eps}"')}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", nargs="+", default=["100mbit", "200mbit", "1gbit"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--eval-every", type=int, default=25)
    parser.add_argument("--only", nargs="+", metavar="VARIANT", help=f"run these alone, such as {GRAVAC}")
    parser.add_argument("--eps", type=float, default=0.75, help="of gravac (default 0.75, the paper's)")
    parser.add_argument("--policy", type=Path, nargs="*", default=[], help="further policies, by their files")
    parser.add_argument("--loss", type=float, help="to reach")
    parser.add_argument("--kind", default="auto", help="of lab, see hybridcomp lab")
    parser.add_argument("--flags", default="", help="of hybridcomp train, for all runs")
    parser.add_argument("--json", type=Path, help="write all runs there, beside those that it has")
    parser.add_argument("--plot", type=Path, help="draw losses over seconds there")
    args = parser.parse_args()
    if args.steps < args.eval_every:
        parser.error(f"--steps must be at least --eval-every ({args.eval_every}), not {args.steps}")
    return args


def train(lab: Lab, name: str, policy: str, seed: int, args: argparse.Namespace, folder: Path) -> RunRecord:
    """Train in a lab; return its record."""
    file, out = folder / "policy.toml", folder / "run"
    file.write_text(policy)
    flags = f"{MODEL} --steps {args.steps} --eval-every {args.eval_every} --seed {seed} {args.flags}"
    which = ["--backend", "gloo", "--policy", "none"] if name == GLOO else ["--policy", str(file)]
    try:
        command = ["hybridcomp", "train", *flags.split(), *which, "--out", str(out)]
        lab.mpirun(command, timeout=TIMEOUT, check=True)
    except subprocess.CalledProcessError as error:
        raise CheckError(f"{name}: exit code {error.returncode}\n{error.stderr[-2000:]}") from error
    return read_run(name, out / "metrics.jsonl")


def run_of(record: RunRecord, rate: str, seed: int, processor: str = "", commit: str = "") -> Run:
    """Return the figures of a run from its record.

    Raises:
        CheckError: a loss is not finite.
    """
    losses = [line["loss"] for line in record.evaluations]
    if not losses or not all(map(math.isfinite, losses)):
        raise CheckError(f"{record.name}, {rate}, seed {seed}: losses {losses}")
    return Run(
        record.name,
        rate,
        seed,
        [line["step"] for line in record.evaluations],
        [line["elapsed"] for line in record.evaluations],
        losses,
        record.wire_bytes["dp"],
        [(line["step"], line["codec"]) for line in record.decisions],
        processor,
        commit,
    )


def seconds_to(run: Run, loss: float) -> float | None:
    """Return the seconds until a run's loss first reaches ``loss``; None if it never does."""
    before = None
    for seconds, found in zip(run.seconds, run.losses, strict=True):
        if found <= loss:
            if before is None:
                return seconds
            (earlier, higher) = before
            return earlier + (seconds - earlier) * (higher - loss) / (higher - found)
        before = seconds, found
    return None


def targets(runs: Sequence[Run], given: float | None) -> dict[tuple[str, int], float]:
    """Return the loss to reach by rate and seed: the lowest that both GraVAC and a static ratio end at.

    Without both it is one that no run reaches.
    """
    found: dict[tuple[str, int], float] = {}
    for key in dict.fromkeys((run.rate, run.seed) for run in runs):
        ends = {run.variant: run.losses[-1] for run in runs if (run.rate, run.seed) == key}
        static = [loss for name, loss in ends.items() if name.startswith(STATIC)]
        both = static and GRAVAC in ends
        found[key] = given or (max(min(static), ends[GRAVAC]) if both else -math.inf)
    return found


def table(runs: Sequence[Run], given: float | None) -> list[dict[str, Any]]:
    """Return a row for each rate and variant: mean seconds to the loss over the seeds, and the last loss."""
    wanted = targets(runs, given)
    rows = []
    for rate, variant in dict.fromkeys((run.rate, run.variant) for run in runs):
        mine = [run for run in runs if (run.rate, run.variant) == (rate, variant)]
        reached = [seconds_to(run, wanted[run.rate, run.seed]) for run in mine]
        every = [one for one in reached if one is not None]
        rows.append(
            {
                "rate": rate,
                "variant": variant,
                "seeds": len(mine),
                "seconds": mean(every) if len(every) == len(mine) else None,
                "loss": mean(run.losses[-1] for run in mine),
                "all_steps": mean(run.seconds[-1] for run in mine),
                "MB": mean(run.wire_bytes for run in mine) / 1e6,
                "processors": sorted({run.processor for run in mine}),
            }
        )
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows, each with its time over the best static ratio's at that rate."""
    heads = f"{'rate':>8} {'variant':>16} {'to loss (s)':>12} {'x best static':>14} {'all steps (s)':>14}"
    print(f"{heads} {'loss':>8} {'MB':>9}")
    for row in rows:
        beside = [r for r in rows if r["rate"] == row["rate"] and r["variant"].startswith(STATIC)]
        best = min((r["seconds"] for r in beside if r["seconds"] is not None), default=None)
        took = row["seconds"]
        text = "never" if took is None else f"{took:.1f}"
        ratio = "-" if took is None or best is None else f"{took / best:.2f}"
        print(
            f"{row['rate']:>8} {row['variant']:>16} {text:>12} {ratio:>14} {row['all_steps']:>14.1f} "
            f"{row['loss']:>8.4f} {row['MB']:>9.1f}"
        )


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draw losses over seconds, a panel for each rate, with the decisions above it."""
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    rates = list(dict.fromkeys(run.rate for run in runs))
    names = list(dict.fromkeys(run.variant for run in runs))
    figure, axes = plt.subplots(1, len(rates), figsize=(5 * len(rates), 4), squeeze=False, sharey=True)
    for axis, rate in zip(axes[0], rates, strict=True):
        for run in (run for run in runs if run.rate == rate):
            number = names.index(run.variant)
            label = run.variant if run.seed == runs[0].seed else None
            axis.plot(
                run.seconds, run.losses, color=style.SERIES[number % len(style.SERIES)], label=label, lw=1.2
            )
        axis.set(title=f"links at {rate}", xlabel="seconds of training", xscale="log")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("loss on held-out text")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def kept(file: Path | None, about: dict[str, Any]) -> list[Run]:
    """Return the runs in a file of results; none if the file is not there.

    Raises:
        CheckError: the file has no runs, or runs of other settings than ``about``.
    """
    if file is None or not file.exists():
        return []
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        # in older files of all runs
        shared = {
            "processor": found.get("machine", {}).get("processor", ""),
            "commit": found.get("commit", ""),
        }
        runs = [
            Run(**shared | run | {"decided": [tuple(one) for one in run["decided"]]}) for run in found["runs"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckError(f"{file} has no runs that could be kept: {error!r}") from error
    other = {name: found.get(name) for name in about if found.get(name) != about[name]}
    if other:
        raise CheckError(f"{file} has runs of other settings: {other} there, not {about}")
    return runs


def main() -> None:
    args = arguments()
    every = {GLOO: "", **variants(args.eps), **{path.stem: path.read_text() for path in args.policy}}
    names = args.only or list(every)
    if unknown := set(names) - set(every):
        raise CheckError(f"--only {', '.join(sorted(unknown))}: the variants are {', '.join(every)}")
    about: dict[str, Any] = {
        "hosts": HOSTS,
        "steps": args.steps,
        "model": MODEL,
        "flags": args.flags,
        "eps": args.eps,
    }
    runs = kept(args.json, about)
    done = {(run.rate, run.seed, run.variant) for run in runs}
    todo = [key for key in itertools.product(args.rates, args.seeds, names) if key not in done]
    bar = tqdm(total=len(todo), unit="run")
    for rate in dict.fromkeys(rate for rate, _, _ in todo):
        with Lab(HOSTS, rate, kind=args.kind) as lab:
            about["machine"] = facts(lab.kind)
            for _, seed, name in (key for key in todo if key[0] == rate):
                bar.set_description(f"{name}, {rate}, seed {seed}")
                with tempfile.TemporaryDirectory() as folder:
                    record = train(lab, name, every[name], seed, args, Path(folder))
                runs.append(run_of(record, rate, seed, about["machine"]["processor"], commit()))
                bar.update()
                write(args.json, about, runs, args.loss)
    bar.close()
    runs.sort(key=lambda run: (args.rates.index(run.rate) if run.rate in args.rates else -1, run.seed))
    print(
        f"{HOSTS} hosts, {args.steps} steps, seeds {', '.join(map(str, sorted({run.seed for run in runs})))}"
    )
    show(table(runs, args.loss))
    if args.plot is not None:
        draw(runs, args.plot)


def write(file: Path | None, about: dict[str, Any], runs: Sequence[Run], loss: float | None) -> None:
    """Write the runs so far, and the table of those that can be compared."""
    if file is not None:
        each = [asdict(run) for run in runs]
        resultfile.write(
            file, {"commit": resultfile.commits(each), "rows": table(runs, loss), "runs": each} | about
        )


if __name__ == "__main__":
    try:
        main()
    except CheckError as error:
        sys.exit(f"time_to_loss: {error}")

"""Train a recommendation model whose embedding rows travel uncompressed, by one bound, or by two levels of bounds.

python benchmarks/dlrm.py --json runs/bench/dlrm.json
python benchmarks/dlrm.py --rates 200mbit --seeds 1 --flags "--steps 60 --rows 2000"

Every variant is examples/dlrm.py on four hosts of the lab, one rank each, with links of each rate and with each seed:
on PyTorch's gloo, uncompressed on hybridcomp, by one bound for all tables, and by bounds and coders of their own that
are wider at first. Speeds are of training alone, its exact first steps included. The AUC on held-out clicks may differ
from that of the uncompressed run with the same seed by 0.001 at most; each variant's row says whether it does. A run
whose replicas differ, or whose loss is not finite, ends the benchmark. Takes root, as ``hybridcomp lab`` does.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from programs import CheckError, found_by
from resultfile import write
from tqdm import tqdm

from hybridcomp.net import Lab

PROGRAM = Path(__file__).parents[1] / "examples" / "dlrm.py"
HOSTS = 4
TIMEOUT = 1200.0
MODEL = "--steps 600 --batch 512 --width 32 --rows 50000 --test 32768 --from-step 60 --until 300"
GLOO, NONE, ONE, DUAL = "gloo", "uncompressed", "one bound", "two levels"
VARIANTS = {
    GLOO: ("--backend", "gloo"),
    NONE: ("--compress", "none"),
    ONE: ("--compress", "one"),
    DUAL: ("--compress", "dual"),
}
ALLOWED = 1e-3  # largest difference of the AUC to the uncompressed run's


@dataclass(frozen=True)
class Run:
    """Figures of one training.

    Attributes:
        variant, rate, seed: variant, rate of the links, and seed of the run.
        auc: AUC on held-out clicks.
        loss: mean over the last tenth of the steps.
        samples_per_second: speed of all ranks together.
        plain_bytes, wire_bytes: bytes of the all-to-all of rows, by all ranks in all steps, the exact ones too; 0 on
            gloo, which does not count them.
        codecs: codecs of the tables, where each has its own.
    """

    variant: str
    rate: str
    seed: int
    auc: float
    loss: float
    samples_per_second: float
    plain_bytes: int
    wire_bytes: int
    codecs: list[str]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", nargs="+", default=["200mbit", "1gbit"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="variants")
    parser.add_argument("--flags", default="", help=f"of the program, after: {MODEL}")
    parser.add_argument("--kind", default="auto", help="of lab, see hybridcomp lab")
    parser.add_argument("--json", type=Path, help="write all runs there")
    args = parser.parse_args()
    if NONE not in args.only:
        parser.error(f"--only must have {NONE!r}, which the others are compared with")
    return args


def train(lab: Lab, variant: str, rate: str, seed: int, flags: str) -> Run:
    """Run the program on all hosts.

    Raises:
        CheckError: the program failed, a loss is not finite, or replicas differ.
    """
    command = ["python", str(PROGRAM), *f"{MODEL} --seed {seed}".split(), *VARIANTS[variant], *flags.split()]
    found = found_by(lab, command, 1, TIMEOUT)
    if not found["agree"] or not all(map(math.isfinite, found["losses"])):
        raise CheckError(
            f"{variant}, {rate}, seed {seed}: replicas agree: {found['agree']}, losses {found['losses']}"
        )
    loss = mean(found["losses"][-max(1, len(found["losses"]) // 10) :])
    kept = ("auc", "samples_per_second", "plain_bytes", "wire_bytes", "codecs")
    return Run(variant, rate, seed, loss=loss, **{key: found[key] for key in kept})


def table(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return a row for each rate and variant: means over the seeds, and the differences to the uncompressed runs."""
    rows = []
    for rate, variant in dict.fromkeys((run.rate, run.variant) for run in runs):
        mine = [run for run in runs if (run.rate, run.variant) == (rate, variant)]
        plain = {run.seed: run for run in runs if (run.rate, run.variant) == (rate, NONE)}
        speed = mean(run.samples_per_second for run in mine)
        apart = [run.auc - plain[run.seed].auc for run in mine]
        wire = sum(run.wire_bytes for run in mine)
        rows.append(
            {
                "rate": rate,
                "variant": variant,
                "seeds": len(mine),
                "samples_per_second": speed,
                "speedup": speed / mean(run.samples_per_second for run in plain.values()),
                "ratio": sum(run.plain_bytes for run in mine) / wire if wire else None,
                "wire_bytes": wire / len(mine),
                "auc": mean(run.auc for run in mine),
                "auc_difference": mean(apart),
                "auc_farthest": max(map(abs, apart)),
                "auc_kept": max(map(abs, apart)) <= ALLOWED,
                "loss": mean(run.loss for run in mine),
            }
        )
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    print(
        f"{'rate':>8} {'variant':>13} {'samples/s':>10} {'speed-up':>9} {'ratio':>6} {'MB':>8} {'AUC':>9} "
        f"{'difference':>11} {'farthest':>9} {'loss':>8}"
    )
    for row in rows:
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        print(
            f"{row['rate']:>8} {row['variant']:>13} {row['samples_per_second']:>10.0f} {row['speedup']:>9.2f} "
            f"{ratio:>6} {row['wire_bytes'] / 1e6:>8.1f} {row['auc']:>9.6f} {row['auc_difference']:>+11.6f} "
            f"{row['auc_farthest']:>9.6f} {row['loss']:>8.5f}"
        )
    for row in rows:
        if row["variant"] != NONE:
            verdict = "met" if row["auc_kept"] else "not met"
            print(f"|AUC - uncompressed AUC| <= {ALLOWED:g}, {row['variant']} at {row['rate']}: {verdict}")


def main() -> None:
    args = arguments()
    runs: list[Run] = []
    bar = tqdm(total=len(args.rates) * len(args.seeds) * len(args.only), unit="run")
    about: dict[str, Any] = {"hosts": HOSTS, "model": MODEL, "flags": args.flags}
    for rate in args.rates:
        with Lab(HOSTS, rate, kind=args.kind) as lab:
            for seed, variant in itertools.product(args.seeds, args.only):
                bar.set_description(f"{variant}, {rate}, seed {seed}")
                runs.append(train(lab, variant, rate, seed, args.flags))
                bar.update()
    bar.close()
    rows = table(runs)
    show(rows)
    if args.json is not None:
        write(args.json, about | {"rows": rows, "runs": [asdict(run) for run in runs]}, lab.kind)


if __name__ == "__main__":
    try:
        main()
    except CheckError as error:
        sys.exit(f"dlrm: {error}")

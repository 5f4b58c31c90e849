"""Measure losses of the optimizers that exchange momenta, and AdamW's, in pairs of a seed, by examples/onebit.py.

python benchmarks/onebit_losses.py --study small --json benchmarks/results/onebit/small.json
python benchmarks/onebit_losses.py --study long --json runs/long.json --seeds 1     # and later on, the other seeds

Every method trains at each learning rate with each seed: on the same data, for as many steps. A run that is in the file
is not run again; after each one the file is written. Bytes are those that rank 0 has sent in all steps, and in those
after the warm-up. A run counts only if all ranks have ended with the same weights.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import resultfile
from tqdm import tqdm

from hybridcomp.results.provenance import commit

ROOT = Path(__file__).parents[1]
RANKS = 4
SAID = re.compile(
    r"held-out loss (?P<loss>[\d.]+|nan); (?P<seconds>[\d.]+) s; replicas agree: (?P<agree>\w+)\s+"
    r"gradients: sent (?P<sent>[\d.]+) MB .*after step \d+ (?P<since>[\d.]+) MB"
)


@dataclass(frozen=True)
class Study:
    """A model, the steps that it is trained for, and by what.

    Attributes:
        about: what it is for.
        options: options of examples/onebit.py of all runs.
        steps, warmup: numbers of steps.
        rates: learning rates.
        methods: options by a method's name; the first is what the others are compared with.
    """

    about: str
    options: tuple[str, ...]
    steps: int
    warmup: int
    rates: tuple[float, ...]
    methods: Mapping[str, str]


_ADAMW = {"AdamW": "--optimizer adamw"}
STUDIES = {
    "small": Study(
        "0.8 M parameters, every rate",
        ("--width", "128", "--layers", "4"),
        1200,
        240,
        (2e-3, 4e-3, 8e-3),
        {
            **_ADAMW,
            "1-bit Adam": "--optimizer onebit",
            "0/1 Adam, few renewals": "--optimizer zero-one --scaler 1",
            "0/1 Adam": "--optimizer zero-one",
        },
    ),
    "large": Study(
        "10.7 M parameters",
        ("--width", "384", "--layers", "6", "--batch", "2"),
        1000,
        200,
        (2.5e-4, 5e-4, 1e-3),
        {**_ADAMW, "0/1 Adam, few renewals": "--optimizer zero-one --scaler 1"},
    ),
    "long": Study(
        "0.8 M parameters, 3,000 steps, with local steps",
        ("--width", "128", "--layers", "4"),
        3000,
        100,
        (4e-3,),
        {
            **_ADAMW,
            "0/1 Adam, up to 8 local steps": "--optimizer zero-one --scaler 1 --local-steps 8",
            "0/1 Adam, up to 16 local steps": "--optimizer zero-one --scaler 1 --local-steps 16",
        },
    ),
}


def run(study: Study, method: str, rate: float, seed: int) -> dict[str, Any]:
    """Train once; return what came of it.

    Raises:
        RuntimeError: it failed, said something else, or its ranks ended with unlike weights.
    """
    words = [*study.options, *study.methods[method].split(), "--steps", str(study.steps)]
    words += ["--warmup", str(study.warmup), "--lr", f"{rate:g}", "--seed", str(seed)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    done = subprocess.run(
        [*launcher, str(ROOT / "examples" / "onebit.py"), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    said = SAID.search(done.stdout)
    if done.returncode or said is None or said["agree"] != "True":
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return {
        "method": method,
        "lr": rate,
        "seed": seed,
        "loss": float(said["loss"]),
        "sent_mb": float(said["sent"]),
        "since_mb": float(said["since"]),
        "seconds": float(said["seconds"]),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--study", choices=STUDIES, required=True)
    parser.add_argument("--json", type=Path, required=True, help="file of results, which grows")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--rates", type=float, nargs="+", help="learning rates; by default all of the study's"
    )
    parser.add_argument("--methods", nargs="+", help="names of methods; by default all of the study's")
    args = parser.parse_args()
    study = STUDIES[args.study]
    if unknown := set(args.methods or ()) - set(study.methods):
        parser.error(f"--methods: {args.study} has {', '.join(study.methods)}, not {', '.join(unknown)}")
    rows = resultfile.read(args.json)["runs"] if args.json.exists() else []
    have = {(row["seed"], row["lr"], row["method"]) for row in rows}
    # All methods of a seed and rate beside each other in time.
    wanted = itertools.product(args.seeds, args.rates or study.rates, args.methods or study.methods)
    todo = [one for one in wanted if one not in have]
    bar = tqdm(todo, unit="run", disable=not sys.stderr.isatty())
    for seed, rate, method in bar:
        bar.set_description(f"{method}, rate {rate:g}, seed {seed}")
        rows.append(run(study, method, rate, seed))
        found = f"loss {rows[-1]['loss']:.4f}, {rows[-1]['seconds']:.0f} s"
        print(f"{method}, rate {rate:g}, seed {seed}: {found}", flush=True)
        about = {
            "what": study.about,
            "steps": study.steps,
            "warmup": study.warmup,
            "options": list(study.options),
        }
        resultfile.write(args.json, {**about, "baseline": next(iter(study.methods)), "runs": rows})


if __name__ == "__main__":
    main()

"""Profile where a training step's time goes: ``python benchmarks/step_profile.py --json step_profile.json``.

Trains as a study does, on the study's lab, and samples some of the steps from two sides: in each rank a timer samples
the main thread's Python stack, and perf samples all cores. Takes root, Linux's perf, and about a minute a variant.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from resultfile import write
from stepprofile import figures, perf, tables
from stepprofile.records import RankRecord, Sampling
from tqdm import tqdm

from hybridcomp.errors import ConfigError, HybridcompError
from hybridcomp.net import Lab, Rate
from hybridcomp.results.record import RunRecord
from hybridcomp_lab.demo.training import train_in
from hybridcomp_lab.study.plan import Run, Study
from hybridcomp_lab.study.reading import read_study

ROOT = Path(__file__).parents[1]
RANK = Path(__file__).with_name("step_rank.py")
SETTLING = 5  # steps at the start that do not count: connections, allocations, caches


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = flags.add_argument
    add(
        "study", nargs="?", type=Path, default=ROOT / "studies" / "policies.toml", help="default: %(default)s"
    )
    add(
        "--variants",
        default="none,hybrid,gloo",
        help="of the study, measured for speed (default %(default)s)",
    )
    add("--rate", default="1gbit", help="of the lab's links (default %(default)s)")
    add("--steps", type=int, default=60, help="that are sampled (default %(default)s: about 15 s)")
    add("--plain", type=int, default=20, help="steps before them, without a sampler (default %(default)s)")
    add("--hertz", type=float, default=200, help="samples a second of each main thread (default %(default)s)")
    add("--places", action="store_true", help="also print the functions that took most")
    add("--json", type=Path, help="also write the results there")
    args = flags.parse_args(arguments)
    if args.steps < 1 or args.plain < 1 or not 1 <= args.hertz <= 2000:
        flags.error("--steps and --plain must be at least 1, --hertz 1 to 2000")
    return args


def runs_of(study: Study, names: list[str], rate: str) -> list[Run]:
    """Return the study's runs for the speed of these variants, at that rate.

    Raises:
        ConfigError: the study measures no speed, or no speed of such a variant.
    """
    if study.speed is None:
        raise ConfigError(f"the study {study.name!r} has no [speed]")
    speed = dataclasses.replace(study.speed, rates=(rate,), rounds=1)
    runs = {run.variant.name: run for run in dataclasses.replace(study, speed=speed).runs("speed")}
    for name in names:
        if name not in runs:
            raise ConfigError(f"there is no variant {name!r}; there are {', '.join(runs)}")
    return [runs[name] for name in names]


def profile(
    study: Study, run: Run, lab: Lab, recording: perf.Recording, args: argparse.Namespace
) -> dict[str, Any]:
    """Train as the run says, with some steps sampled, and return the variant's entry in the result."""
    folder = recording.folder
    files = {name: folder / f"policy-{i}.toml" for i, name in enumerate(study.policies)}
    for name, path in files.items():
        path.write_text(study.policies[name], encoding="utf-8")
    sampling = Sampling(str(folder), str(recording.control), SETTLING, args.plain, args.steps, args.hertz)
    run = dataclasses.replace(run, fields={**run.fields, "steps": sampling.steps})
    command = run.command(folder, files)
    record = RunRecord(run.name)
    with recording, tqdm(total=sampling.steps, desc=run.variant.name, leave=False, disable=None) as bar:
        started = ["python", str(RANK), json.dumps(dataclasses.asdict(sampling)), *command[1:]]
        train_in(lab, started, study.ppn, folder, record, lambda: bool(bar.update(len(record.train) - bar.n)))
    records = [
        RankRecord(**json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8")))
        for rank in range(study.hosts * study.ppn)
    ]
    began, ended = max(one.began for one in records), min(one.ended for one in records)
    parts, places = perf.by_part(
        perf.read(recording.lines()), frozenset(one.pid for one in records), began, ended
    )
    cores = os.cpu_count() or 1
    rows = figures.of_main_threads(records, args.steps)
    tokens = record.train[-1]["tokens"] / record.train[-1]["step"]
    # perf records a little less time than each rank does, so its steps are those that fit into its time.
    fit = (ended - began) * 1e3 / rows["step_ms"]
    return {
        "name": run.variant.name,
        "command": shlex.join(command),
        "steps": args.steps,
        **figures.of_plain_steps(records, args.plain, tokens),
        **rows,
        **figures.of_cores(parts, places, cores * (ended - began), fit),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Profile all variants in turn, and return the result."""
    program = perf.find_perf()
    study = read_study(str(args.study))
    runs = runs_of(study, args.variants.split(","), str(Rate.parse(args.rate)))
    with (
        tempfile.TemporaryDirectory(prefix="step-profile-") as folder,
        Lab(study.hosts, args.rate) as lab,
    ):
        for note in lab.notes:
            print(note)
        variants = [
            profile(study, run, lab, perf.Recording(program, Path(folder) / run.folder), args) for run in runs
        ]
        return {
            "lab": lab.kind,
            "cores": os.cpu_count(),
            "study": study.name,
            "rate": str(lab.rate),
            "hosts": study.hosts,
            "ranks": study.hosts * study.ppn,
            "hertz": args.hertz,
            "perf_hertz": perf.HERTZ,
            "variants": variants,
        }


def main() -> None:
    """Measure, print the tables, and write the result; wrong input ends as one line and code 2."""
    args = parse(sys.argv[1:])
    try:
        result = measure(args)
    except (HybridcompError, OSError) as error:
        print(f"step_profile.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    variants = result["variants"]
    print(
        f"{result['study']}, {result['ranks']} ranks on {result['cores']} cores, links at {result['rate']}\n"
    )
    print("\n\n".join([tables.steps(variants), tables.main_thread(variants), tables.processor(variants)]))
    if args.places:
        print("\n" + "\n\n".join(tables.places(one) for one in variants))
    if args.json is not None:
        write(args.json, result, result["lab"])


if __name__ == "__main__":
    main()

"""Run the programs of examples/ on four hosts with slow links, on gloo and on hybridcomp in turn.

python benchmarks/examples_lab.py --json runs/bench/examples.json
python benchmarks/examples_lab.py --only nanogpt --rounds 1

The programs say their own speed, whether all replicas agree, and their loss; a run whose replicas differ, or whose loss
did not fall, ends the benchmark. Ray Train is not here: its workers are not a lab's ranks.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resultfile import write
from rich.progress import track

from hybridcomp.net import Lab

EXAMPLES = Path(__file__).parents[1] / "examples"
TIMEOUT = 300.0


@dataclass(frozen=True)
class Case:
    """A program, and how it is run on gloo and on hybridcomp.

    Attributes:
        name: name of the file in examples/, without its ending.
        arguments: arguments of both runs.
        gloo: arguments that put the program on gloo.
        ours: arguments that put the program on hybridcomp.
        options: options of ``hybridcomp run`` for the run on hybridcomp.
        label: description for the table.
    """

    name: str
    arguments: tuple[str, ...]
    gloo: tuple[str, ...] = ("--backend", "gloo")
    ours: tuple[str, ...] = ("--backend", "hybridcomp")
    options: tuple[str, ...] = ()
    label: str = ""


NANOGPT = ("--steps", "30", "--batch", "2")
TRAINER = ("--width", "256", "--layers", "4", "--max_steps", "30")
CASES = (
    Case("nanogpt", NANOGPT, label="as it is, `--backend hybridcomp`"),
    Case(
        "nanogpt",
        NANOGPT,
        ours=("--backend", "gloo"),
        options=("--hook",),
        label="on gloo, `HYBRIDCOMP_HOOK=1`",
    ),
    Case("hf_trainer", TRAINER, ("--ddp_backend", "gloo"), ("--ddp_backend", "hybridcomp"), label="as it is"),
    Case("hf_accelerate", ("--steps", "30"), label="with the hook"),
    Case("lightning_ddp", ("--epochs", "4"), label="with the hook"),
    Case("fsdp2", ("--steps", "30"), label="`compress_fsdp`"),
    Case("tp_pp", ("--steps", "20"), label="`hybrid` on a mesh of 2 stages of 2 ranks"),
    Case("moe", ("--steps", "20"), label="all-to-alls and the hook"),
)


@dataclass(frozen=True)
class Said:
    """Figures that a run printed: samples or tokens a second, the first loss and the last."""

    speed: float
    first: float
    last: float


def run(lab: Lab, case: Case, *, ours: bool) -> Said:
    """Run a program on four ranks.

    Raises:
        RuntimeError: the program failed, its replicas differ, or its loss did not fall.
    """
    options = case.options if ours else ()
    which = case.ours if ours else case.gloo
    program = ["python", str(EXAMPLES / f"{case.name}.py"), *case.arguments, *which]
    done = lab.mpirun(
        ["hybridcomp", "run", *options, "--", *program],
        1,
        timeout=TIMEOUT,
        env={"HYBRIDCOMP_SUMMARY": "0", "TRANSFORMERS_VERBOSITY": "error"},
    )
    losses = [float(x) for x in re.findall(r"(?:step|epoch) \d+: loss ([\d.]+)", done.stdout)]
    speed = re.search(r"([\d.]+) (?:samples|tokens)/s", done.stdout)
    agree = "replicas agree: True" in done.stdout
    if done.returncode or speed is None or not agree or len(losses) < 2 or losses[-1] >= losses[0]:
        raise RuntimeError(f"{' '.join(program)}: {done.returncode}\n{done.stdout}\n{done.stderr}")
    return Said(float(speed[1]), losses[0], losses[-1])


def measure(lab: Lab, case: Case, rounds: int) -> dict[str, Any]:
    """Run a program on both backends in turn; returns the medians."""
    pairs = [(run(lab, case, ours=False), run(lab, case, ours=True)) for _ in range(rounds)]
    gloo, ours = (statistics.median(pair[i].speed for pair in pairs) for i in (0, 1))
    return {
        "program": case.name,
        "how": case.label,
        "arguments": [*case.arguments],
        "gloo_per_second": gloo,
        "hybridcomp_per_second": ours,
        "ratio": statistics.median(pair[1].speed / pair[0].speed for pair in pairs),
        "ratios": [pair[1].speed / pair[0].speed for pair in pairs],
        "gloo_loss": pairs[0][0].last,
        "hybridcomp_loss": pairs[0][1].last,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="programs whose name contains this")
    parser.add_argument(
        "--rounds", type=int, default=3, help="runs on each backend, of which the median counts"
    )
    parser.add_argument("--rate", default="200mbit", help="of each host's link (default 200mbit)")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    cases = [case for case in CASES if args.only in case.name]
    if not cases or args.rounds < 1:
        parser.error(
            f"--only must be a part of {', '.join(sorted({case.name for case in CASES}))}, --rounds 1 or more"
        )
    record: dict[str, Any] = {"rate": args.rate, "hosts": 4, "rounds": args.rounds}
    with Lab(4, args.rate) as lab:
        rows = [
            measure(lab, case, args.rounds)
            for case in track(cases, "programs", disable=not sys.stderr.isatty())
        ]
    record["rows"] = rows
    for row in rows:
        print(
            f"{row['program']:14} {row['how']:42} {row['gloo_per_second']:9.1f} {row['hybridcomp_per_second']:9.1f} "
            f"{row['ratio']:5.2f}  loss {row['gloo_loss']:.3f} {row['hybridcomp_loss']:.3f}"
        )
    if args.json is not None:
        write(args.json, record, lab.kind)


if __name__ == "__main__":
    main()

"""A training step with each technique of docs/techniques.md, beside the same step without it.

python benchmarks/techniques.py --rate 200mbit --json techniques.json
python benchmarks/techniques.py --only cool-down --steps 6 --rounds 1 --flags '--layers 4 --d-model 64'

Every variant is a run of ``hybridcomp train`` on four hosts, in turn, once with links of the rate and once with links
that are not shaped, as often as there are rounds. ``exposed`` is what the link costs: the median step less that of the
same variant with unshaped links. The time of codecs is in both. Before a time is printed, all runs of a variant must
have the same losses, bit for bit, which must be finite; both copies of a tied embedding must have the same bits; and
its traffic must be what the formula says. Shaped links take root, as ``hybridcomp lab`` does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from programs import CheckError
from resultfile import write
from tqdm import tqdm

from hybridcomp.net import Lab
from hybridcomp_lab.train.checkpoints.resume import newest
from hybridcomp_lab.train.checkpoints.stored import read
from hybridcomp_lab.train.model.embedding import COPIES

HOSTS = 4
TIMEOUT = 600.0
_SETTLING = 3  # steps that are not counted
DEEP = "--pp 4 --micro-batches 8"
WIDE = "--pp 2 --dp 2 --micro-batches 4"
TIED = f"{WIDE} --tie-embeddings --vocab-size 8192"
REPLICAS = 2


@dataclass
class Variant:
    """One way to train.

    Attributes:
        technique: technique that it belongs to; variants of one are compared.
        name: name in the table.
        flags: flags for the mesh, and for what else the technique needs of the model.
        policy: text of the policy in TOML.
        shaped, unshaped: seconds of the steps that count, of all rounds.
        losses: loss of every step.
        wire: bytes that all ranks send in a step, by axis.
    """

    technique: str
    name: str
    flags: str
    policy: str
    shaped: list[float] = field(default_factory=list)
    unshaped: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    wire: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """Figures of a variant: medians, in seconds."""

    technique: str
    variant: str
    policy: str
    step: float
    exposed: float
    wire_bytes: dict[str, float]
    loss: float

    def line(self) -> str:
        """Return the row as text."""
        wire = "  ".join(f"{axis} {count / 1e6:.3f}" for axis, count in self.wire_bytes.items() if count)
        return (
            f"{self.technique:>10} {self.variant:>24} {self.step * 1e3:>9.1f} {self.exposed * 1e3:>9.1f} "
            f"{self.loss:>8.4f}  {wire}"
        )


HEADER = (
    f"{'technique':>10} {'variant':>24} {'step':>9} {'exposed':>9} {'last':>8}  sent by all ranks\n"
    f"{'':>10} {'':>24} {'(ms)':>9} {'(ms)':>9} {'loss':>8}  (MB a step)"
)


def variants(backward: str, gradients: str) -> list[Variant]:
    """Return all variants.

    Args:
        backward: codec of a pipeline's backward sends.
        gradients: codec of data parallelism's gradients.
    """
    send = f'[pp]\nbackward = {{ codec = "{backward}"'
    sums = f'exclude = ["*norm*", "*embed*"]\n[dp]\nall_reduce = {{ codec = "{gradients}", feedback = "ef"'
    none = 'codec = "none"\n'
    found = [
        Variant("cool-down", "none", DEEP, none),
        Variant("cool-down", "all backward sends", DEEP, f'{send}, feedback = "ef" }}\n'),
        Variant("cool-down", "cool-down", DEEP, f'{send}, feedback = "ef", only = "cool-down" }}\n'),
        Variant("cool-down", "cool-down, no feedback", DEEP, f'{send}, only = "cool-down" }}\n'),
    ]
    found += [
        Variant("stages", f"first {count} of 2 stages", WIDE, f"{sums}, stages = {count} }}\n")
        for count in range(3)
    ]
    fused = f"{none}[embedding]\nfused = true\n"
    return [
        *found,
        Variant("embedding", "two sums", TIED, none),
        Variant("embedding", "fused", TIED, fused),
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="200mbit", help="of each host's link (default 200mbit)")
    parser.add_argument("--kind", default="auto", help="of lab, see hybridcomp lab (default auto)")
    parser.add_argument("--steps", type=int, default=12, help="of each run; 3 are not counted (default 12)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of all variants (default 3)")
    parser.add_argument("--only", default="", help="one technique: cool-down, stages or embedding")
    parser.add_argument("--backward", default="powersgd:rank=16", help="codec of backward sends")
    parser.add_argument("--gradients", default="powersgd:rank=16", help="codec of gradients")
    parser.add_argument("--flags", default="", help="of hybridcomp train, for all runs")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    args = parser.parse_args()
    if args.steps <= _SETTLING:
        parser.error(f"--steps must be above {_SETTLING}, not {args.steps}")
    return args


def train(variant: Variant, lab: Lab, args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Run a variant in a lab; returns the lines of its metrics."""
    out = folder / "run"
    policy = folder / "policy.toml"
    policy.write_text(variant.policy)
    flags = (
        f"{variant.flags} --steps {args.steps} --eval-batches 0 --checkpoint-every {args.steps} {args.flags}"
    )
    command = ["hybridcomp", "train", *flags.split(), "--policy", str(policy), "--out", str(out)]
    try:
        lab.mpirun(command, timeout=TIMEOUT, check=True)
    except subprocess.CalledProcessError as error:
        raise CheckError(f"{variant.name}: exit code {error.returncode}\n{error.stderr[-2000:]}") from error
    if "--tie-embeddings" in variant.flags:
        check_copies(out)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def check_copies(out: Path) -> None:
    """Check that both copies of the embedding in a run's checkpoint have the same bits."""
    checkpoint = newest(out)
    assert checkpoint is not None
    config = json.loads((checkpoint / "checkpoint.json").read_text())["run"]
    size = (config["vocab_size"], config["d_model"])
    last = config["pp"] - 1
    keys = (f"pp0.tp0.model.{COPIES[0]}", f"pp{last}.tp0.model.{COPIES[1]}")
    state = {key: torch.empty(size) for key in keys}
    read(state, checkpoint, alone=True)
    if not torch.equal(*state.values()):
        raise CheckError("the copies of the embedding differ")


def take(variant: Variant, entries: Sequence[dict[str, Any]], seconds: list[float], steps: int) -> None:
    """Add the figures of a run to its variant.

    Raises:
        CheckError: a loss is not finite, or differs from that of the variant's other runs.
    """
    lines = [entry for entry in entries if entry["kind"] == "train"]
    losses = [line["loss"] for line in lines]
    if len(losses) != steps or not all(map(math.isfinite, losses)):
        raise CheckError(f"{variant.name}: losses {losses}")
    if variant.losses and losses != variant.losses:
        raise CheckError(f"{variant.name}: losses {losses}, and of another run {variant.losses}")
    variant.losses = losses
    seconds += [line["step_seconds"] for line in lines[_SETTLING:]]
    first, last = lines[_SETTLING - 1]["wire_bytes"], lines[-1]["wire_bytes"]
    variant.wire = {axis: (last[axis] - first[axis]) / (steps - _SETTLING) for axis in last}


def check_traffic(measured: Sequence[Variant]) -> None:
    """Check that the fused sum of an embedding sends (2 D - 1) / (3 D - 2) of the bytes of two sums.

    Raises:
        CheckError: it sends another number of bytes.
    """
    sent = {v.name: v.wire["embedding"] for v in measured if v.technique == "embedding"}
    if sent and sent["fused"] * (3 * REPLICAS - 2) != sent["two sums"] * (2 * REPLICAS - 1):
        raise CheckError(f"an embedding's sums sent {sent} bytes a step")


def main() -> None:
    args = arguments()
    every = [v for v in variants(args.backward, args.gradients) if args.only in v.technique]
    bar = tqdm(total=2 * args.rounds * len(every), unit="run")
    kinds: list[str] = []
    for _, rate in itertools.product(range(args.rounds), (args.rate, "none")):
        with Lab(HOSTS, rate, kind=args.kind) as lab:
            kinds.append(lab.kind)
            for variant in every:
                bar.set_description(f"{variant.technique}: {variant.name}, {rate}")
                with tempfile.TemporaryDirectory() as folder:
                    entries = train(variant, lab, args, Path(folder))
                seconds = variant.unshaped if rate == "none" else variant.shaped
                take(variant, entries, seconds, args.steps)
                bar.update()
    bar.close()
    check_traffic(every)
    rows = []
    for v in every:
        step, alone = statistics.median(v.shaped), statistics.median(v.unshaped)
        rows.append(Row(v.technique, v.name, v.policy, step, step - alone, v.wire, v.losses[-1]))
    print(f"{HOSTS} hosts ({kinds[0]}), links at {args.rate}, {args.steps} steps, {args.rounds} rounds")
    print("\n".join([HEADER, *(row.line() for row in rows)]))
    if args.json is not None:
        about = {"hosts": HOSTS, "lab": kinds[0], "rate": args.rate, "steps": args.steps}
        about |= {"rounds": args.rounds, "flags": args.flags}
        write(args.json, about | {"rows": [asdict(row) for row in rows]}, kinds[0])


if __name__ == "__main__":
    try:
        main()
    except CheckError as error:
        sys.exit(f"techniques: {error}")

"""Train within a limit of memory, by the recomputation that the planner chooses: memory predicted and measured.

python benchmarks/recompute_memory.py --json recompute.json
python benchmarks/recompute_memory.py --limit 150M

For each limit the planner chooses how many blocks are computed again (hybridcomp_lab/planner/recompute.py); a process
of its own then trains that for three steps. Measured is the most resident memory since before the model was built, less
the memory that was resident then. A limit that is passed ends the program.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from resultfile import write

from hybridcomp.policy import load_policy
from hybridcomp_lab.planner.recompute import PLANNED, least_of_all, least_that_fits, needed, with_blocks
from hybridcomp_lab.train.config import TrainConfig

CONFIG = TrainConfig(
    policy="none",
    layers=8,
    d_model=256,
    heads=4,
    seq_len=256,
    vocab_size=256,
    micro_batch_size=8,
    micro_batches=2,
)
STEPS = 3
# Freed tensors go back to the system at once: otherwise holes between tensors in use count as used.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
_SECONDS = 120


def limits() -> list[float]:
    """Return limits between all blocks recomputed and none."""
    none = load_policy("none")
    most, least = (needed(with_blocks(CONFIG, count), none) for count in (0, CONFIG.layers))
    return [(least + share * (most - least)) / PLANNED for share in (1.0, 0.75, 0.5, 0.25, 0.0)]


def case(limit: float) -> dict[str, Any]:
    """Choose the blocks to recompute by a limit, train, and measure the memory."""
    none = load_policy("none")
    config = least_that_fits(CONFIG, limit, none)
    if config is None:
        needs = least_of_all(CONFIG, none)[0] / PLANNED
        raise SystemExit(f"{limit / 1e6:.1f} MB are too few: {needs / 1e6:.1f} MB would do")
    blocks = len(config.recomputed(0))
    command = [sys.executable, __file__, "--train", str(blocks)]
    environment = os.environ | MALLOC
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_SECONDS, check=False, env=environment
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    measured = json.loads(done.stdout)["bytes"]
    return {"limit": limit, "recomputed": blocks, "predicted": needed(config, none), "measured": measured}


def resident(key: str) -> int:
    """Return this process's resident memory in bytes: VmRSS is now, VmHWM the most since it was reset."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return 1024 * int(line.split()[1])


def train(blocks: int) -> None:
    """Train a few steps and print the memory that they took."""
    import torch  # noqa: PLC0415

    from hybridcomp_lab.train.checkpoints.resume import run_identity  # noqa: PLC0415
    from hybridcomp_lab.train.model.gpt import ModelShape, build_gpt, loss_of  # noqa: PLC0415
    from hybridcomp_lab.train.model.recompute import recompute_blocks  # noqa: PLC0415

    def run(config: TrainConfig, again: int) -> None:
        model = build_gpt(ModelShape.of(run_identity(config, config.vocab_size, "")), config.seed)
        recompute_blocks(model, again)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batch = torch.randint(256, (config.micro_batches, config.micro_batch_size, config.seq_len + 1))
        for _ in range(STEPS):
            for tokens in batch:
                loss_of(model(tokens[:, :-1]), tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()

    torch.set_num_threads(1)
    # A first, small training leaves the memory that libraries load and keep out of the figure.
    run(dataclasses.replace(CONFIG, layers=1, micro_batch_size=1, seq_len=64), 1)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    run(CONFIG, blocks)
    print(json.dumps({"bytes": resident("VmHWM") - before}))


def size(text: str) -> float:
    """Read ``150M``."""
    return float(text.rstrip("M")) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--limit", type=size, action="append", metavar="BYTES", help="a limit such as 150M; repeatable"
    )
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--train", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train is not None:
        train(arguments.train)
        return
    rows = [case(limit) for limit in arguments.limit or limits()]
    print(f"{'limit':>10} {'blocks':>7} {'predicted':>10} {'measured':>10}  (MB)")
    for row in rows:
        values = (row["limit"], row["predicted"], row["measured"])
        limit, predicted, measured = (f"{value / 1e6:.1f}" for value in values)
        print(f"{limit:>10} {row['recomputed']:>7} {predicted:>10} {measured:>10}")
    if arguments.json is not None:
        write(arguments.json, {"config": dataclasses.asdict(CONFIG), "rows": rows})
    over = [row for row in rows if row["measured"] > row["limit"]]
    if over:
        raise SystemExit(f"{len(over)} of {len(rows)} took more than their limit")


if __name__ == "__main__":
    main()

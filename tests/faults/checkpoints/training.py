"""A whole training, killed in a save and resumed, is bit for bit the undisturbed one."""

from __future__ import annotations

import random
from pathlib import Path

from tests.faults.checkpoints.forks import KILLED, do, well
from tests.train.harness import TINY
from tests.train.same import losses, stored, unequal

STEPS = 6
TEXT = "".join(f"{i * i % 997} and {i}, " for i in range(4_000))


def interrupted_training(folder: Path, rng: random.Random) -> str:
    """Train once undisturbed and once killed and resumed, in a folder; compare the two; return how it ended."""
    (folder / "text.txt").write_text(TEXT)
    keep, every = rng.choice([1, 2]), rng.choice([1, 2, 3])
    common = (
        f"{TINY} --data {folder}/text.txt --steps {STEPS} --checkpoint-every {every} --keep {keep}"
        f" --warmup-steps 2 --lr 1e-2 --policy none"
    )
    whole = well("train", folder=str(folder), arguments=f"{common} --out whole", fault=None)
    assert whole["status"] == 0, whole
    fault = {
        "number": rng.randint(1, whole["calls"]),
        "answer": rng.choice(["kill before", "kill after", "tear"]),
    }
    done = do("train", folder=str(folder), arguments=f"{common} --out cut", fault=fault)
    about = f"keep {keep}, every {every}, {fault}: {done}"
    assert done.status == KILLED, about
    resumed = do("train", folder=str(folder), arguments=f"{common} --out cut --resume auto", fault=None)
    if resumed.said is not None and resumed.said["status"] == 2 and "nothing to resume" in resumed.output:
        ended = "killed after the last checkpoint"
    else:
        assert resumed.said is not None, f"{about}\n{resumed}"
        assert resumed.said["status"] == 0, f"{about}\n{resumed}"
        ended = "resumed" if "resumed from" in resumed.output else "began anew"
    assert losses(folder / "cut") == losses(folder / "whole"), f"{about}\n{resumed}"
    a, b = (stored(folder / run / f"checkpoints/step-{STEPS:08d}") for run in ("whole", "cut"))
    assert unequal(a, b) == [], f"{about}\n{resumed}"
    return ended

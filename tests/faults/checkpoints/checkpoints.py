"""Faults of checkpoints: a save is killed, or fails, at any of its calls that change files; a file is damaged later.

Afterwards ``--resume auto`` finds the newest checkpoint that is whole, with every bit that was saved; and the next save
leaves as many checkpoints as are to be kept, and nothing else.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from hybridcomp_lab.train.checkpoints.resume import RECORD
from tests.faults.checkpoints.forks import KILLED, do, well
from tests.faults.checkpoints.training import interrupted_training
from tests.faults.outcome import Outcome

Fault = dict[str, Any]
KILLS = ("kill before", "kill after", "tear")
FAILURES = ("fail once", "fail from then on")
OLDER, OLD, NEW, LATER = 2, 4, 6, 8
# With one kept, none is there of the step that is saved next.
STARTS: list[dict[str, Any]] = [{"keep": 1}, {"keep": 2}, {"keep": 2, "again": True}]


class Run:
    """The checkpoints of a run, in a folder.

    Args:
        folder: folder of the run, which does not exist yet.
        seed: seed of the states that are saved.
        numbers: approximate count of numbers in a state.
        keep: number of checkpoints to keep.
        again: whether the step that is saved next has a whole checkpoint: the run has gone on from an older one.
    """

    def __init__(self, folder: Path, seed: int, numbers: int, keep: int, *, again: bool = False) -> None:
        self.folder, self.keep, self.again = folder, keep, again
        self.state = {"root": str(folder), "seed": seed, "numbers": numbers}
        well("save", **self.state, steps=[OLDER, OLD, NEW] if again else [OLDER, OLD], keep=keep, fault=None)

    def names(self) -> list[str]:
        """Return the names of what is in the folder of checkpoints."""
        return sorted(os.listdir(self.folder / "checkpoints"))

    def calls(self) -> int:
        """Count the calls of an undisturbed save; the checkpoints stay as they are."""
        copy = self.folder.with_name(self.folder.name + "-counted")
        shutil.copytree(self.folder, copy)
        arguments = self.state | {"root": str(copy)}
        calls = int(well("save", **arguments, steps=[NEW], keep=self.keep, fault=None)["calls"])
        shutil.rmtree(copy)
        return calls

    def save(self, fault: Fault) -> str:
        """Save the next checkpoint with a fault; return what became of it, after all has been checked."""
        done = do("save", **self.state, steps=[NEW], keep=self.keep, fault=fault)
        about = f"{fault}, keep {self.keep}, again {self.again}; there is {self.names()}\n{done}"
        if fault["answer"] in KILLS:
            assert done.status == KILLED, about
            ended = "killed"
        else:
            assert done.status == 0, about
            ended = "ConfigError" if done.said["error"] else "saved"
        found, later = well("load", **self.state, then=[NEW, LATER], keep=self.keep)
        about += f"\n{found}, then {later} and {self.names()}"
        assert found is not None, about
        assert found["step"] in ([NEW] if ended == "saved" else [OLD, NEW]), about
        assert not found["wrong"], about
        assert not found["passed over"], about
        assert later["step"] == LATER, about
        assert not later["wrong"], about
        assert self.names() == [f"step-{step:08d}" for step in (OLD, NEW, LATER)[-self.keep :]], about
        return f"{ended}, {'old' if found['step'] == OLD else 'new'}"

    def find_beside_damage(self, damage: str) -> None:
        """Check that the checkpoint before the newest, which is damaged, is found."""
        found, _ = well("load", **self.state, then=[], keep=2)
        assert found is not None, damage
        assert (found["step"], found["wrong"]) == (OLDER, []), f"{damage}: {found}"
        # A folder without a record is none: that is how the removal of an old one ends early.
        named = "remove" not in damage or RECORD not in damage
        assert len(found["passed over"]) == named, f"{damage}: {found}"


def damages(file: Path) -> list[str]:
    """Return the sorts of damage that a file can have."""
    return ["remove", "flip", *(["cut"] if file.stat().st_size else [])]


def damage(file: Path, sort: str, number: int) -> str:
    """Damage a file: its bit ``number`` (modulo its size) is flipped, or it ends there; say what was done."""
    data = bytearray(file.read_bytes())
    place = number % (8 * len(data))
    if sort == "remove":
        file.unlink()
    elif sort == "cut":
        file.write_bytes(data[: place // 8])
    else:
        data[place // 8] ^= 1 << place % 8
        file.write_bytes(data)
    return f"{file.name}: {sort} at bit {place}"


def scenario(seed: int) -> Outcome:
    """Plant one fault that the seed decides."""
    rng = random.Random(seed)
    kind = rng.choice([*KILLS, *FAILURES, "damage", "damage", "training"])
    with tempfile.TemporaryDirectory(prefix="hybridcomp-faults-") as made:
        folder = Path(made) / "run"
        if kind == "training":
            ended = interrupted_training(Path(made), rng)
            return Outcome(1, Counter({"a training killed in a save": 1}), Counter({ended: 1}))
        run = Run(folder, seed % 1_000, rng.choice([1, 50, 3_000, 200_000]), 2, again=False)
        if kind == "damage":
            file = rng.choice(sorted((folder / "checkpoints" / f"step-{OLD:08d}").iterdir()))
            sort = rng.choice(damages(file))
            run.find_beside_damage(damage(file, sort, rng.randrange(1 << 30)))
            return Outcome(1, Counter({f"a checkpoint's file: {sort}": 1}), Counter({"passed over": 1}))
        shutil.rmtree(folder)
        run = Run(folder, seed % 1_000, rng.choice([1, 50, 3_000]), **rng.choice(STARTS))
        fault = {
            "number": rng.randint(1, run.calls()),
            "answer": kind,
            "error": rng.choice(["ENOSPC", "EIO"]),
        }
        return Outcome(1, Counter({f"a save: {kind}": 1}), Counter({run.save(fault): 1}))

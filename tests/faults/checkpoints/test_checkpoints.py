"""A save that is killed or fails at any of its calls, and damaged files: the newest whole checkpoint is found."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from hybridcomp.errors import ConfigError
from hybridcomp_lab.train.checkpoints.resume import RECORD, read_checkpoint
from tests.faults.checkpoints.checkpoints import FAILURES, OLD, Run, damage, damages
from tests.faults.checkpoints.training import interrupted_training

pytestmark = pytest.mark.timeout(120)


def each_call(folder: Path, keep: int, again: bool, *answers: str) -> set[str]:
    """Save with a fault at each call in turn, or at each second one, if there are two; return what became of them."""
    first = Run(folder / "template", 1, 1, keep, again=again)
    ended = set()
    for number in range(1, first.calls() + 1, len(answers)):
        run = Run.__new__(Run)
        vars(run).update(vars(first))
        run.folder = folder / "run"
        run.state = first.state | {"root": str(run.folder)}
        shutil.copytree(first.folder, run.folder)
        fault = {"number": number, "answer": answers[number // 2 % len(answers)]}
        ended.add(run.save(fault))
        shutil.rmtree(run.folder)
    return ended


@pytest.mark.parametrize(("keep", "again", "answer"), [(1, False, "kill before"), (2, True, "tear")])
def test_a_save_that_is_killed_at_any_call_leaves_a_whole_checkpoint(keep, again, answer, tmp_path):
    ended = each_call(tmp_path, keep, again, answer)
    assert ended == {"killed, old", "killed, new"}


def test_a_save_that_fails_at_any_call_says_so_and_leaves_a_whole_checkpoint(tmp_path):
    ended = each_call(tmp_path, 1, False, *FAILURES)
    assert ended >= {"ConfigError, old", "saved, new"}


def test_every_damaged_file_is_found_and_the_checkpoint_before_taken(tmp_path):
    first = Run(tmp_path / "run", 1, 1, 2)
    kept = tmp_path / "kept"
    shutil.copytree(first.folder, kept)
    rng = random.Random(1)
    for file in sorted((first.folder / "checkpoints" / f"step-{OLD:08d}").iterdir()):
        for sort in damages(file):
            first.find_beside_damage(damage(file, sort, rng.randrange(1 << 30)))
            shutil.rmtree(first.folder)
            shutil.copytree(kept, first.folder)


def test_every_bit_of_a_record_counts(tmp_path):
    """A step or a setting that is another by one bit would have the run go on from a state that never was."""
    first = Run(tmp_path / "run", 1, 1, 1)
    path = first.folder / "checkpoints" / f"step-{OLD:08d}"
    whole = read_checkpoint(path)
    data = (path / RECORD).read_bytes()
    refused = 0
    for bit in range(8 * len(data)):
        other = bytearray(data)
        other[bit // 8] ^= 1 << bit % 8
        (path / RECORD).write_bytes(other)
        try:
            found = read_checkpoint(path)
        except ConfigError:
            refused += 1
        else:
            assert found == whole, f"bit {bit}: {bytes(other)!r}"
            assert json.loads(other) == json.loads(data)  # white space alone
    assert refused > 7 * len(data)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_training_that_is_killed_in_a_save_goes_on_bit_for_bit(tmp_path):
    assert interrupted_training(tmp_path, random.Random(3)) == "resumed"

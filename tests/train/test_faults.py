"""Runs in which something goes wrong: the loss diverges, the disk is full, the text has changed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hybridcomp_lab.train.checkpoints.resume import newest, read_checkpoint
from hybridcomp_lab.train.text import load_corpus
from tests.train.harness import TINY, train

TEXT = Path(__file__).read_text(encoding="utf-8") * 4


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def test_a_loss_that_is_no_number_stops_the_run_and_is_named(folder):
    arguments = f"{TINY} --data text.txt --out run --dp 2 --steps 20 --warmup-steps 0 --clip 0 --policy none"
    done = train(f"{arguments} --checkpoint-every 1 --lr 1e30", folder)
    assert done.returncode == 1
    kept = newest(folder / "run")
    assert kept is not None
    last = int(kept.name.removeprefix("step-"))
    wanted = (
        f"step {last + 1}: the loss is nan on replica 0 of 2, computed by rank 0; the newest checkpoint is"
    )
    assert wanted in done.stderr
    assert done.stderr.count("DivergedError") == 1
    read_checkpoint(kept)


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of its own, with room for one checkpoint and a half."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=1400k", "hybridcomp-test", str(disk)]
    subprocess.run(mounted, check=True, capture_output=True)
    yield disk
    subprocess.run(["umount", str(disk)], check=True, capture_output=True)


@pytest.mark.lab
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting takes root")
def test_a_full_disk_leaves_the_checkpoint_before(folder, small_disk):
    arguments = f"{TINY} --data text.txt --out {small_disk}/run --dp 2 --steps 8 --checkpoint-every 2"
    done = train(arguments, folder)
    assert done.returncode == 2
    assert "cannot write the checkpoint" in done.stderr
    assert "the disk is full" in done.stderr
    kept = newest(small_disk / "run")
    assert kept is not None
    assert kept.name == "step-00000002"
    read_checkpoint(kept)
    # With room again the run goes on from it.
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True, capture_output=True)
    again = train(f"{arguments} --resume auto", folder)
    assert again.returncode == 0, again.stderr
    assert f"resumed from {kept}" in again.stdout


def test_a_text_that_has_changed_is_detected(folder):
    arguments = f"{TINY} --data text.txt --out run --checkpoint-every 1 --policy none"
    assert train(f"{arguments} --steps 1", folder).returncode == 0
    changed = bytearray((folder / "text.txt").read_bytes())
    changed[len(changed) // 2] ^= 1  # one bit, in the middle
    (folder / "text.txt").write_bytes(changed)
    done = train(f"{arguments} --steps 2 --resume auto", folder)
    assert done.returncode == 2
    assert "it was made by another run (data " in done.stderr


def test_a_bit_of_a_long_text_is_seen(tmp_path):
    tokens = np.arange(3 << 20, dtype="<u2")
    tokens.tofile(tmp_path / "a.bin")
    before = load_corpus(str(tmp_path / "a.bin"), None, 0.1, 65536).fingerprint
    for place in (0, 1 << 20, tokens.size // 2, tokens.size - 1):
        tokens[place] ^= 1
        tokens.tofile(tmp_path / "a.bin")
        assert load_corpus(str(tmp_path / "a.bin"), None, 0.1, 65536).fingerprint != before
        tokens[place] ^= 1

"""Whether two runs of the trainer are the same, bit for bit."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, load

from tests.train.harness import metrics, train


def stored(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint, in one process."""
    keys = FileSystemReader(str(path)).read_metadata().state_dict_metadata
    tensors = {key: torch.empty(meta.size, dtype=meta.properties.dtype) for key, meta in keys.items()}
    load(tensors, checkpoint_id=str(path), no_dist=True)
    return tensors


def unequal(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Return keys of two checkpoints that one lacks, or whose tensors differ."""
    counters = {key for key in a if key.endswith(".traffic")}  # setting up sends a few bytes in each process
    return [
        key
        for key in sorted((a.keys() | b.keys()) - counters)
        if key not in a or key not in b or not torch.equal(a[key], b[key])
    ]


def losses(run: Path) -> list[tuple[int, float, float]]:
    """Return every step of a run with its loss and its gradient's norm, exactly."""
    return [(entry["step"], entry["loss"], entry["grad_norm"]) for entry in metrics(run, "train")]


def run_and_resume(folder: Path, flags: str, policy: str, step: int) -> Path:
    """Train in a folder, and once more from the checkpoint after a step; return the first run's, beside ``again``.

    Args:
        folder: folder where ``text.txt``, ``policy.toml`` and the runs come to be.
        flags: flags of ``hybridcomp train``.
        policy: policy, in TOML.
        step: step of the checkpoint.
    """
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 200)
    (folder / "policy.toml").write_text(policy)
    for out, more in (("run", ""), ("again", f"--resume run/checkpoints/step-{step:08d}")):
        done = train(f"{flags} --data text.txt --policy policy.toml --out {out} {more}", folder)
        assert done.returncode == 0, done.stderr
    return folder / "run"

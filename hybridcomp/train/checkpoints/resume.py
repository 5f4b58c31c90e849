"""Find the checkpoint from which a run resumes, and check that it fits.

Imports no torch: ranks do not exist yet.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridcomp.errors import ConfigError
from hybridcomp.train.config import TrainConfig

RECORD = "checkpoint.json"
_SAME_TOPOLOGY = ("dp", "pp", "tp", "schedule", "virtual_stages", "shard")
_SAME_MODEL = (
    "layers", "d_model", "heads", "seq_len", "tie_embeddings", "experts", "expert_every", "capacity_factor",
)  # fmt: skip
_SAME_BATCHES = ("micro_batches", "micro_batch_size", "seed")


@dataclass(frozen=True)
class Checkpoint:
    """A finished checkpoint on disk.

    Attributes:
        path: its folder.
        step: optimizer steps done.
        elapsed: seconds of training until then.
        policy: digest of the policy that it was made under.
        run: what must be the same in a run that goes on from it.
    """

    path: Path
    step: int
    elapsed: float
    policy: str
    run: dict[str, Any]

    def write(self, folder: Path) -> None:
        """Write the record into ``folder``, with the sizes of the files that are there."""
        files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
        record = {
            "step": self.step,
            "elapsed": self.elapsed,
            "policy": self.policy,
            "run": self.run,
            "files": files,
        }
        (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def run_identity(config: TrainConfig, vocab_size: int, data: str) -> dict[str, Any]:
    """Return the settings that a checkpoint and a run resuming it share: topology, schedule, model, batches, text."""
    names = _SAME_TOPOLOGY + _SAME_MODEL + _SAME_BATCHES
    return {name: getattr(config, name) for name in names} | {"vocab_size": vocab_size, "data": data}


def newest(folder: Path) -> Path | None:
    """Return the checkpoint of a run directory with the highest step, or None."""
    found = sorted(folder.glob(f"checkpoints/step-*/{RECORD}"))
    return found[-1].parent if found else None


def find_checkpoint(config: TrainConfig) -> Checkpoint | None:
    """Return the checkpoint that ``--resume`` names, or None where there is nothing to resume.

    Raises:
        ConfigError: it does not exist or cannot be read.
    """
    if config.resume is None:
        return None
    if config.resume == "auto":
        if config.out is None:
            raise ConfigError("--resume auto looks in the run directory: give it with --out")
        path = newest(Path(config.out))
        return None if path is None else read_checkpoint(path)
    found = checkpoint_in(Path(config.resume))
    if found is None:
        raise ConfigError(f"no checkpoint in {config.resume} (a checkpoint holds {RECORD})")
    return found


def checkpoint_in(folder: Path) -> Checkpoint | None:
    """Return the checkpoint that ``folder`` is, or the newest one of the run that it is; None if it is neither.

    Raises:
        ConfigError: the checkpoint is damaged.
    """
    path = folder if (folder / RECORD).is_file() else newest(folder)
    return None if path is None else read_checkpoint(path)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read the record of the checkpoint in folder ``path``; the files that it names are there, and whole.

    Raises:
        ConfigError: it is damaged; names the checkpoint before it, if there is one.
    """
    try:
        record = json.loads((path / RECORD).read_text(encoding="utf-8"))
        files = {str(name): int(size) for name, size in record["files"].items()}
        checkpoint = Checkpoint(
            path, int(record["step"]), float(record["elapsed"]), str(record["policy"]), dict(record["run"])
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{path / RECORD} is no record of a checkpoint: {error}"
        raise ConfigError(what + _one_before(path)) from error
    for name, size in files.items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            has = "is missing" if found is None else f"has {found} of {size} bytes"
            raise ConfigError(f"the checkpoint {path} is damaged: {name} {has}" + _one_before(path))
    return checkpoint


def _one_before(path: Path) -> str:
    """Say what to do about a damaged checkpoint, where there is an older one; else return an empty string."""
    older = [p.parent for p in path.parent.glob(f"step-*/{RECORD}") if p.parent.name < path.name]
    return f"; the one before it: --resume {max(older)}" if older else ""


def check_fits(checkpoint: Checkpoint, identity: dict[str, Any], config: TrainConfig) -> None:
    """Check that this run can go on from the checkpoint.

    Raises:
        ConfigError: names what differs, or that there is nothing left to do.
    """
    differences = [
        f"{key} {checkpoint.run.get(key)} there, {value} here"
        for key, value in identity.items()
        if checkpoint.run.get(key) != value
    ]
    if differences:
        raise ConfigError(
            f"cannot resume from {checkpoint.path}: it was made by another run ({'; '.join(differences)})"
        )
    if checkpoint.step >= config.steps:
        raise ConfigError(
            f"nothing to resume: {checkpoint.path} is at step {checkpoint.step}, and steps is {config.steps}"
        )

"""Find the checkpoint from which a run resumes, and check that it is whole and fits.

The module imports no torch: ranks do not exist yet.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybridcomp.errors import ConfigError, printable
from hybridcomp.files import checked, listed, open_file, read_json, shown, write_text
from hybridcomp_lab.train.config import TrainConfig

RECORD = "checkpoint.json"
_OWN = "crc32"  # key of the record's own checksum
_PIECE_BYTES = 1 << 22
_MOST_RECORD = 1 << 28  # bytes of a record
_MOST_NAME = 255  # bytes of a file's name
_FIELDS = {"step": int, "elapsed": float, "policy": str, "run": dict, "files": {str: Any}}
_SAME_TOPOLOGY = (
    "dp", "pp", "tp", "schedule", "predict_weights", "synthetic_labels", "virtual_stages", "shard", "sync", "optimizer",
    "freeze_step", "var_update_scaler", "stream_rank",
)  # fmt: skip
# Settings of runs that were written before these fields existed.
_BEFORE: dict[str, Any] = {
    "predict_weights": False, "synthetic_labels": False, "optimizer": "adamw", "freeze_step": 0,
    "var_update_scaler": 16, "stream_rank": None,
    "tp_autoencoder": 0, "tp_autoencoder_from": 0, "pp_neurons": 0.0, "pp_neurons_after": [],
}  # fmt: skip
_SAME_MODEL = (
    "layers", "d_model", "heads", "seq_len", "tie_embeddings", "experts", "expert_every", "capacity_factor",
    "tp_autoencoder", "tp_autoencoder_from", "pp_neurons",
)  # fmt: skip
_SAME_BATCHES = ("micro_batches", "micro_batch_size", "seed")


@dataclass(frozen=True)
class Checkpoint:
    """Finished checkpoint on disk.

    Attributes:
        path: folder of the checkpoint.
        step: number of optimizer steps done.
        elapsed: seconds of training until then.
        policy: digest of the policy of its run.
        run: settings that must be the same in a run that goes on from it.
        passed_over: what is wrong with newer checkpoints that were passed over for this one.
    """

    path: Path
    step: int
    elapsed: float
    policy: str
    run: dict[str, Any]
    passed_over: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        """Write the record into ``folder``, with sizes and checksums of the files there; to the disk itself."""
        files = {
            path.name: {"bytes": path.stat().st_size, "crc32": _checksum(path)}
            for path in sorted(folder.iterdir())
            if path.is_file()
        }
        record: dict[str, Any] = {
            "step": self.step,
            "elapsed": self.elapsed,
            "policy": self.policy,
            "run": self.run,
            "files": files,
        }
        record[_OWN] = _own_checksum(record)
        write_text(folder / RECORD, json.dumps(record, indent=1) + "\n", durable=True)


def run_identity(config: TrainConfig, vocab_size: int, data: str) -> dict[str, Any]:
    """Return the settings that a checkpoint and a run resuming it share: topology, schedule, model, batches, text."""
    names = _SAME_TOPOLOGY + _SAME_MODEL + _SAME_BATCHES
    cut = None if config.stage_layers is None else list(config.stage_layers)  # as JSON has it
    own = {
        "pp_neurons_after": list(config.neuron_borders),
        "stage_layers": cut,
        "vocab_size": vocab_size,
        "data": data,
    }
    return {name: getattr(config, name) for name in names} | own


def newest(folder: Path) -> Path | None:
    """Return the checkpoint of a run directory with the highest step, or None."""
    found = listed(folder, f"checkpoints/step-*/{RECORD}")
    return found[-1].parent if found else None


def find_checkpoint(config: TrainConfig, *, contents: bool = True) -> Checkpoint | None:
    """Return the checkpoint that ``--resume`` names, or None where there is nothing to resume.

    Args:
        config: configuration whose ``resume`` is a folder, or ``auto``: the newest whole checkpoint of the run.
        contents: whether to compare the contents of its files, too, not their sizes alone.

    Raises:
        ConfigError: the checkpoint does not exist or cannot be read.
    """
    if config.resume is None:
        return None
    if config.resume == "auto":
        if config.out is None:
            raise ConfigError("--resume auto looks in the run directory: give it with --out")
        return _newest_whole(Path(config.out), contents)
    found = checkpoint_in(Path(config.resume), contents=contents)
    if found is None:
        raise ConfigError(f"no checkpoint in {config.resume} (a checkpoint holds {RECORD})")
    return found


def _newest_whole(folder: Path, contents: bool) -> Checkpoint | None:
    damaged: list[str] = []
    for record in reversed(listed(folder, f"checkpoints/step-*/{RECORD}")):
        try:
            return replace(_read(record.parent, contents), passed_over=tuple(damaged))
        except ConfigError as error:
            damaged.append(str(error))
    if damaged:
        raise ConfigError(f"{folder} has no checkpoint that is whole: {damaged[0]}")
    return None


def checkpoint_in(folder: Path, *, contents: bool = True) -> Checkpoint | None:
    """Return the checkpoint that ``folder`` is, or the newest one of the run that it is; None if it is neither.

    Raises:
        ConfigError: the checkpoint is damaged.
    """
    path = folder if os.path.isfile(folder / RECORD) else newest(folder)
    return None if path is None else read_checkpoint(path, contents=contents)


def read_checkpoint(path: Path, *, contents: bool = True) -> Checkpoint:
    """Read the record of the checkpoint in folder ``path``; the files that it names are there, and whole.

    Args:
        path: path of the folder.
        contents: whether to compare the contents of the files, too, not their sizes alone.

    Raises:
        ConfigError: the checkpoint is damaged; names the one before it, if there is one.
    """
    try:
        return _read(path, contents)
    except ConfigError as error:
        raise ConfigError(f"{error}{_one_before(path)}") from error


def _read(path: Path, contents: bool) -> Checkpoint:
    name = printable(path / RECORD)
    try:
        record = checked(read_json(path / RECORD, most=_MOST_RECORD), _FIELDS, name)
        files = {file: _described(file, said, name) for file, said in record["files"].items()}
        if any(checksum for _, checksum in files.values()) and record.get(_OWN) != _own_checksum(record):
            raise ConfigError(f"{name}: its contents have changed")
        if record["step"] < 0:
            raise ConfigError(f"{name}: key step must not be negative, as {record['step']} is")
    except ConfigError as error:
        raise ConfigError(f"no record of a checkpoint: {error}") from error
    damaged = f"the checkpoint {printable(path)} is damaged"
    for file, (size, checksum) in files.items():
        found = (path / file).stat().st_size if (path / file).is_file() else None
        if found != size:
            has = "is missing" if found is None else f"has {found} of {size} bytes"
            raise ConfigError(f"{damaged}: {printable(file)} {has}")
        if contents and checksum is not None and _checksum(path / file) != checksum:
            raise ConfigError(f"{damaged}: the contents of {printable(file)} have changed")
    return Checkpoint(path, record["step"], float(record["elapsed"]), record["policy"], record["run"])


def _described(file: str, said: Any, name: str) -> tuple[int, str | None]:
    """Return bytes and checksum of a checkpoint's file; records were once without checksums."""
    # Nothing outside the folder is looked at.
    if file in ("", ".", "..") or "/" in file or "\0" in file or len(os.fsencode(file)) > _MOST_NAME:
        raise ConfigError(f"{name}: key files has {shown(file)}, which is no name of a file")
    where = f"{name}: key files.{printable(file)}"
    if type(said) is int:
        return said, None
    checked(said, {"bytes": int, "crc32": str}, where)
    return said["bytes"], said["crc32"]


def _own_checksum(record: dict[str, Any]) -> str:
    """Return the CRC-32 of a record's contents, in hex."""
    said = {key: value for key, value in record.items() if key != _OWN}
    try:
        return f"{zlib.crc32(json.dumps(said, sort_keys=True).encode()):08x}"
    except RecursionError:
        return ""  # nested deeper than any of ours


def _checksum(path: Path) -> str:
    """Return the CRC-32 of a file's contents, in hex."""
    value = 0
    with open_file(path) as file:
        try:
            while piece := file.read(_PIECE_BYTES):
                value = zlib.crc32(piece, value)
        except OSError as error:
            raise ConfigError(f"cannot read {printable(path)}: {error.strerror}") from error
    return f"{value:08x}"


def _one_before(path: Path) -> str:
    """Return advice about a damaged checkpoint, where there is an older one; else an empty string."""
    older = [p.parent for p in path.parent.glob(f"step-*/{RECORD}") if p.parent.name < path.name]
    return f"; the one before it: --resume {max(older)}" if older else ""


def check_fits(checkpoint: Checkpoint, identity: dict[str, Any], config: TrainConfig) -> None:
    """Check that this run can go on from the checkpoint.

    Raises:
        ConfigError: names what differs, or that there is nothing left to do.
    """
    run = _BEFORE | checkpoint.run
    differences = [
        f"{key} {run.get(key)} there, {value} here"
        for key, value in identity.items()
        if run.get(key) != value
    ]
    if differences:
        raise ConfigError(
            f"cannot resume from {checkpoint.path}: it was made by another run ({'; '.join(differences)})"
        )
    if checkpoint.step >= config.steps:
        raise ConfigError(
            f"nothing to resume: {checkpoint.path} is at step {checkpoint.step}, and steps is {config.steps}"
        )

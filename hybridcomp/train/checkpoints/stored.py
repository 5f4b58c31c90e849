"""Read and write tensors in checkpoint folders, by ``torch.distributed.checkpoint``; its errors in one line."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from hybridcomp.errors import ConfigError


def described(path: Path) -> dict[str, Tensor]:
    """Return a checkpoint's tensors by key, as meta tensors without memory.

    Raises:
        ConfigError: the folder holds no checkpoint that can be read.
    """
    try:
        stored = FileSystemReader(str(path)).read_metadata().state_dict_metadata
    except Exception as error:  # it unpickles: whatever that raises
        raise ConfigError(f"cannot read the checkpoint {path}: {error}") from error
    return {
        key: torch.empty(meta.size, dtype=meta.properties.dtype, device="meta")
        for key, meta in stored.items()
        if isinstance(meta, TensorStorageMetadata)
    }


def read(state: dict[str, Tensor], path: Path, *, alone: bool = False) -> None:
    """Fill tensors by key.

    Args:
        state: the tensors.
        path: of the checkpoint.
        alone: this process reads by itself; else collective.

    Raises:
        ConfigError: it cannot be read; on all ranks.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns of what is meant: one process
            load(state, checkpoint_id=str(path), no_dist=alone)
    except (CheckpointException, Exception) as error:
        raise ConfigError(f"cannot read the checkpoint {path}: {_cause(error)}") from error


def write(state: dict[str, Tensor], path: Path) -> None:
    """Write tensors by key into a folder; collective.

    Raises:
        ConfigError: that is not possible, the disk is full, say; on all ranks.
    """
    try:
        save(state, checkpoint_id=str(path))
    except (CheckpointException, Exception) as error:
        # torch's writer fails once more at closing a file that it could not write, and says no more than that.
        free, need = shutil.disk_usage(path).free, sum(tensor.nbytes for tensor in state.values())
        full = (
            f"the disk is full, {free} bytes are free and this rank's part has {need}: "
            if free < need
            else ""
        )
        raise ConfigError(f"cannot write the checkpoint {path}: {full}{_cause(error)}") from error


def _cause(error: BaseException) -> str:
    """Return the first failure of all ranks, without their tracebacks."""
    if not isinstance(error, CheckpointException):
        return str(error)
    rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    return f"rank {rank}: {type(cause).__name__}: {cause}"

"""Read and write tensors in checkpoint folders, by ``torch.distributed.checkpoint``; its errors in one line."""

from __future__ import annotations

import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from hybridcomp.errors import ConfigError
from hybridcomp.files import open_file

# Types in a checkpoint's ``.metadata``, as torch writes it: data, and nothing that does anything.
_DATA = frozenset(
    [
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties",
                "ChunkStorageMetadata", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING",
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),  # name in Python 3.13
    ]
)  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Read a checkpoint's metadata, and execute nothing that somebody may have put there."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function by name, if it is one of data."""
        if (module, name) in _DATA or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its metadata asks for {module}.{name}, which no checkpoint needs")


class _Reader(FileSystemReader):
    """Read a checkpoint as torch does, but its metadata safely: torch unpickles that without checking what it runs."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata."""
        folder, rank = Path(self.path), kwargs.get("rank")
        with open_file(folder / f"{'' if rank is None else f'__{rank}'}.metadata") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"its metadata is a {type(metadata).__name__}")
        for stored in (metadata.storage_data or {}).values():
            if Path(stored.relative_path).name != stored.relative_path:
                raise ValueError(
                    f"its metadata speaks of {stored.relative_path!r}, which is no file of its folder"
                )
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def described(path: Path) -> dict[str, Tensor]:
    """Return a checkpoint's tensors by key, as meta tensors without memory.

    Raises:
        ConfigError: the folder holds no checkpoint that can be read.
    """
    try:
        stored = _Reader(str(path)).read_metadata().state_dict_metadata
        return {
            key: torch.empty(meta.size, dtype=meta.properties.dtype, device="meta")
            for key, meta in stored.items()
            if isinstance(meta, TensorStorageMetadata)
        }
    except Exception as error:  # it may hold anything
        raise ConfigError(f"cannot read the checkpoint {path}: {error}") from error


def read(state: dict[str, Tensor], path: Path, *, alone: bool = False) -> None:
    """Fill tensors by key.

    Args:
        state: tensors to fill, by key.
        path: path of the checkpoint.
        alone: whether this process reads by itself; else collective.

    Raises:
        ConfigError: the checkpoint cannot be read; on all ranks.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns of one process, as intended
            load(state, storage_reader=_Reader(str(path)), no_dist=alone)
    except (CheckpointException, Exception) as error:
        raise ConfigError(f"cannot read the checkpoint {path}: {_cause(error)}") from error


def write(state: dict[str, Tensor], path: Path, *, alone: bool = False) -> None:
    """Write tensors by key into a folder.

    Args:
        state: tensors to write, by key.
        path: path of the folder.
        alone: whether this process writes by itself; else collective.

    Raises:
        ConfigError: the disk is full, say; on all ranks.
    """
    try:
        save(state, checkpoint_id=str(path), no_dist=alone)
    except (CheckpointException, Exception) as error:
        # torch's writer fails once more at closing a file that it could not write, and reports only that.
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

"""Write and load checkpoints by ``torch.distributed.checkpoint``: weights, optimizer, RNG, error-feedback memory.

A key begins with the model-parallel place that owns the tensor (``pp0.tp1.``), which replicas share, so
that each tensor is written once; for a tensor that one replica alone has, with the replica, too (``pp0.tp1.dp2.``).
Keys of tensors that every rank has for itself begin with ``rank3.``.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hybridcomp.torch as hct
from hybridcomp.errors import ConfigError
from hybridcomp.files import sync_folder
from hybridcomp.train.checkpoints.resume import RECORD, Checkpoint
from hybridcomp.train.checkpoints.stored import described, read, write
from hybridcomp.train.optimizer.optimizers import moments
from hybridcomp.train.topology import Topology


@dataclass(frozen=True)
class Trained:
    """State that training changes.

    Attributes:
        parameters: parameters by name.
        optimizer: optimizer of the parameters.
        extra: further tensors that the schedule needs, by name.
        apart: names of the parameters that this replica alone has.
        whole: parameters of the model of which ``parameters`` has flat parts, by name.
        buffers: buffers of the model, by name.
    """

    parameters: Mapping[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    extra: Mapping[str, Tensor]
    apart: frozenset[str] = frozenset()
    whole: Mapping[str, nn.Parameter] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)


def save_checkpoint(
    checkpoint: Checkpoint,
    trained: Trained,
    traffic: Tensor,
    topology: Topology,
    *,
    keep: int,
) -> None:
    """Write ``checkpoint.path``; collective. A checkpoint under its own name is whole: it is written
    beside, then renamed.

    Args:
        checkpoint: record; its path is where the checkpoint will be.
        trained: state to save.
        traffic: int64, this rank's byte counters.
        topology: mesh of the ranks.
        keep: number of the folder's newest checkpoints to keep.

    Raises:
        ConfigError: the disk is full, say; on rank 0 alone, if rank 0 alone cannot write.
    """
    beside = checkpoint.path.with_name(f".{checkpoint.path.name}.partial")
    if topology.rank == 0:
        with _written(checkpoint.path):
            for left in checkpoint.path.parent.glob(".step-*"):  # left by a process that was killed
                shutil.rmtree(left)
            beside.mkdir(parents=True)
    dist.barrier()
    mine = _rank_prefix(topology)
    state = _model_state(trained, topology)
    state[f"{mine}traffic"] = traffic
    state[f"{mine}rng"] = torch.get_rng_state()
    state |= {f"{mine}comm.{key}": value for key, value in hct.state_dict().items()}
    try:
        write(state, beside)
        if topology.rank == 0:
            with _written(checkpoint.path):
                checkpoint.write(beside)
                if checkpoint.path.exists():  # the run has gone on from an older one
                    checkpoint.path.rename(beside.with_suffix(".replaced"))
                beside.rename(checkpoint.path)
                sync_folder(checkpoint.path.parent)
    except BaseException:
        if topology.rank == 0:  # room on a full disk
            shutil.rmtree(beside, ignore_errors=True)
        raise
    if topology.rank == 0:
        _prune(checkpoint.path, keep)


def load_checkpoint(
    checkpoint: Checkpoint,
    trained: Trained,
    topology: Topology,
    *,
    same_policy: bool,
) -> Tensor:
    """Load the checkpoint's state in place; collective.

    Args:
        checkpoint: checkpoint to load.
        trained: state that receives the tensors.
        topology: mesh of the ranks.
        same_policy: whether to load the error-feedback memory, which belongs to the policy that made it.

    Returns:
        The byte counters of this rank that were given to :func:`save_checkpoint`.

    Raises:
        ConfigError: the checkpoint cannot be read, or lacks a tensor that this run needs.
    """
    stored = described(checkpoint.path)
    mine = _rank_prefix(topology)
    state = _model_state(trained, topology)
    state |= {
        key: torch.empty_like(tensor, device="cpu") for key, tensor in stored.items() if key.startswith(mine)
    }
    missing = sorted(key for key in [*state, f"{mine}traffic", f"{mine}rng"] if key not in stored)
    if missing:
        raise ConfigError(f"{checkpoint.path} lacks {missing[0]} and {len(missing) - 1} other tensors")
    read(state, checkpoint.path)
    torch.set_rng_state(state[f"{mine}rng"])
    if same_policy:
        prefix = f"{mine}comm."
        hct.load_state_dict({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})
    return state[f"{mine}traffic"]


def _rank_prefix(topology: Topology) -> str:
    return f"rank{topology.rank}."


def _model_state(trained: Trained, topology: Topology) -> dict[str, Tensor]:
    """Return the tensors themselves, by key; make the optimizer's moments if there are none yet."""
    place = f"pp{topology.pp}.tp{topology.tp}."
    state = {f"{place}schedule.{name}": tensor for name, tensor in trained.extra.items()}
    state |= {f"{place}model.{name}": parameter.detach() for name, parameter in trained.whole.items()}
    state |= {f"{place}model.{name}": buffer for name, buffer in trained.buffers.items()}
    for name, parameter in trained.parameters.items():
        prefix = f"{place}dp{topology.dp}." if name in trained.apart else place
        kind = "part" if name in trained.whole else "model"
        state[f"{prefix}{kind}.{name}"] = parameter.detach()
        for moment, tensor in moments(trained.optimizer, parameter).items():
            state[f"{prefix}optimizer.{name}.{moment}"] = tensor
    return state


@contextlib.contextmanager
def _written(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write the checkpoint {path}: {error}") from error


def _prune(written: Path, keep: int) -> None:
    """Remove the checkpoints before the ``keep`` newest, and the remains of others that were removed or replaced.

    Checkpoints later than the written one are damaged, and do not count.
    """
    found = sorted(path for path in written.parent.glob("step-*") if path.name <= written.name)
    kept = [path for path in found if (path / RECORD).is_file()][-keep:]
    for old in [*found, *written.parent.glob(".step-*")]:
        if old not in kept:
            shutil.rmtree(old, ignore_errors=True)

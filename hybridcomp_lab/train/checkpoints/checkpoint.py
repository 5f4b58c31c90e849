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
from hybridcomp.torch.momentum.optimizer import MomentumOptimizer
from hybridcomp_lab.train.checkpoints.resume import RECORD, Checkpoint
from hybridcomp_lab.train.checkpoints.stored import described, read, write
from hybridcomp_lab.train.optimizer.momentum import counters, load_counters, take_state
from hybridcomp_lab.train.optimizer.optimizers import moments
from hybridcomp_lab.train.topology import Topology

_COUNTERS = "counters"  # key of those of an optimizer's groups


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
    """Write ``checkpoint.path``; collective. See :func:`write_checkpoint`.

    Args:
        checkpoint: record; its path is where the checkpoint will be.
        trained: state to save.
        traffic: int64, this rank's byte counters.
        topology: mesh of the ranks.
        keep: number of the folder's newest checkpoints to keep.

    Raises:
        ConfigError: the disk is full, say; on rank 0 alone, if rank 0 alone cannot write.
    """
    state = state_of(trained, traffic, topology)
    state |= {f"{_rank_prefix(topology)}comm.{key}": value for key, value in hct.state_dict().items()}
    write_checkpoint(checkpoint, state, topology, keep=keep)


def state_of(trained: Trained, traffic: Tensor, topology: Topology | None) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by key, without the memory of error feedback; see :func:`save_checkpoint`.

    Args:
        trained: state to save.
        traffic: int64, this rank's byte counters.
        topology: mesh of the ranks; None for a process that is the whole mesh.
    """
    mine = _rank_prefix(topology)
    own = {f"{mine}traffic": traffic, f"{mine}rng": torch.get_rng_state()}
    return _model_state(trained, topology) | own


def write_checkpoint(
    checkpoint: Checkpoint, state: dict[str, Tensor], topology: Topology | None, *, keep: int
) -> None:
    """Write ``checkpoint.path``; collective. A checkpoint under its own name is whole: it is written
    beside, then renamed.

    Args:
        checkpoint: record; its path is where the checkpoint will be.
        state: tensors by key, see :func:`state_of`.
        topology: mesh of the ranks; None for a process that is the whole mesh.
        keep: number of the folder's newest checkpoints to keep.

    Raises:
        ConfigError: the disk is full, say; on rank 0 alone, if rank 0 alone cannot write.
    """
    beside = checkpoint.path.with_name(f".{checkpoint.path.name}.partial")
    first = topology is None or topology.rank == 0
    if first:
        with _written(checkpoint.path):
            for left in checkpoint.path.parent.glob(".step-*"):  # left by a process that was killed
                shutil.rmtree(left)
            beside.mkdir(parents=True)
    if topology is not None:
        dist.barrier()
    try:
        write(state, beside, alone=topology is None)
        if first:
            with _written(checkpoint.path):
                checkpoint.write(beside)
                if checkpoint.path.exists():  # the run has gone on from an older one
                    checkpoint.path.rename(beside.with_suffix(".replaced"))
                beside.rename(checkpoint.path)
                sync_folder(checkpoint.path.parent)
    except BaseException:
        if first:  # room on a full disk
            shutil.rmtree(beside, ignore_errors=True)
        raise
    if first:
        _prune(checkpoint.path, keep)


def load_checkpoint(
    checkpoint: Checkpoint,
    trained: Trained,
    topology: Topology | None,
    *,
    same_policy: bool,
) -> dict[str, Tensor]:
    """Load the checkpoint's state in place; collective.

    Args:
        checkpoint: checkpoint to load.
        trained: state that receives the tensors.
        topology: mesh of the ranks; None for a process that is the whole mesh.
        same_policy: whether to load the error-feedback memory, which belongs to the policy that made it.

    Returns:
        The tensors that are this rank's own, by name: ``traffic``, the byte counters that were given to
        :func:`save_checkpoint`, and what else :func:`write_checkpoint` was given under the rank's prefix.

    Raises:
        ConfigError: the checkpoint cannot be read, or lacks a tensor that this run needs.
    """
    stored = described(checkpoint.path)
    mine = _rank_prefix(topology)
    state = _model_state(trained, topology)
    state |= {
        key: torch.empty_like(tensor, device="cpu") for key, tensor in stored.items() if key.startswith(mine)
    }
    later = _later_state(trained, topology, stored, state)
    state |= later
    missing = sorted(key for key in [*state, f"{mine}traffic", f"{mine}rng"] if key not in stored)
    if missing:
        raise ConfigError(f"{checkpoint.path} lacks {missing[0]} and {len(missing) - 1} other tensors")
    read(state, checkpoint.path, alone=topology is None)
    _take_later(trained, topology, later)
    own = {key.removeprefix(mine): tensor for key, tensor in state.items() if key.startswith(mine)}
    torch.set_rng_state(own["rng"])
    if same_policy:
        prefix = "comm."
        hct.load_state_dict({k.removeprefix(prefix): v for k, v in own.items() if k.startswith(prefix)})
    return own


def _rank_prefix(topology: Topology | None) -> str:
    return f"rank{0 if topology is None else topology.rank}."


def _model_state(trained: Trained, topology: Topology | None) -> dict[str, Tensor]:
    """Return the tensors themselves, by key; make the optimizer's moments if there are none yet."""
    place = _place(topology)
    state = {f"{place}schedule.{name}": tensor for name, tensor in trained.extra.items()}
    state |= {f"{place}model.{name}": parameter.detach() for name, parameter in trained.whole.items()}
    state |= {f"{place}model.{name}": buffer for name, buffer in trained.buffers.items()}
    for name, parameter in trained.parameters.items():
        prefix = f"{place}dp{topology.dp}." if topology is not None and name in trained.apart else place
        kind = "part" if name in trained.whole else "model"
        state[f"{prefix}{kind}.{name}"] = parameter.detach()
        for moment, tensor in moments(trained.optimizer, parameter).items():
            state[f"{prefix}optimizer.{name}.{moment}"] = tensor
    if isinstance(trained.optimizer, MomentumOptimizer):
        state[f"{place}optimizer.{_COUNTERS}"] = counters(trained.optimizer)
    return state


def _later_state(
    trained: Trained, topology: Topology | None, stored: Mapping[str, Tensor], known: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return room for what an optimizer that exchanges momenta had come to keep, by key."""
    if not isinstance(trained.optimizer, MomentumOptimizer):
        return {}
    prefix = f"{_place(topology)}optimizer."
    return {
        key: torch.empty_like(tensor, device="cpu")
        for key, tensor in stored.items()
        if key.startswith(prefix) and (key not in known or key == prefix + _COUNTERS)
    }


def _take_later(trained: Trained, topology: Topology | None, later: Mapping[str, Tensor]) -> None:
    """Give the optimizer what :func:`_later_state` made room for, once it is read."""
    if not isinstance(trained.optimizer, MomentumOptimizer):
        return
    for key, tensor in later.items():
        name, _, part = key.removeprefix(f"{_place(topology)}optimizer.").rpartition(".")
        if part == _COUNTERS and not name:
            load_counters(trained.optimizer, tensor)
        elif name in trained.parameters:
            take_state(trained.optimizer, trained.parameters[name], part, tensor)


def _place(topology: Topology | None) -> str:
    return "pp0.tp0." if topology is None else f"pp{topology.pp}.tp{topology.tp}."


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

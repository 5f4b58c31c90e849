"""hybridcomp for PyTorch: the process group ``"hybridcomp"``, a DDP communication hook, compressed FSDP2, DiLoCo.

.. code-block:: python

    import torch.distributed as dist, hybridcomp.torch as hct

    hct.set_policy("hybrid")                  # or HYBRIDCOMP_POLICY, or pg_options=hct.Options(policy=...)
    dist.init_process_group("hybridcomp")     # under mpiexec or srun; ranks and addresses come from MPI

    ddp.register_comm_hook(hct.HookState(policy="hybrid", module=ddp), hct.comm_hook)   # on gloo or NCCL, too
    hct.compress_fsdp(model, policy="hybrid")                                           # after fully_shard; as well
    hct.OnebitAdam(ddp.parameters(), freeze_step=1000).register(ddp)      # in the place of Adam and hook; as well
    with hct.DiLoCo(model, optimizer, every=100): ...                                   # in the place of DDP; as well
    streamed = hct.stream_linear(model, rank=10)                                        # before DDP; as well

Importing this registers the backend. It does not initialise MPI.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from hybridcomp.collectives.report import summary as summarize
from hybridcomp.collectives.stats import Stats
from hybridcomp.policy import TablePlan, homogenization_index, in_place, plan_table, table_policy
from hybridcomp.torch import phases, zero
from hybridcomp.torch.adapting import Decided, decisions
from hybridcomp.torch.backend import gloo_only, mesh
from hybridcomp.torch.backend.environment import export_environment
from hybridcomp.torch.backend.options import Options, set_policy
from hybridcomp.torch.hook import HookState, comm_hook
from hybridcomp.torch.hook import state as hook_state
from hybridcomp.torch.momentum import OnebitAdam, OnebitLamb, ZeroOneAdam, deepspeed_optimizer
from hybridcomp.torch.phases import in_phase
from hybridcomp.torch.registry import registry
from hybridcomp.torch.reshard import reshard_state
from hybridcomp.torch.streaming import StreamedLayers, StreamedSGD, stream_linear
from hybridcomp.torch.sync import DiLoCo, LocalSGD
from hybridcomp.torch.tensorboard import StatsWriter
from hybridcomp.torch.together import decide_together
from hybridcomp.trace import start as start_trace
from hybridcomp.trace import stop as stop_trace

if TYPE_CHECKING:
    from hybridcomp.torch.fsdp import FSDPCompression, compress_fsdp

__all__ = [
    "Decided",
    "DiLoCo",
    "FSDPCompression",
    "HookState",
    "LocalSGD",
    "OnebitAdam",
    "OnebitLamb",
    "Options",
    "StreamedLayers",
    "StreamedSGD",
    "TablePlan",
    "ZeroOneAdam",
    "comm_hook",
    "compress_fsdp",
    "decide_together",
    "decisions",
    "deepspeed_optimizer",
    "homogenization_index",
    "in_phase",
    "in_place",
    "plan_table",
    "reshard_state",
    "set_policy",
    "stream_linear",
    "table_policy",
    "export_environment",
    "stats",
    "summary",
    "reset_stats",
    "StatsWriter",
    "start_trace",
    "stop_trace",
    "state_dict",
    "load_state_dict",
    "advance_step",
]

# By its name, since it is above this room. Importing torch has called it, but where torch loads no plugins.
importlib.import_module("hybridcomp.plugin").register()
mesh.install()
gloo_only.install()
phases.install()
hook_state.install()
zero.install()

_OF_FSDP = ("FSDPCompression", "compress_fsdp")  # importing FSDP2 takes a second


def __getattr__(name: str) -> Any:
    if name in _OF_FSDP:
        return getattr(importlib.import_module("hybridcomp.torch.fsdp"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def stats() -> Stats:
    """Return the statistics of all process groups and hooks of this process, by axis, operation, codec and reason.

    The rows are totals since the program began, or :func:`reset_stats`. ``stats().per_step()`` are the means of an
    optimizer's step, and ``stats().steps`` says how many there were, how long they took and how much of it was waited.
    """
    return registry.stats()


def summary() -> str:
    """Return the table of :func:`stats` that rank 0 prints at exit: what was compressed, what was not, and why.

    Where an optimizer has stepped, it is of a step, and says how much of it this rank waited.
    """
    counted = registry.stats()
    return summarize(counted, steps=counted.steps)


def reset_stats() -> None:
    """Reset the counts of :func:`stats` to nothing, on this rank."""
    registry.reset()


def state_dict() -> dict[str, torch.Tensor]:
    """Return copies of this rank's error-feedback memory and of all other state of compression between steps."""
    return registry.state()


def load_state_dict(state: dict[str, torch.Tensor]) -> None:
    """Load the state that :func:`state_dict` returned, in a program that has made the same groups and hooks.

    Raises:
        ValueError: the state belongs to a group or hook that this process has not made.
    """
    registry.load(state)


def advance_step() -> None:
    """Tell policies that a training step has ended, for their warm-up steps; hooks count their own."""
    registry.advance()

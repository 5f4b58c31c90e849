"""Make the communicator of a process group, out of the MPI ranks that torch names."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, get_debug_level

from hybridcomp.errors import CollectiveTimeoutError, ConfigError
from hybridcomp.launcher import abort
from hybridcomp.policy import load_policy
from hybridcomp.torch.backend.options import GroupInit, default_policy

if TYPE_CHECKING:
    from hybridcomp.collectives import Communicator

_users: set[int] = set()  # ids of the processes that make groups


def make_communicator(init: GroupInit, name: str, timeout: timedelta) -> Communicator:
    """Make the communicator of a process group. Collective over the group's ranks.

    Args:
        init: ranks of the group, the store where they meet, and the caller's options.
        name: torch's name of the group, for error messages.
        timeout: timeout of the group, and of the wait for its ranks.

    Raises:
        ConfigError, PolicyError, MismatchError, CollectiveTimeoutError: as for :func:`.registration.create`.
    """
    options = init.options
    policy = default_policy() if options.policy is None else load_policy(options.policy)

    # Here, and not above: a hook on gloo or NCCL needs no MPI.
    from mpi4py import MPI  # noqa: PLC0415

    from hybridcomp.collectives import Communicator  # noqa: PLC0415
    from hybridcomp.collectives.agreement.making import LEAST_SECONDS, bounded  # noqa: PLC0415

    world = MPI.COMM_WORLD
    _check_process(name)
    _check_world(world, init)
    _abort_on_exception(world)
    _wait_for_members(init, name, timeout)
    group = world.Get_group().Incl(init.ranks)
    seconds = timeout.total_seconds()
    limit = max(seconds, LEAST_SECONDS)  # its members are there
    mpi = bounded(lambda: world.Create_group(group), lambda: f"making process group {name!r} in MPI", limit)
    group.Free()
    detail = True if get_debug_level() == DebugLevel.DETAIL else None
    comm = Communicator(mpi, policy, options.axis or "default", timeout=seconds, detail=detail)
    mpi.Free()
    return comm


def _check_process(name: str) -> None:
    _users.add(os.getpid())  # a fork has its parent's, too
    if len(_users) > 1:
        raise RuntimeError(
            f"making process group {name!r}: this process was forked after another group had been made, and MPI "
            f"cannot be used here; fork first, or start processes by spawn"
        )


def _check_world(world: Any, init: GroupInit) -> None:
    ranks, rank = init.ranks, init.rank
    if max(ranks) >= world.size or ranks[rank] != world.rank:
        n = max(len(ranks), max(ranks) + 1)
        raise ConfigError(
            f"torch says that this is rank {ranks[rank]} of {n}, MPI says rank {world.rank} of {world.size}: make a "
            f"group of all ranks before anything else starts MPI (from mpi4py import MPI), or start the program with "
            f"MPI (mpiexec -n {n} python ..., or srun)"
        )


def _wait_for_members(init: GroupInit, name: str, timeout: timedelta) -> None:
    """Wait for all members in torch's store: unlike MPI's calls that make a group, this wait has an end."""
    store, size = init.store, len(init.ranks)
    store.set(f"hybridcomp/{init.rank}", "1")
    keys = [f"hybridcomp/{rank}" for rank in range(size)]
    try:
        store.wait(keys, timeout)
    except dist.DistStoreError as error:
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        raise CollectiveTimeoutError(
            f"making process group {name!r}: after {timeout.total_seconds():g} s rank {', '.join(missing)} of {size} "
            f"has not come"
        ) from error


def _abort_on_exception(world: Any) -> None:
    """End all ranks when one ends by an exception; the others would wait for it."""
    if world.size == 1 or getattr(sys.excepthook, "hybridcomp", False):
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        # torch's own hook, which calls this one, has put a buffer in the place of stderr.
        sys.stderr = sys.__stderr__ or sys.stderr
        before(kind, value, trace)
        abort(world, 1)

    hook.hybridcomp = True  # type: ignore[attr-defined]
    sys.excepthook = hook

"""Makes process groups: what ``init_process_group("hybridcomp")`` and ``new_group`` call."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

import torch.distributed as dist

from hybridcomp.errors import CollectiveTimeoutError, ConfigError
from hybridcomp.launcher import abort
from hybridcomp.policy import load_policy
from hybridcomp.torch.options import Options, default_policy

BACKEND = "hybridcomp"


def register() -> None:
    """Make ``"hybridcomp"`` a backend of ``torch.distributed``, once."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])


def create(opts: Any, options: Any = None) -> dist.ProcessGroup:
    """Make a process group over the MPI ranks that torch's options name. Collective over its members.

    Args:
        opts: torch's ``_DistributedBackendOptions``.
        options: :class:`~hybridcomp.torch.options.Options` or None.

    Raises:
        ConfigError: torch's ranks are not MPI's (started by torchrun, say).
        PolicyError: the policy cannot be read.
        MismatchError: the ranks' policies differ.
        CollectiveTimeoutError: a member did not come.
    """
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"pg_options must be hybridcomp.torch.Options, not {type(options).__name__}")
    options = options or Options()
    policy = default_policy() if options.policy is None else load_policy(options.policy)

    # Here, and not above: a hook on gloo or NCCL needs no MPI.
    from mpi4py import MPI  # noqa: PLC0415

    from hybridcomp.collectives import Communicator  # noqa: PLC0415
    from hybridcomp.torch.process_group import HybridProcessGroup  # noqa: PLC0415

    ranks = list(opts.global_ranks_in_group) or list(range(opts.group_size))
    _check_world(MPI.COMM_WORLD, ranks, opts.group_rank)
    _abort_on_exception(MPI.COMM_WORLD)
    timeout = (options.timeout or opts.timeout).total_seconds()
    _wait_for_members(opts, timeout)
    group = MPI.COMM_WORLD.Get_group().Incl(ranks)
    mpi = MPI.COMM_WORLD.Create_group(group)
    group.Free()
    try:
        comm = Communicator(mpi, policy, options.axis or "default", timeout=timeout)
    finally:
        mpi.Free()
    return HybridProcessGroup(comm, options.axis)


def _check_world(world: Any, ranks: list[int], group_rank: int) -> None:
    if max(ranks) >= world.size or ranks[group_rank] != world.rank:
        n = max(len(ranks), max(ranks) + 1)
        raise ConfigError(
            f"torch says that this is rank {ranks[group_rank]} of {n}, MPI says rank {world.rank} of {world.size}: "
            f"start the program with MPI (mpiexec -n {n} python ..., or srun), not with torchrun"
        )


def _wait_for_members(opts: Any, timeout: float) -> None:
    """Meet in torch's store: unlike MPI's calls that make a group, this wait has an end."""
    store, size = opts.store, opts.group_size
    store.set(f"hybridcomp/{opts.group_rank}", b"1")
    keys = [f"hybridcomp/{rank}" for rank in range(size)]
    try:
        store.wait(keys, opts.timeout)
    except dist.DistError as error:
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        raise CollectiveTimeoutError(
            f"making process group {opts.group_id!r}: after {timeout:g} s rank {', '.join(missing)} of {size} "
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

"""Make the process groups of ``init_process_group("hybridcomp")`` and ``new_group``."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from hybridcomp.errors import CollectiveTimeoutError
from hybridcomp.pmi import start
from hybridcomp.torch.backend.making import check_members, make_communicator, telling
from hybridcomp.torch.backend.options import GroupInit, Options, chosen_policy

_OTHERS = timedelta(seconds=60)  # for ranks that make other groups at about the same time


def create(opts: Any, options: Any = None) -> dist.ProcessGroup:
    """Make a process group over the MPI ranks that torch's options name. Collective over its members.

    Args:
        opts: torch's ``_DistributedBackendOptions``.
        options: :class:`~hybridcomp.torch.backend.options.Options` or None.

    Raises:
        ConfigError: torch's ranks are not MPI's, or MPI cannot be started in them.
        PolicyError: the policy cannot be read.
        MismatchError: the ranks' policies differ.
        CollectiveTimeoutError: a member did not come.
        RemoteError: a member could not make the group, for a reason of its own; names it.
        NativeUnavailableError: this rank has no kernels, or lacks the instruction set that it is told to use.
    """
    ranks = list(opts.global_ranks_in_group) or list(range(opts.group_size))
    given = Options() if options is None else options
    init = GroupInit(ranks, opts.group_rank, opts.store, given)
    name, everyone = opts.group_id, dist.get_world_size() if dist.is_initialized() else len(ranks)
    with telling(init, name):
        if not isinstance(given, Options):
            raise TypeError(f"pg_options must be hybridcomp.torch.Options, not {type(options).__name__}")
        timeout = given.timeout or opts.timeout
        if everyone > 1 and start.needed():
            # First what may fail on this rank alone: ranks that have begun to start MPI wait inside it.
            chosen_policy()
            _start_mpi(init, everyone, timeout, lambda: check_members(init, name))
        # Here, and not above: it needs MPI, and a hook on gloo or NCCL does not.
        from hybridcomp.torch.backend.process_group import HybridProcessGroup  # noqa: PLC0415

    return HybridProcessGroup(make_communicator(init, name, timeout), init)


def _start_mpi(init: GroupInit, everyone: int, timeout: timedelta, check: Callable[[], None]) -> None:
    """Start MPI in all ranks of the job, of which each is making a hybridcomp group, if not the same one.

    So it is where a mesh on another backend has one dimension on hybridcomp.
    """
    rank = init.ranks[init.rank]
    if len(init.ranks) == everyone:
        return start.start(init.store, rank, everyone, timeout, check)
    store = PrefixStore("hybridcomp/job", dist.distributed_c10d._get_default_store())
    try:
        return start.start(store, rank, everyone, min(timeout, _OTHERS), check)
    except CollectiveTimeoutError as late:
        raise CollectiveTimeoutError(
            f"{late}; MPI starts in all {everyone} ranks of the job at once: make a group of all ranks first, or have "
            "every rank make one now, as init_device_mesh does"
        ) from None

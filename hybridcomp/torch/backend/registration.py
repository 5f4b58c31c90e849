"""Make the process groups of ``init_process_group("hybridcomp")`` and ``new_group``."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from hybridcomp.pmi import start
from hybridcomp.torch.backend.making import make_communicator
from hybridcomp.torch.backend.options import GroupInit, Options


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
    """
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"pg_options must be hybridcomp.torch.Options, not {type(options).__name__}")
    options = options or Options()
    ranks = list(opts.global_ranks_in_group) or list(range(opts.group_size))
    init = GroupInit(ranks, opts.group_rank, opts.store, options)

    everyone = dist.get_world_size() if dist.is_initialized() else len(ranks)
    if len(ranks) == everyone > 1 and start.needed():
        start.start(opts.store, ranks[opts.group_rank], everyone, options.timeout or opts.timeout)
    # Here, and not above: it needs MPI, and a hook on gloo or NCCL does not.
    from hybridcomp.torch.backend.process_group import HybridProcessGroup  # noqa: PLC0415

    return HybridProcessGroup(make_communicator(init, opts.group_id, options.timeout or opts.timeout), init)

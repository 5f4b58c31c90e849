"""Set the variables that torchrun sets, for libraries that look for their ranks there."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch.distributed as dist

from hybridcomp.errors import ConfigError
from hybridcomp.launcher import reserve_port
from hybridcomp.torch.backend.rendezvous import addresses

_reserved: list[
    socket.socket
] = []  # rank 0's, which keeps the port that was exported last from other programs


def export_environment() -> None:
    """Set ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` and the other variables that torchrun sets.

    MPI's launchers set none of them, and libraries made for torchrun (accelerate, for one) start from them. Call it
    once, on all ranks, after ``init_process_group("hybridcomp")``. ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE`` count the
    ranks that share a host, ``GROUP_RANK`` is the host's number, ``MASTER_ADDR`` and ``MASTER_PORT`` are a free port
    of rank 0's host, which no other program of that host is given meanwhile.

    Raises:
        ConfigError: there is no default group yet, or it is another backend's.
    """
    group: Any = dist.group.WORLD if dist.is_initialized() else None
    comm = getattr(group, "comm", None)  # only a HybridProcessGroup has one
    if comm is None:
        raise ConfigError('export_environment comes after dist.init_process_group("hybridcomp")')
    from mpi4py import MPI  # noqa: PLC0415  (initialises MPI)

    from hybridcomp.collectives.transport.topology import discover  # noqa: PLC0415

    node = comm.mpi.Split_type(MPI.COMM_TYPE_SHARED)
    local_rank, local_size = node.rank, node.size
    host = discover(comm.mpi, node).hosts[comm.rank]
    node.Free()
    main = ["", ""]
    if comm.rank == 0:
        while _reserved:
            _reserved.pop().close()
        _reserved.append(reserve_port())
        main = [addresses()[0], str(_reserved[0].getsockname()[1])]
    dist.broadcast_object_list(main, 0)
    os.environ |= {
        "RANK": str(comm.rank),
        "WORLD_SIZE": str(comm.size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(host),
        "MASTER_ADDR": main[0],
        "MASTER_PORT": main[1],
    }

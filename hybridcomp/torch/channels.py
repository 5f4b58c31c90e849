"""Collectives of bytes for a hook, on a group of its own: over a communicator, or over gloo, NCCL or any other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hybridcomp.arrays import ByteArray
from hybridcomp.torch.exchange import Channel

if TYPE_CHECKING:
    from hybridcomp.collectives import Communicator


def open_channel(group: Any) -> Channel:
    """Make a channel over the ranks of a process group. Collective over its members."""
    comm = getattr(group, "comm", None)  # of a HybridProcessGroup, whatever name the backend was asked by
    return TorchChannel(group) if comm is None else CommChannel(comm)


class CommChannel:
    """Over a duplicate of a communicator."""

    def __init__(self, comm: Communicator) -> None:
        from hybridcomp.collectives import Communicator  # noqa: PLC0415  (initialises MPI)

        self._comm = Communicator(comm.mpi, "none", comm.axis, timeout=comm.timeout)
        self.rank, self.size = self._comm.rank, self._comm.size

    def all_to_all(self, send: ByteArray, recv: ByteArray) -> None:
        """See :class:`Channel`."""
        self._comm.Alltoall(send, recv)

    def all_gather(self, send: ByteArray, recv: ByteArray) -> None:
        """See :class:`Channel`."""
        self._comm.Allgather(send, recv)


class TorchChannel:
    """Over a new group of the same ranks and backend. Bytes are staged for a backend that has no CPU tensors."""

    def __init__(self, group: Any) -> None:
        backend = dist.get_backend(group)
        ranks = dist.get_process_group_ranks(group)
        self._group = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
        self.rank, self.size = dist.get_rank(self._group), len(ranks)
        devices = dist.Backend.backend_capability.get(str(backend), ["cpu"])
        self._device = torch.device("cpu" if "cpu" in devices else devices[0])
        # all_gather_into_tensor is the name of versions before 2.13.
        self._all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def all_to_all(self, send: ByteArray, recv: ByteArray) -> None:
        """See :class:`Channel`."""
        self._run(dist.all_to_all_single, send, recv)

    def all_gather(self, send: ByteArray, recv: ByteArray) -> None:
        """See :class:`Channel`."""
        self._run(self._all_gather, send, recv)

    def _run(self, operation: Any, send: ByteArray, recv: ByteArray) -> None:
        source, target = torch.from_numpy(send).to(self._device), torch.from_numpy(recv)
        staged = target if self._device.type == "cpu" else torch.empty_like(target, device=self._device)
        operation(staged, source, group=self._group)
        if staged is not target:
            target.copy_(staged)

"""Move a hook's bytes to the other ranks: over a communicator, or over gloo, NCCL or any other process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from hybridcomp.arrays import ByteArray
from hybridcomp.device import Event
from hybridcomp.errors import MismatchError

if TYPE_CHECKING:
    from hybridcomp.collectives.execution.progress import Request
    from hybridcomp.torch.backend.group import Group


class Transfer(Protocol):
    """A transfer of bytes in flight."""

    def wait(self) -> list[ByteArray]:
        """Return what each rank sent, in views of the receive buffer; this rank's own entry is undefined."""

    def when_done(self, call: Callable[[], None]) -> None:
        """Call a function when :meth:`wait` would return at once.

        Only of links that are not :attr:`Link.ordered`.
        """


class Link(Protocol):
    """A link for exchanges on a group that nobody else uses.

    ``number`` is the same on all ranks and of no other exchange. ``exact``: what a rank may send at most is what it
    sends. Buffers stay as they are until the transfer has ended.

    Attributes:
        rank, size: in the group.
        ordered: exchanges must start in the same order on all ranks.
    """

    rank: int
    size: int
    ordered: bool

    def scatter(
        self,
        number: int,
        send: ByteArray,
        counts: Sequence[int],
        recv: ByteArray,
        rooms: Sequence[int],
        *,
        exact: bool,
    ) -> Transfer:
        """Start to send the first ``counts[0]`` bytes to rank 0, the next to rank 1, and so on.

        Args:
            number, exact: see above.
            send: ``sum(counts)`` bytes.
            counts: 0 for this rank.
            recv: at least ``sum(rooms)`` bytes.
            rooms: the most bytes that each rank sends here; 0 for this rank.
        """

    def gather(
        self, number: int, send: ByteArray, count: int, recv: ByteArray, rooms: Sequence[int], *, exact: bool
    ) -> Transfer:
        """Start to send the first ``count`` bytes to all ranks.

        Args:
            number, exact: see above.
            send: as many bytes as the largest of ``rooms``.
            count: what this rank sends.
            recv: as many times ``send.size`` bytes as there are ranks.
            rooms: the most bytes that each rank sends, this one too.
        """

    def after(self, events: Sequence[Event]) -> Transfer:
        """Return a transfer of no data that ends when a device has come to ``events``.

        Only of links that are not :attr:`ordered`.
        """

    def attend(self, until: Callable[[], bool]) -> None:
        """Make exchanges progress in this thread until a condition holds."""


def open_link(group: Any) -> Link:
    """Make a link over the ranks of a process group. Collective over its members."""
    comm = getattr(group, "comm", None)  # of a HybridProcessGroup, whatever name the backend was asked by
    return TorchLink(group) if comm is None else CommLink(group)


class CommLink:
    """A link over a duplicate of a process group's communicator, which ends with the group."""

    ordered = False

    def __init__(self, group: Group) -> None:
        from hybridcomp.collectives.operations.byte_exchange import ByteExchange  # noqa: PLC0415  (initialises MPI)

        comm = group.comm
        self._parcels = ByteExchange(comm.mpi, comm.axis, comm.timeout)
        group.beside.append(self._parcels)
        self.rank, self.size = self._parcels.rank, self._parcels.size

    def scatter(
        self,
        number: int,
        send: ByteArray,
        counts: Sequence[int],
        recv: ByteArray,
        rooms: Sequence[int],
        *,
        exact: bool,
    ) -> Transfer:
        """See :class:`Link`."""
        return self._exchange(number, _cut(send, counts), recv, rooms)

    def gather(
        self, number: int, send: ByteArray, count: int, recv: ByteArray, rooms: Sequence[int], *, exact: bool
    ) -> Transfer:
        """See :class:`Link`."""
        return self._exchange(number, [send[:count]] * self.size, recv, rooms)

    def _exchange(
        self, number: int, send: list[ByteArray], recv: ByteArray, rooms: Sequence[int]
    ) -> Transfer:
        places = _cut(recv, rooms)
        received = [0] * self.size
        return _Arrival(self._parcels.exchange(number, send, places, received), places, received)

    def after(self, events: Sequence[Event]) -> Transfer:
        """See :class:`Link`."""
        return _Arrival(self._parcels.after(events), [], [])

    def attend(self, until: Callable[[], bool]) -> None:
        """See :class:`Link`."""
        self._parcels.attend(until)


class _Arrival:
    """A transfer by an exchange of a communicator."""

    def __init__(self, request: Request, places: list[ByteArray], received: list[int]) -> None:
        self._request, self._places, self._received = request, places, received

    def wait(self) -> list[ByteArray]:
        self._request.wait()
        return [place[:n] for place, n in zip(self._places, self._received, strict=True)]

    def when_done(self, call: Callable[[], None]) -> None:
        self._request.add_done_callback(lambda _: call())


class TorchLink:
    """A link over a new group of the same ranks and backend; bytes are staged for a backend that has no CPU tensors.

    Where sizes vary, ranks first tell each other theirs.
    """

    ordered = True

    def __init__(self, group: Any) -> None:
        backend = dist.get_backend(group)
        ranks = dist.get_process_group_ranks(group)
        self._group = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
        self.rank, self.size = dist.get_rank(self._group), len(ranks)
        devices = dist.Backend.backend_capability.get(str(backend), ["cpu"])
        self._device = torch.device("cpu" if "cpu" in devices else devices[0])
        # all_gather_into_tensor is the name of versions before 2.13.
        self._all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def scatter(
        self,
        number: int,
        send: ByteArray,
        counts: Sequence[int],
        recv: ByteArray,
        rooms: Sequence[int],
        *,
        exact: bool,
    ) -> Transfer:
        """See :class:`Link`."""
        sizes = list(rooms) if exact else self._sizes(counts, rooms)
        source, target = self._on_device(send[: sum(counts)]), self._room(recv[: sum(sizes)])
        work = dist.all_to_all_single(target, source, sizes, list(counts), group=self._group, async_op=True)
        return _Work(work, source, target, recv, sizes, sizes)

    def gather(
        self, number: int, send: ByteArray, count: int, recv: ByteArray, rooms: Sequence[int], *, exact: bool
    ) -> Transfer:
        """See :class:`Link`."""
        sizes = list(rooms) if exact else self._sizes([count] * self.size, rooms)
        most = max(sizes)
        source, target = self._on_device(send[:most]), self._room(recv[: self.size * most])
        work = self._all_gather(target, source, group=self._group, async_op=True)
        return _Work(work, source, target, recv, [most] * self.size, sizes)

    def after(self, events: Sequence[Event]) -> Transfer:
        """See :class:`Link`."""
        raise NotImplementedError("whoever has an ordered link waits for a device where it is")

    def attend(self, until: Callable[[], bool]) -> None:
        """See :class:`Link`: the backend has threads of its own."""

    def _sizes(self, counts: Sequence[int], rooms: Sequence[int]) -> list[int]:
        mine = torch.tensor(counts, dtype=torch.int64, device=self._device)
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=self._group)
        sizes = [int(n) for n in theirs.tolist()]
        for rank, (n, room) in enumerate(zip(sizes, rooms, strict=True)):
            if not 0 <= n <= room:
                raise MismatchError(
                    f"rank {rank} sends rank {self.rank} {n} bytes, which has room for {room}"
                )
        return sizes

    def _on_device(self, data: ByteArray) -> torch.Tensor:
        return torch.from_numpy(data).to(self._device)

    def _room(self, data: ByteArray) -> torch.Tensor:
        if self._device.type == "cpu":
            return torch.from_numpy(data)
        return torch.empty(data.size, dtype=torch.uint8, device=self._device)


class _Work:
    """A transfer by torch's collectives: each rank's bytes take ``slots``, of which the first ``sizes`` count."""

    def __init__(
        self,
        work: Any,
        source: torch.Tensor,
        target: torch.Tensor,
        recv: ByteArray,
        slots: Sequence[int],
        sizes: Sequence[int],
    ) -> None:
        self._work, self._source, self._target = work, source, target
        self._recv, self._slots, self._sizes = recv, slots, sizes

    def wait(self) -> list[ByteArray]:
        self._work.wait()
        if self._target.device.type != "cpu":
            torch.from_numpy(self._recv[: self._target.numel()]).copy_(self._target)
        return [part[:n] for part, n in zip(_cut(self._recv, self._slots), self._sizes, strict=True)]

    def when_done(self, call: Callable[[], None]) -> None:
        raise NotImplementedError("transfers of an ordered link are waited for in their order")


def _cut(data: ByteArray, sizes: Sequence[int]) -> list[ByteArray]:
    ends = list(accumulate(sizes))
    return [data[end - n : end] for end, n in zip(ends, sizes, strict=True)]

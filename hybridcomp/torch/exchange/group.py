"""Move the bytes of exchanges by collectives of a process group of torch's: gloo, NCCL or any other backend."""

from __future__ import annotations

import itertools
import secrets
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from hybridcomp.arrays import flatten
from hybridcomp.collectives.transport.topology import check_hosts, hosts_of, said_hosts, told_hosts
from hybridcomp.cuda import runtime_of
from hybridcomp.device import DeviceArray
from hybridcomp.errors import CollectiveTimeoutError, ConfigError, MismatchError, RemoteError
from hybridcomp.pmi.hosts import identity
from hybridcomp.policy import Policy, load_policy
from hybridcomp.schedules.topology import Topology
from hybridcomp.torch.exchange.lanes import Lanes, join_host
from hybridcomp.torch.exchange.staging import DeviceStaging
from hybridcomp.torch.exchange.worker import leaving
from hybridcomp.torch.staging import home
from hybridcomp.version import VERSION_BYTES, check_versions, packed_version

_KEY_BYTES = 8
_LOOK = timedelta(seconds=0.2)  # between two looks at whether this process ends


class Sizes(NamedTuple):
    """The sizes of an exchange, which ranks tell each other before it.

    Attributes:
        nbytes: bytes that each rank sends here.
        failed: the ranks that have failed, this one too.
        carried: whether the backend carries anything of it, between any two ranks.
    """

    nbytes: list[int]
    failed: list[int]
    carried: bool


class ExchangeGroup:
    """A process group of the same ranks and backend as another one, which nobody else uses.

    Making one is collective over its members. Exchanges start in the same order on all ranks. Bytes are copied to the
    backend's device where it takes no tensors of the CPU.

    Attributes:
        rank, size: this rank in the group, and the number of ranks.
        ranks: all of its ranks, as numbered in the world.
        key: a random number that tells it from others; the same on all ranks, once they are known to be alike.
        host_memory: whether the backend takes tensors of the CPU.
        staging: memory of exchanges; None for the host's.
        timeout: seconds that an exchange may take: the timeout of the other group.
        lanes: lanes to the other ranks of this host, once :meth:`join_host` has made them; None where the backend
            carries what these send each other.
    """

    def __init__(self, group: Any) -> None:
        """Make the group.

        Args:
            group: process group of torch's whose ranks and backend it has.

        Raises:
            CollectiveTimeoutError: a rank has not come here within the group's timeout; names it.
            MismatchError: on all ranks; they have made unlike numbers of process groups.
        """
        backend = str(dist.get_backend(group))
        self.ranks = dist.get_process_group_ranks(group)
        _check_names(group, self.ranks)
        limit = _timeout_of(group)
        group = dist.new_group(self.ranks, limit, backend, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)  # this rank is in it
        devices = dist.Backend.backend_capability.get(backend, ["cpu"])
        self._world = dist.get_world_size()
        self._hold(group, dist.get_rank(group), devices, limit)

    @classmethod
    def holding(cls, group: dist.ProcessGroup, devices: Sequence[str], timeout: timedelta) -> ExchangeGroup:
        """Take a process group that nobody else uses, and that torch's registry of groups need not know.

        Args:
            group: the group; its ranks are the world.
            devices: types of the devices whose tensors it takes.
            timeout: longest time of an exchange.
        """
        made = cls.__new__(cls)
        made.ranks = list(range(group.size()))
        made._world = group.size()
        made._hold(group, group.rank(), devices, timeout)
        return made

    def _hold(self, group: dist.ProcessGroup, rank: int, devices: Sequence[str], limit: timedelta) -> None:
        self._group = group
        self.timeout = limit.total_seconds()
        self.lanes: Lanes | None = None
        self._aborted = False
        self.rank, self.size, self.key = rank, len(self.ranks), 0
        self.host_memory = "cpu" in devices
        self._device = torch.device("cpu") if self.host_memory else _own_device(group, devices[0])
        self.staging = _staging(self._device)
        self._stream = None if self.staging is None else _stream_of(self._device, self.staging.stream)

    def keep(self, failed: object) -> None:
        """Keep what an exchange that failed writes to: until the group is aborted the backend may still do so."""
        if not self._aborted:
            _kept.setdefault(self, []).append(failed)

    def abort(self) -> None:
        """Close the connections, so that exchanges fail at once and nothing is written any more."""
        self._aborted = True
        self._group.abort()
        _kept.pop(self, None)

    def check_alike(self, policy: Policy) -> Policy:
        """Return the policy of all ranks: rank 0's, where nobody has asked for one. Collective.

        Raises:
            MismatchError: on all ranks; their versions or policies differ.
        """
        key = bytes([policy.default]) + secrets.token_bytes(_KEY_BYTES)
        mine = np.frombuffer(packed_version() + bytes.fromhex(policy.digest) + key, np.uint8)
        everyone = np.empty(self.size * mine.size, np.uint8)
        counts = [mine.size] * self.size
        self.start(np.tile(mine, self.size), counts, everyone, counts).wait()
        rows = everyone.reshape(self.size, -1)
        check_versions([row[:VERSION_BYTES].tobytes() for row in rows])
        self.key = int.from_bytes(rows[0, -_KEY_BYTES:].tobytes(), "little")
        alike = (rows == mine)[:, : -_KEY_BYTES - 1].all(axis=1)
        defaults = rows[:, -_KEY_BYTES - 1]
        if defaults.all() and (rows != rows[0])[:, : -_KEY_BYTES - 1].any():
            return load_policy(self.first_text(policy.name))  # not every host has a profile
        if not alike.all():
            others = ", ".join(str(rank) for rank in np.flatnonzero(~alike))
            raise MismatchError(f"the policy of rank {self.rank} differs from that of rank {others}")
        return policy

    def topology(self) -> Topology:
        """Find out which ranks are on which host. Collective.

        Raises:
            ConfigError: on all ranks; ``HYBRIDCOMP_HOSTS`` is wrong on one.
            MismatchError: on all ranks; it differs.
        """
        world, error = self._world, ""
        try:
            said_hosts(world)
            mine = f"{told_hosts()}\n{identity()}"
        except ConfigError as wrong:
            mine, error = "", str(wrong)
        texts = self._texts(f"{mine}\n\n{error}")
        for rank, text in enumerate(texts):
            if wrong_there := text.partition("\n\n")[2]:
                raise ConfigError(f"rank {rank}: {wrong_there}")
        told, names = zip(*(text.partition("\n\n")[0].split("\n", 1) for text in texts), strict=True)
        check_hosts(told)
        return hosts_of(world, self.ranks, names)

    def join_host(self, topology: Topology) -> str:
        """Have the ranks of each host hand each other messages over memory that they share. Collective.

        Args:
            topology: hosts of the ranks.

        Returns:
            Why those of this host cannot; "" where they can, or need not: none is beside this one, or the backend
            carries no host memory, and its own ways are a device's.
        """
        if not self.host_memory:
            return ""
        self.lanes, why = join_host(topology, self.rank, self.timeout, self._texts)
        return why

    def _texts(self, text: str) -> list[str]:
        """Return all ranks' texts. Collective."""
        mine = bytearray(text.encode())
        counts = [len(mine)] * self.size
        sizes = self.sizes(counts, failed=False, carried=True).nbytes
        send, recv = np.frombuffer(mine * self.size, np.uint8), np.empty(sum(sizes), np.uint8)
        received = self.start(send, counts, recv, sizes).wait()
        return [part.tobytes().decode(errors="replace") for part in received]

    def first_text(self, text: str) -> str:
        """Return rank 0's text. Collective."""
        return self._texts(text if self.rank == 0 else "")[0]

    def gathered(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return all ranks' values [n], as [ranks, n]. Collective."""
        mine = np.ascontiguousarray(values).view(np.uint8)
        everyone = np.empty(self.size * mine.size, np.uint8)
        counts = [mine.size] * self.size
        self.start(np.tile(mine, self.size), counts, everyone, counts).wait()
        return everyone.view(np.float64).reshape(self.size, values.size)

    def sizes(self, counts: Sequence[int], *, failed: bool, carried: bool) -> Sizes:
        """Tell each rank how many bytes come from here, whether this one has failed, and has any for the backend."""
        flags = 2 * carried + failed
        with _called_on(self._stream):
            mine = torch.tensor([4 * n + flags for n in counts], dtype=torch.int64, device=self._device)
            theirs = torch.empty_like(mine)
            _wait(dist.all_to_all_single(theirs, mine, group=self._group, async_op=True), self._device)
            said = theirs.tolist()
        failures = [rank for rank, n in enumerate(said) if n & 1]
        return Sizes([n >> 2 for n in said], failures, any(n & 2 for n in said))

    def start(self, send: Any, counts: Sequence[int], recv: Any, sizes: Sequence[int]) -> Exchange:
        """Start to send the first ``counts[0]`` bytes to rank 0, the next to rank 1, and so on.

        Args:
            send: buffer of as many bytes as ``counts`` say, which stay as they are until the exchange has ended: an
                array in host memory, or a :class:`~hybridcomp.device.DeviceArray` of :attr:`staging`.
            counts: bytes to each rank.
            recv: buffer of as many bytes as ``sizes`` say, in the same kind of memory.
            sizes: bytes from each rank.
        """
        # NCCL's stream follows the current one, which :meth:`Exchange.wait` has follow NCCL's. The default stream must
        # be neither: the next gradients are computed there.
        with _called_on(self._stream):
            source, target = self._tensor(send), self._tensor(recv, room=True)
            work = dist.all_to_all_single(
                target, source, list(sizes), list(counts), group=self._group, async_op=True
            )
        return Exchange(work, source, target, recv, sizes, self._stream)

    def _tensor(self, buffer: Any, *, room: bool = False) -> torch.Tensor:
        """Return a tensor that the backend takes: a buffer's memory, a copy of it, or ``room`` for as many bytes."""
        if isinstance(buffer, DeviceArray):
            tensor: Any = buffer.owner
            return tensor  # type: ignore[no-any-return]
        if room and not self.host_memory:
            return torch.empty(buffer.size, dtype=torch.uint8, device=self._device)
        return torch.from_numpy(buffer).to(self._device)


_kept: dict[ExchangeGroup, list[object]] = {}
_made: weakref.WeakKeyDictionary[Any, int] = (
    weakref.WeakKeyDictionary()
)  # exchanges of each group, as numbered below


def _check_names(group: Any, ranks: Sequence[int]) -> None:
    """Check that a new group of these ranks gets one name on all of them, over the store of a group that they have.

    Torch names a group that its members alone make by the number of groups that a process has made. Ranks that have
    made unlike numbers would wait for each other under different names.
    """
    names: Any = dist.distributed_c10d
    if len(ranks) == 1 or not hasattr(names, "_hash_ranks_to_str"):
        return
    store = names._get_process_group_store(group)
    number = _made[group] = _made.get(group, 0) + 1
    rank, timeout = dist.get_rank(group), _timeout_of(group)
    keys = [f"hybridcomp/exchange/{number}/{other}" for other in range(len(ranks))]
    store.set(keys[rank], names._hash_ranks_to_str(ranks))
    try:
        store.wait(keys, timeout)
    except Exception as error:
        late = [ranks[other] for other, key in enumerate(keys) if not store.check([key])]
        if not late:
            raise
        raise CollectiveTimeoutError(
            f"making a process group for exchanges of ranks {list(ranks)}: rank {', '.join(map(str, late))} did not "
            f"come within {timeout.total_seconds():g} s"
        ) from error
    alike: dict[str, list[int]] = {}
    for other, key in enumerate(keys):
        alike.setdefault(store.get(key).decode(), []).append(ranks[other])
    if len(alike) > 1:
        parts = " and ".join(f"rank {', '.join(map(str, part))}" for part in alike.values())
        raise MismatchError(
            f"making a process group for exchanges of ranks {list(ranks)}: {parts} have made unlike numbers of process "
            "groups before, by which torch names new ones: let all ranks call torch.distributed.new_group alike, also "
            "for groups that they are not in"
        )


def _own_device(group: dist.ProcessGroup, kind: str) -> torch.device:
    """Return this rank's device: what the group is bound to, else the current one, which a thread has of its own."""
    bound: torch.device | None = getattr(group, "bound_device_id", None)
    if bound is not None or kind != "cuda":
        return torch.device(kind) if bound is None else bound
    return torch.device(kind, torch.cuda.current_device())


def _staging(device: torch.device) -> DeviceStaging | None:
    """Return a device's memory for exchanges; None where messages are in host memory: no kernels run on the device."""
    if device.type != "cuda" or home(torch.empty(0, dtype=torch.uint8, device=device)) != device:
        return None

    def make(nbytes: int, stream: int) -> DeviceArray:
        with _called_on(_stream_of(device, stream)):
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        made: DeviceArray = flatten(memory, device=True).data
        return made

    return DeviceStaging(runtime_of(device.index), make)


def _stream_of(device: torch.device, stream: int) -> Any:
    """Return torch's object for a stream of a device."""
    made: Any = torch.cuda.ExternalStream
    return made(stream, device=device)


def _called_on(stream: Any) -> AbstractContextManager[Any]:
    """Return a context in which torch's work is put on a stream; None leaves it where it is, and CUDA untouched."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of a process group's collectives: the longest of its backends'; torch's own if unknown."""
    found = []
    backend_of: Any = getattr(group, "_get_backend", None)
    for device in getattr(group, "_device_types", ()):
        with suppress(RuntimeError):  # torch has none for the device
            limit: timedelta | None = getattr(getattr(backend_of(device), "options", None), "_timeout", None)
            if limit is not None:
                found.append(limit)
    return max(found, default=dist.default_pg_timeout)


def _wait(work: Any, device: torch.device) -> None:
    """Wait for an exchange of tensors on a device; on the host, until this process ends.

    Raises:
        RemoteError: it does, before the others have come.
    """
    if device.type != "cpu":
        work.wait()  # of the stream, not of the host
        return
    while True:
        try:
            work.wait(_LOOK)
            return
        except RuntimeError:
            if work.is_completed():  # it has failed, or ended a little after the time
                work.wait()
                return
        if leaving.is_set():
            raise RemoteError(
                "an exchange has been given up: other ranks had not come when this process ended"
            )


class Exchange:
    """An exchange under way."""

    def __init__(
        self,
        work: Any,
        source: torch.Tensor,
        target: torch.Tensor,
        recv: Any,
        sizes: Sequence[int],
        stream: Any = None,
    ) -> None:
        self._work, self._source, self._target = work, source, target
        self._recv, self._sizes, self._stream = recv, sizes, stream

    def wait(self) -> list[Any]:
        """Return the bytes that each rank has sent, as views of the receive buffer.

        In a device's memory they are there in the order of its staging's stream: the host does not wait.
        """
        with _called_on(self._stream):
            _wait(self._work, self._target.device)
            if self._target.device.type != "cpu" and not isinstance(self._recv, DeviceArray):
                torch.from_numpy(self._recv).copy_(self._target)
        ends = list(itertools.accumulate(self._sizes))
        return [self._recv[end - n : end] for end, n in zip(ends, self._sizes, strict=True)]

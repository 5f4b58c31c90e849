"""Move the bytes of exchanges by collectives of a process group of torch's: gloo, NCCL or any other backend."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from hybridcomp.arrays import ByteArray
from hybridcomp.errors import MismatchError
from hybridcomp.policy import Policy, load_policy
from hybridcomp.version import VERSION_BYTES, check_versions, packed_version

_KEY_BYTES = 8


class Sizes(NamedTuple):
    """The sizes of an exchange, which ranks tell each other before it.

    Attributes:
        nbytes: bytes that each rank sends here.
        failed: the ranks that have failed, this one too.
    """

    nbytes: list[int]
    failed: list[int]


class ExchangeGroup:
    """A process group of the same ranks and backend as another one, which nobody else uses.

    Making one is collective over its members. Exchanges start in the same order on all ranks. Bytes are copied to the
    backend's device where it takes no tensors of the CPU.

    Attributes:
        rank, size: this rank in the group, and the number of ranks.
        ranks: all of its ranks, as numbered in the world.
        key: a random number that tells it from others; the same on all ranks, once they are known to be alike.
    """

    def __init__(self, group: Any) -> None:
        backend = str(dist.get_backend(group))
        self.ranks = dist.get_process_group_ranks(group)
        group = dist.new_group(self.ranks, backend=backend, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)  # this rank is in it
        self._group = group
        self.rank, self.size, self.key = dist.get_rank(group), len(self.ranks), 0
        devices = dist.Backend.backend_capability.get(backend, ["cpu"])
        self._device = torch.device("cpu" if "cpu" in devices else devices[0])

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

    def first_text(self, text: str) -> str:
        """Return rank 0's text. Collective."""
        mine = np.frombuffer(text.encode(), np.uint8) if self.rank == 0 else np.empty(0, np.uint8)
        counts = [mine.size] * self.size
        sizes = self.sizes(counts, failed=False).nbytes
        received = self.start(np.tile(mine, self.size), counts, np.empty(sum(sizes), np.uint8), sizes).wait()
        return received[0].tobytes().decode()

    def gathered(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return all ranks' values [n], as [ranks, n]. Collective."""
        mine = np.ascontiguousarray(values).view(np.uint8)
        everyone = np.empty(self.size * mine.size, np.uint8)
        counts = [mine.size] * self.size
        self.start(np.tile(mine, self.size), counts, everyone, counts).wait()
        return everyone.view(np.float64).reshape(self.size, values.size)

    def sizes(self, counts: Sequence[int], *, failed: bool) -> Sizes:
        """Tell each rank how many bytes come from here, and whether this one has failed."""
        mine = torch.tensor([2 * n + failed for n in counts], dtype=torch.int64, device=self._device)
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=self._group)
        said = theirs.tolist()
        return Sizes([n // 2 for n in said], [rank for rank, n in enumerate(said) if n % 2])

    def start(
        self, send: ByteArray, counts: Sequence[int], recv: ByteArray, sizes: Sequence[int]
    ) -> Exchange:
        """Start to send the first ``counts[0]`` bytes to rank 0, the next to rank 1, and so on.

        Args:
            send: buffer of as many bytes as ``counts`` say, which stay as they are until the exchange has ended.
            counts: bytes to each rank.
            recv: buffer of as many bytes as ``sizes`` say.
            sizes: bytes from each rank.
        """
        source = torch.from_numpy(send).to(self._device)
        target = torch.from_numpy(recv)
        if self._device.type != "cpu":
            target = torch.empty(recv.size, dtype=torch.uint8, device=self._device)
        work = dist.all_to_all_single(
            target, source, list(sizes), list(counts), group=self._group, async_op=True
        )
        return Exchange(work, source, target, recv, sizes)


class Exchange:
    """An exchange under way."""

    def __init__(
        self, work: Any, source: torch.Tensor, target: torch.Tensor, recv: ByteArray, sizes: Sequence[int]
    ) -> None:
        self._work, self._source, self._target = work, source, target
        self._recv, self._sizes = recv, sizes

    def wait(self) -> list[ByteArray]:
        """Return the bytes that each rank has sent, as views of the receive buffer."""
        self._work.wait()
        if self._target.device.type != "cpu":
            torch.from_numpy(self._recv).copy_(self._target)
        ends = list(itertools.accumulate(self._sizes))
        return [self._recv[end - n : end] for end, n in zip(ends, self._sizes, strict=True)]

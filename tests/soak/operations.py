"""Every operation of the torch process group, on tensors of any size: each starts one and returns what to wait for."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

SIZES = [1, 17, 1_000, 20_000, 100_000]
WEIGHTS = [30, 25, 25, 16, 4]
# The names of versions before 2.13 warn in later ones.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.int64]


class Setting(NamedTuple):
    """Settings of an operation; alike on the ranks of its group.

    Attributes:
        group: a process group that this rank is in.
        rank: rank of this process in it.
        size: number of its ranks.
        root: one of its ranks.
        n: number of elements of a tensor.
        dtype: dtype of its elements.
        asynchronous: whether to return works instead of waiting for them.
        tag: tag of messages that any rank receives, so that they are not taken by an earlier operation.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    root: int
    n: int
    dtype: torch.dtype
    asynchronous: bool
    tag: int

    def tensor(self, n: int | None = None) -> torch.Tensor:
        """Return elements that are this rank's number, from one on."""
        return torch.full((self.n if n is None else n,), self.rank + 1).to(self.dtype)

    def tensors(self) -> list[torch.Tensor]:
        """Return one tensor for each rank."""
        return [self.tensor() for _ in range(self.size)]

    def peer(self, rank: int) -> int:
        """Return the global rank of one of the group."""
        return dist.get_global_rank(self.group, rank % self.size)

    @property
    def how(self) -> dict[str, object]:
        return {"group": self.group, "async_op": self.asynchronous}


Works = list[dist.Work]
Operation = Callable[[Setting], dist.Work | Works | None]


def choose(random_: random.Random, group: dist.ProcessGroup, rank: int, size: int) -> Setting:
    """Draw a setting, the same on all ranks."""
    (n,) = random_.choices(SIZES, WEIGHTS)
    asynchronous, tag = random_.random() < 0.5, random_.randrange(1, 30_000)
    return Setting(group, rank, size, random_.randrange(size), n, random_.choice(DTYPES), asynchronous, tag)


def all_reduce(s: Setting) -> dist.Work | None:
    tensor = s.tensor()
    work = dist.all_reduce(tensor, **s.how)
    if work is None and s.group.axis != "topk":  # which sends one element in ten
        total = s.size * (s.size + 1) / 2
        assert abs(tensor[0].item() - total) <= 0.02 * total, (tensor[0].item(), total)
    return work


def broadcast(s: Setting) -> dist.Work | None:
    return dist.broadcast(s.tensor(), group_src=s.root, **s.how)


def reduce(s: Setting) -> dist.Work | None:
    return dist.reduce(s.tensor(), group_dst=s.root, **s.how)


def all_gather(s: Setting) -> dist.Work | None:
    return dist.all_gather(s.tensors(), s.tensor(), **s.how)


def all_gather_single(s: Setting) -> dist.Work | None:
    return ALL_GATHER(s.tensor(s.n * s.size), s.tensor(), **s.how)


def gather(s: Setting) -> dist.Work | None:
    return dist.gather(s.tensor(), s.tensors() if s.rank == s.root else None, group_dst=s.root, **s.how)


def scatter(s: Setting) -> dist.Work | None:
    return dist.scatter(s.tensor(), s.tensors() if s.rank == s.root else None, group_src=s.root, **s.how)


def reduce_scatter(s: Setting) -> dist.Work | None:
    return dist.reduce_scatter(s.tensor(), s.tensors(), **s.how)


def reduce_scatter_single(s: Setting) -> dist.Work | None:
    return REDUCE_SCATTER(s.tensor(), s.tensor(s.n * s.size), **s.how)


def all_to_all(s: Setting) -> dist.Work | None:
    return dist.all_to_all(s.tensors(), s.tensors(), **s.how)


def all_to_all_single(s: Setting) -> dist.Work | None:
    """Exchange uneven parts: rank r gets r elements more from each."""
    outgoing = [s.n + r for r in range(s.size)]
    incoming = [s.n + s.rank] * s.size
    return dist.all_to_all_single(
        s.tensor(sum(incoming)), s.tensor(sum(outgoing)), incoming, outgoing, **s.how
    )


def barrier(s: Setting) -> dist.Work | None:
    return dist.barrier(**s.how)


def coalesced(s: Setting) -> Works:
    with dist._coalescing_manager(group=s.group, async_ops=True) as manager:
        for n in (s.n, 3):
            dist.all_reduce(s.tensor(n), group=s.group)
    return _waited(s, manager.works)


def ring(s: Setting) -> Works:
    send = dist.P2POp(dist.isend, s.tensor(), s.peer(s.rank + 1), s.group)
    receive = dist.P2POp(dist.irecv, s.tensor(), s.peer(s.rank - 1), s.group)
    return _waited(s, dist.batch_isend_irecv([send, receive]))


def any_source(s: Setting) -> Works:
    if s.rank:
        return _waited(s, [dist.isend(s.tensor(), s.peer(0), s.group, tag=s.tag)])
    return _waited(s, [dist.irecv(s.tensor(), None, s.group, tag=s.tag) for _ in range(s.size - 1)])


def objects(s: Setting) -> None:
    """Exchange objects, which is never asynchronous."""
    dist.all_gather_object([None] * s.size, {"rank": s.rank}, group=s.group)
    dist.broadcast_object_list([s.rank, "text"], group_src=s.root, group=s.group)


def _waited(s: Setting, works: Works) -> Works:
    if s.asynchronous:
        return works
    for work in works:
        work.wait()
    return []


OPERATIONS: list[Operation] = [
    all_reduce,
    broadcast,
    reduce,
    all_gather,
    all_gather_single,
    gather,
    scatter,
    reduce_scatter,
    reduce_scatter_single,
    all_to_all,
    all_to_all_single,
    barrier,
    coalesced,
    ring,
    any_source,
    objects,
]

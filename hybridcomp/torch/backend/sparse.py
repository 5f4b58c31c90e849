"""All-reduce of sparse tensors: all ranks' entries are gathered, and added up on each.

They are carried exactly, whatever the policy: an index has no value near it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ReduceOp

from hybridcomp.collectives.choices import OperationOptions
from hybridcomp.errors import MismatchError
from hybridcomp.torch.backend.op_kinds import op_kind
from hybridcomp.torch.backend.work import CommWork
from hybridcomp.torch.staging import Target, source

if TYPE_CHECKING:
    from hybridcomp.collectives import Communicator

_MOST_DIMS = 16


def all_reduce_sparse(comm: Communicator, tensor: torch.Tensor, op: Any) -> CommWork:
    """Sum or average a COO tensor over all ranks, in place; the result is coalesced.

    Returns once all ranks have said how many entries they have, which it waits for; the entries follow.

    Args:
        comm: communicator of the group.
        tensor: tensor of the same shape, dtype and number of sparse dims on all ranks.
        op: SUM or AVG.

    Raises:
        NotImplementedError: another operation.
        MismatchError: the shapes differ; names both.
    """
    kind = op_kind(op)
    if kind not in (ReduceOp.SUM, ReduceOp.AVG):
        raise NotImplementedError(f"hybridcomp reduces sparse tensors by SUM or AVG, not by {kind}")
    mine = tensor.detach().coalesce()
    shape, dims = tuple(mine.shape), mine.sparse_dim()
    entries = _entries(comm, mine)

    indices, rows = source(mine.indices().t()), source(mine.values())
    row = mine.values().shape[1:]
    all_indices = torch.empty((sum(entries), dims), dtype=torch.int64, device=indices.device)
    all_rows = torch.empty((sum(entries), *row), dtype=mine.dtype, device=rows.device)
    requests = []
    for send, recv in ((indices, all_indices), (rows, Target(all_rows).data)):
        counts = [n * (recv.numel() // max(sum(entries), 1)) for n in entries]
        requests.append(comm.start_allgatherv(send, [recv, counts], OperationOptions(codec="none")))

    def add_up() -> None:
        total = torch.sparse_coo_tensor(all_indices.t(), all_rows, shape, device=all_rows.device).coalesce()
        if kind == ReduceOp.AVG:
            total = total / comm.size
        with torch.no_grad():
            tensor.copy_(total.to(tensor.device))

    return CommWork(requests, [tensor], add_up)


def _entries(comm: Communicator, mine: torch.Tensor) -> list[int]:
    """Gather how many entries each rank has, and check that their tensors are of one shape."""
    if mine.dim() > _MOST_DIMS:
        raise ValueError(f"a sparse all_reduce takes tensors of at most {_MOST_DIMS} dims, not {mine.dim()}")
    about = [mine._nnz(), mine.sparse_dim(), *mine.shape]
    card = torch.full((2 + _MOST_DIMS,), -1, dtype=torch.int64)
    card[: len(about)] = torch.tensor(about)
    cards = torch.empty((comm.size, card.numel()), dtype=torch.int64)
    comm.Allgather(card, cards)
    for rank, other in enumerate(cards):
        if not torch.equal(other[1:], cards[0, 1:]):
            first, differs = (tuple(c[2:][c[2:] >= 0].tolist()) for c in (cards[0], other))
            error = MismatchError(
                f"all_reduce of sparse tensors: rank 0 has the shape {first} with {int(cards[0, 1])} sparse dims, "
                f"rank {rank} has {differs} with {int(other[1])}"
            )
            error.everywhere = True
            raise error
    return cards[:, 0].tolist()

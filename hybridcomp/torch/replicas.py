"""Give replicas the same values, exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def local_of(parameter: Tensor) -> Tensor:
    """Return a parameter's values on this rank, without autograd: for a DTensor, its local part."""
    values = parameter.detach()
    return values.to_local() if hasattr(values, "to_local") else values


@torch.no_grad()
def copy_from_first(tensors: Sequence[torch.Tensor], group: Any) -> None:
    """Give all ranks of a group the values that its first one has, exactly."""
    on_the_way = []
    for tensor in tensors:
        values = local_of(tensor)
        dense = values.resolve_conj().resolve_neg().contiguous()
        raw = dense.view(-1).view(torch.uint8)  # as integers: no policy compresses those
        work = dist.broadcast(raw, group=group, group_src=0, async_op=True)
        on_the_way.append((values, dense, work))
    for values, dense, work in on_the_way:
        if work is not None:
            work.wait()
        if dense is not values:
            values.copy_(dense)

"""Exchange a few numbers of each rank with all ranks, in one exact message."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange:
    """Numbers of every rank on their way to every rank. Collective; ranks make their exchanges in one order.

    Args:
        values: this rank's numbers.
        counters: byte counters to send with them, int64 of any shape; exact up to 2**53.
    """

    def __init__(self, values: Sequence[float], counters: Tensor | None = None) -> None:
        numbers = torch.tensor(values, dtype=torch.float64)
        self._mine = numbers if counters is None else torch.cat([numbers, counters.flatten().double()])
        self._everyone = torch.empty(dist.get_world_size(), self._mine.numel(), dtype=torch.float64)
        # Send the numbers as integers, which no policy compresses.
        parts = list(self._everyone.view(torch.int64))
        self._work: dist.Work | None = dist.all_gather(parts, self._mine.view(torch.int64), async_op=True)

    def wait(self) -> Tensor:
        """Wait for all ranks' numbers and counters, and return them: fp64 [ranks, values + counters]."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._everyone


def sum_exactly(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum fp64 numbers over the ranks of a group, in the order of ranks: alike on all, bit for bit. Collective."""
    everyone = torch.empty(dist.get_world_size(group), values.numel(), dtype=torch.float64)
    dist.all_gather(list(everyone.view(torch.int64)), values.flatten().view(torch.int64), group=group)
    total = everyone[0]
    for part in everyone[1:]:
        total = total + part
    return total.view(values.shape)

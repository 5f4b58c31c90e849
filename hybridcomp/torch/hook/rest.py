"""Sum the small parameters of a bucket that are not compressed, as one task."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridcomp.schedules.shards import aligned
from hybridcomp.torch.hook.things import Shards

Array = npt.NDArray[Any]


class Rest:
    """The small arrays of a bucket, side by side, as one task.

    Each rank owns its shard of every one: who adds what up does not depend on which arrays these are, nor does
    the result.

    Attributes:
        values: of all arrays, shard by shard, once they are gathered; shards are of one size, with zeros at their ends.
        shards: of ``values``.
    """

    def __init__(self, arrays: list[Array], rank: int, size: int) -> None:
        """Take arrays: 1-D, of one dtype, at least one."""
        cuts = [Shards.equal(array.size, rank, size) for array in arrays]
        sizes = [sum(cut.count(shard) for cut in cuts) for shard in range(size)]
        length = aligned(max(sizes))
        self._parts: list[Array] = []
        for shard, n in enumerate(sizes):
            self._parts += [array[cut.span(shard)] for array, cut in zip(arrays, cuts, strict=True)]
            self._parts.append(np.zeros(length - n, arrays[0].dtype))
        self.values: Array = np.empty(size * length, arrays[0].dtype)
        self.shards = Shards([i * length for i in range(size + 1)], rank)

    def gather(self) -> None:
        """Copy the arrays' values."""
        np.concatenate(self._parts, out=self.values)

    def write_back(self) -> None:
        """Write the values back to the arrays."""
        ends = accumulate((part.size for part in self._parts), initial=0)
        for part, (start, end) in zip(self._parts, pairwise(ends), strict=True):
            part[...] = self.values[start:end]

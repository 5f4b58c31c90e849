"""Lay small arrays side by side to sum them in one operation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridcomp.schedules.shards import aligned

Array = npt.NDArray[Any]


class Coalesced:
    """Array of several arrays' values, laid out so that each rank owns its shard of every array.

    So where owners add up, the rank that adds an element, and the result, do not depend on the other arrays.

    Attributes:
        values: values of all arrays, shard by shard, once gathered; shards are of one size, with zeros at their ends.
    """

    def __init__(self, arrays: Sequence[Array], ranks: int) -> None:
        """Take arrays: 1-D, of one dtype, at least one."""
        spans = [_shards(array.size, ranks) for array in arrays]
        sizes = [sum(each[rank].stop - each[rank].start for each in spans) for rank in range(ranks)]
        length = aligned(max(sizes))
        self._parts: list[Array] = []
        for rank, n in enumerate(sizes):
            self._parts += [array[each[rank]] for array, each in zip(arrays, spans, strict=True)]
            self._parts.append(np.zeros(length - n, arrays[0].dtype))
        self.values: Array = np.empty(ranks * length, arrays[0].dtype)

    def gather(self) -> None:
        """Copy the arrays' values into :attr:`values`."""
        np.concatenate(self._parts, out=self.values)

    def write_back(self) -> None:
        """Write the values back to the arrays."""
        ends = accumulate((part.size for part in self._parts), initial=0)
        for part, (start, end) in zip(self._parts, pairwise(ends), strict=True):
            part[...] = self.values[start:end]


def _shards(n: int, ranks: int) -> list[slice]:
    """Return the shards of an array, as the schedules cut them."""
    length = aligned(-(-n // ranks))
    return [slice(min(i * length, n), min((i + 1) * length, n)) for i in range(ranks)]

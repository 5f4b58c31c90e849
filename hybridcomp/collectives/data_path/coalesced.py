"""Lay small arrays side by side to sum them in one operation."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from operator import attrgetter
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
        size, places = _layout(tuple(map(attrgetter("size"), arrays)), ranks)
        self.values: Array = np.empty(size, arrays[0].dtype)
        self._pairs: list[tuple[Array, Array | int]] = []  # places in the values, and what belongs there
        for place, at, shard in places:
            self._pairs.append((self.values[place], 0 if at < 0 else arrays[at][shard]))

    def gather(self) -> None:
        """Copy the arrays' values into :attr:`values`."""
        for place, part in self._pairs:
            place[...] = part

    def write_back(self) -> None:
        """Write the values back to the arrays."""
        for place, part in self._pairs:
            if part.__class__ is not int:
                part[...] = place  # type: ignore[index]


@functools.lru_cache(256)
def _layout(sizes: tuple[int, ...], ranks: int) -> tuple[int, list[tuple[slice, int, slice]]]:
    """Return the number of values, and for each place in them the index of its array, -1 for zeros, and the shard."""
    spans = [_shards(size, ranks) for size in sizes]
    filled = [sum(each[rank].stop - each[rank].start for each in spans) for rank in range(ranks)]
    length = aligned(max(filled))
    places = []
    for rank in range(ranks):
        at = rank * length
        for index, each in enumerate(spans):
            n = each[rank].stop - each[rank].start
            if n:
                places.append((slice(at, at + n), index, each[rank]))
            at += n
        if at < (rank + 1) * length:
            places.append((slice(at, (rank + 1) * length), -1, slice(0)))
    return ranks * length, places


def _shards(n: int, ranks: int) -> list[slice]:
    """Return the shards of an array, as the schedules cut them."""
    length = aligned(-(-n // ranks))
    return [slice(min(i * length, n), min((i + 1) * length, n)) for i in range(ranks)]

"""Plan what a reduction by ``sketch`` sums for each part of a tensor: a table, packed values, or all as they are.

A table is a count sketch: element i is in lane i % lanes of block i // lanes; three hashes give a block three rows and
signs. Where the union of the ranks' elements is known (:func:`plan_union`) a table is tried on it, and grows until all
can be peeled. Where it is only expected (:func:`plan_expected`), before anything is sent, the table must do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybridcomp import native
from hybridcomp.arrays import DType
from hybridcomp.codecs.linear.base import Array, derived_seed
from hybridcomp.codecs.linear.bloom import PART, Filter, Run, words_of

_TRIES = 8
_THRESHOLD = 0.8  # a load below that at which random elements cannot be peeled any more, 0.818
_DEVIATIONS = 4  # standard deviations by which a part may have more elements than expected
_PAIRS = 100  # tables, of which one may have two elements with the same three rows


@dataclass(frozen=True, slots=True)
class Table:
    """A sketch's layout: ``3 * third`` rows of ``lanes`` counters, and the seed of its hashes."""

    lanes: int
    third: int
    seed: int

    @property
    def counters(self) -> int:
        """Return the number of counters."""
        return 3 * self.third * self.lanes


@dataclass(frozen=True, slots=True)
class Part:
    """A range of the elements, sent by a table, packed, or else as it is.

    Attributes:
        elements: range of the elements.
        size: count of the numbers that are summed.
        table: the sketch's layout.
        packed: whether the values of the union alone are summed.
        filter: the layout of the filter that goes with the table.
    """

    elements: slice
    size: int
    table: Table | None = None
    packed: bool = False
    filter: Filter | None = None

    @property
    def words(self) -> slice:
        """Return the range of the bitmap's words that stand for the elements."""
        return slice(self.elements.start // 64, words_of(self.elements.stop))


def plan_union(words: Array, n: int, *, form: str, load: float, lanes: int, seed: int) -> list[Part]:
    """Plan the parts of a tensor for a known union of the ranks' elements.

    Args:
        words: bitmap of the union's ``n`` elements, uint64.
        n: elements of the tensor.
        form: ``sketch`` or ``packed``.
        load: elements per counter that a table begins with.
        lanes: elements of a block.
        seed: seed of the hashes.
    """
    return [_known(words, elements, form, load, lanes, seed) for elements in _cut(n)]


def plan_expected(n: int, kind: DType, *, density: float, rate: float, load: float, seed: int) -> list[Part]:
    """Plan the parts of a tensor for a union of known share only: a table and a filter for each part.

    Args:
        n: elements of the tensor.
        kind: dtype of the numbers that are summed.
        density: share of the union's elements.
        rate: rate of the filter's false positives.
        load: elements per counter of a table.
        seed: seed of the hashes.
    """
    return [_expected(elements, kind, density, rate, load, seed) for elements in _cut(n)]


def runs_of(parts: list[Part]) -> list[Run]:
    """Return the parts that have filters, those of one layout together."""
    runs: list[Run] = []
    at = 0
    for part in parts:
        if part.filter is None:
            continue
        elements, words = part.elements, slice(at, at + part.filter.words)
        if runs and runs[-1].filter == part.filter:
            before = runs.pop()
            elements = slice(before.elements.start, elements.stop)
            words = slice(before.words.start, words.stop)
        runs.append(Run(elements, part.filter, words))
        at = words.stop
    return runs


def _cut(n: int) -> list[slice]:
    return [slice(at, min(at + PART, n)) for at in range(0, n, PART)]


def _known(words: Array, elements: slice, form: str, load: float, lanes: int, seed: int) -> Part:
    kernels = native.kernels()
    n = elements.stop - elements.start
    part = Part(elements, n)
    mine = words[part.words]
    if form == "packed":
        count = kernels.sketch_count(mine, n)
        return Part(elements, count, packed=True) if 2 * count < n else part
    fullest = kernels.sketch_fullest(mine, n, lanes)
    if not fullest:
        return Part(elements, 0, packed=True)
    third = max(2, -int(-fullest // (3 * load)))
    for attempt in range(_TRIES):
        table = Table(lanes, third + -(-third * attempt // 8), derived_seed(seed, attempt))
        if 2 * table.counters >= n:
            break
        part = Part(elements, table.counters, table)
        if not kernels.sketch_stuck(mine, n, table.lanes, table.third, table.seed):
            break
    return part


def _expected(elements: slice, kind: DType, density: float, rate: float, load: float, seed: int) -> Part:
    """Plan a part: all as it is where that is less than twice as long.

    A table has one lane: elements that share rows are found beside those of other lanes more often than beside all.
    """
    n = elements.stop - elements.start
    members = math.ceil(density * n)
    held = members + math.ceil(rate * (n - members))
    most = held + math.ceil(_DEVIATIONS * math.sqrt(held))
    third = max(2, math.ceil(held / (3 * load)), math.ceil(most / (3 * _THRESHOLD)))
    while 2 * third**3 < _PAIRS * held**2:  # held^2 / 2 pairs, of which one in third^3 has the same rows
        third += 1
    table = Table(1, third, derived_seed(seed, 0))
    index = Filter.of(members, rate, table.seed)
    if 2 * (table.counters * kind.itemsize + index.bits // 8) >= n * kind.itemsize:
        return Part(elements, n)
    return Part(elements, table.counters, table, filter=index)

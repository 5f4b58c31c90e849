"""Bloom filters of a tensor's non-zeros: which elements a reduction by ``sketch`` may have to recover.

B. H. Bloom: "Space/Time Trade-offs in Hash Coding with Allowable Errors" (CACM 1970). Each part of a tensor has a
filter of its own. An element sets ``hashes`` of its bits; the OR of all ranks' filters is the filter of their union. It
never misses an element of that, and takes others for one at a rate that its size decides: with ``b`` bits an element
and ``k`` hashes, (1 - exp(-k / b)) ** k. A filter's size is computed to the same bits on every machine: logarithms by
``decimal``, which rounds them correctly, as a C library need not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Context, Decimal

import numpy as np

from hybridcomp import native
from hybridcomp.codecs.linear.base import Array

PART = (
    1 << 18
)  # elements: a table and a filter that a core keeps at hand, and sparsity that differs from part to part
_EXACT = Context(prec=30)


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter's layout: ``bits`` (a multiple of 64) of a part, of which an element sets ``hashes``; and its seed."""

    bits: int
    hashes: int
    seed: int

    @property
    def words(self) -> int:
        """Return the number of uint64."""
        return self.bits // 64

    @classmethod
    def of(cls, elements: int, rate: float, seed: int) -> Filter:
        """Make the smallest filter that takes an element for one of ``elements`` others at no more than a rate.

        Args:
            elements: number of elements that are put in, at least 0.
            rate: rate of false positives, from 1e-9 to below 1.
            seed: seed of the hashes.
        """
        log = _EXACT.ln(Decimal(rate))
        hashes = max(1, int(_EXACT.divide(-log, _EXACT.ln(Decimal(2))).to_integral_value()))
        full = _EXACT.exp(_EXACT.divide(log, Decimal(hashes)))  # the share of bits that are set
        each = float(_EXACT.divide(Decimal(hashes), -_EXACT.ln(1 - full)))
        return cls(64 * max(1, math.ceil(elements * each / 64)), hashes, seed)


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring parts whose filters have one layout, which kernels take at once.

    Attributes:
        elements: range of the tensor's elements; a multiple of :data:`PART`, but for a tensor's last run.
        filter: layout of each part's filter.
        words: range of the words of the parts' filters, among those of the tensor.
    """

    elements: slice
    filter: Filter
    words: slice

    @property
    def bitmap(self) -> slice:
        """Return the range of a bitmap's words that stand for the elements."""
        return slice(self.elements.start // 64, words_of(self.elements.stop))

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return int(self.elements.stop - self.elements.start)


def insert(runs: list[Run], bitmap: Array) -> Array:
    """Return the filters, uint64, of the elements of a bitmap.

    Args:
        runs: runs of the tensor's parts that have filters.
        bitmap: bitmap of all elements, uint64.
    """
    filters = np.zeros(runs[-1].words.stop if runs else 0, np.uint64)
    kernels = native.kernels()
    for run in runs:
        how = run.filter
        there = filters[run.words]
        kernels.bloom_insert(bitmap[run.bitmap], run.size, PART, how.bits, how.hashes, how.seed, there)
    return filters


def query(runs: list[Run], filters: Array, n: int) -> tuple[Array, int]:
    """Find the elements that filters may hold.

    Args:
        runs: runs of the tensor's parts that have filters.
        filters: filters of these runs, uint64.
        n: elements of the tensor.

    Returns:
        Their bitmap, uint64, without any of other parts, and how many they are.
    """
    bitmap = np.zeros(words_of(n), np.uint64)
    kernels, count = native.kernels(), 0
    for run in runs:
        how = run.filter
        there = bitmap[run.bitmap]
        count += kernels.bloom_query(
            filters[run.words], run.size, PART, how.bits, how.hashes, how.seed, there
        )
    return bitmap, count


def words_of(n: int) -> int:
    """Return the number of words of a bitmap of ``n`` elements."""
    return -(-n // 64)

"""Fill and read the numbers that a reduction by ``sketch`` sums: tables, packed values, and parts as they are."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hybridcomp import arrays, native
from hybridcomp.arrays import Flat
from hybridcomp.codecs.linear.base import Array
from hybridcomp.codecs.linear.sketch_plan import Part, Table


def placed(parts: list[Part], sums: Array) -> Iterator[tuple[Part, Array]]:
    """Return each part with its range of the numbers that are summed."""
    at = 0
    for part in parts:
        yield part, sums[at : at + part.size]
        at += part.size


def fill(parts: list[Part], x: Flat, mine: Array, union: Array) -> Array:
    """Return the numbers that this rank gives: float32 (float64 for float64).

    Args:
        parts: parts of the tensor.
        x: the tensor.
        mine: bitmap of its non-zeros, uint64: the elements that go into tables.
        union: bitmap of the elements that packed parts send.
    """
    kernels, kind = native.kernels(), x.dtype.accumulator
    sums = np.zeros(sum(part.size for part in parts), kind.storage)
    for part, there in placed(parts, sums):
        data = x.data[part.elements]
        if part.table is not None:
            fold(mine[part.words], Flat(data, x.dtype, data.shape, True, False), part.table, there)
        elif part.packed:
            values = np.empty(part.size, x.dtype.storage)
            kernels.sketch_gather(union[part.words], data, x.dtype, values)
            kernels.convert(values, x.dtype, there, kind, False)
        else:
            kernels.convert(data, x.dtype, there, kind, False)
    return sums


def read(parts: list[Part], words: Array, sums: Array, n: int) -> tuple[Array, int]:
    """Return the tensor that the numbers stand for, 1-D of their dtype, and how many of it are only estimates.

    Args:
        parts: parts of the tensor.
        words: bitmap of the elements that tables hold and packed parts have, uint64.
        sums: the numbers; tables are used up.
        n: elements of the tensor.
    """
    kind = arrays.as_dtype(sums.dtype)
    total = np.zeros(n, sums.dtype)
    remained = 0
    for part, there in placed(parts, sums):
        out = total[part.elements]
        if part.table is not None:
            remained += peel(words[part.words], part.table, there, out, zeros=part.filter is not None)
        elif part.packed:
            native.kernels().sketch_scatter(words[part.words], there, out, kind, False)
        else:
            out[:] = there
    return total, remained


def fold(words: Array, x: Flat, table: Table, counters: Array) -> None:
    """Add a tensor to a sketch.

    Args:
        words: bitmap of the elements to add, uint64.
        x: the tensor.
        table: the sketch's layout.
        counters: float32 (float64 for float64), ``table.counters`` of them.
    """
    native.kernels().sketch_fold(words, x.data, x.dtype, table.lanes, table.third, table.seed, counters)


def peel(words: Array, table: Table, counters: Array, out: Array, *, zeros: bool = False) -> int:
    """Write the elements of a sketch to ``out``; return how many are only estimates.

    Args:
        words: bitmap of the elements, uint64.
        table: the sketch's layout.
        counters: the sketch, float32 or float64; used up.
        out: array of the same dtype, written where the bitmap has a bit.
        zeros: whether the bitmap may have elements that no rank added. They come out as zeros, and so does a value of
            no more than 2^-18 (float64: 2^-47) of the largest value that was taken out of its counter before, or had a
            part in that.
    """
    kind, kernels = arrays.as_dtype(out.dtype), native.kernels()
    shape = (table.lanes, table.third, table.seed)
    left: int = kernels.sketch_peel(words, *shape, counters, out, kind, zeros)
    return left

"""Parse mpi4py's buffer specifications of the v-collectives: parts whose sizes differ."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from hybridcomp.arrays import Flat
from hybridcomp.collectives.buffers import Spec, retyped
from hybridcomp.collectives.packing import Layout
from hybridcomp.schedules.placement import Extents


def parse_vector(spec: Any, ranks: int, *, writable: bool) -> tuple[Flat, list[tuple[int, int]]]:
    """View a buffer of one part for each rank as flat elements and the parts' extents.

    Args:
        spec: what mpi4py takes: an array or buffer, or ``[data, counts]``, ``[data, counts, displs]`` or
            ``[data, (counts, displs)]`` with or without a datatype or typecode at the end. Counts left out are
            near-equal, displacements left out follow from the counts; a single number is the count of every part, or
            the distance between parts; several are a list, tuple or array of any integers. Parts of a derived datatype
            of one basic type are packed, one after the other.
        ranks: number of parts.
        writable: whether the buffer receives data.

    Raises:
        ForeignBufferError: as in :func:`~hybridcomp.collectives.buffers.parse`.
        BufferError, KeyError, TypeError, ValueError: mpi4py's, for what it does not take.
        ValueError: there is not one part for each rank, or a part is not within the data.
    """
    data, counts, displs, datatype = Spec.of(spec, pairs=(tuple,))  # a list has the counts of all ranks
    flat = retyped(data, datatype, writable=writable)
    if flat is None:
        assert isinstance(datatype, MPI.Datatype)
        return _packed(data, counts, displs, datatype, ranks, writable=writable)
    sizes = _counts(counts, ranks, flat.size)
    extents = _extents(sizes, displs, ranks)
    for start, n in extents:
        if n < 0 or start < 0 or start + n > flat.size:
            raise ValueError(f"elements {start} to {start + n} are not within a buffer of {flat.size}")
    return flat, extents


def _packed(
    data: Any, counts: Any, displs: Any, datatype: MPI.Datatype, ranks: int, *, writable: bool
) -> tuple[Flat, list[tuple[int, int]]]:
    """Pack parts of a derived datatype: see :func:`parse_vector`."""
    layout = Layout(data, datatype, writable=writable)
    sizes = _counts(counts, ranks, len(layout))
    places = _extents(sizes, displs, ranks)
    extents = following([n * layout.each for n in sizes])
    values: Any = np.empty(sum(n for _, n in extents), layout.dtype.storage)

    def store(result: Any) -> None:
        for (start, n), (place, count) in zip(extents, places, strict=True):
            layout.store(result[start : start + n], count, place)

    for (start, n), (place, count) in zip(extents, places, strict=True):
        layout.load(values[start : start + n], count, place)
    return Flat(values, layout.dtype, (values.size,), False, False, store if writable else None), extents


def _extents(sizes: list[int], displs: Any, ranks: int) -> list[tuple[int, int]]:
    starts = _displs(displs, sizes)
    if len(sizes) != ranks or len(starts) != ranks:
        raise ValueError(f"{len(sizes)} counts and {len(starts)} displacements for {ranks} ranks")
    return list(zip(starts, sizes, strict=True))


def following(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the extents of parts that lie one after the other."""
    return list(zip(itertools.accumulate(counts, initial=0), counts, strict=False))


def byte_extents(extents: Extents, itemsize: int) -> list[tuple[int, int]]:
    """Return the first byte and the number of bytes of each part."""
    return [(start * itemsize, n * itemsize) for start, n in extents]


def _counts(counts: Any, ranks: int, size: int) -> list[int]:
    if counts is None:
        return [size // ranks + (q < size % ranks) for q in range(ranks)]
    if _single(counts):
        return [operator.index(counts)] * ranks
    return [operator.index(n) for n in counts]


def _displs(displs: Any, counts: list[int]) -> list[int]:
    if displs is None:
        return [start for start, _ in following(counts)]
    if _single(displs):
        return [operator.index(displs) * q for q in range(len(counts))]
    return [operator.index(start) for start in displs]


def _single(number: Any) -> bool:
    """Tell whether a count stands for all parts; every array of NumPy's has ``__index__``."""
    return hasattr(number, "__index__") and not getattr(number, "ndim", 0)

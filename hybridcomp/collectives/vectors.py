"""Parse mpi4py's buffer specifications of the v-collectives: parts whose sizes differ."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from hybridcomp.arrays import Flat
from hybridcomp.collectives.buffers import ForeignBufferError, retyped, unpack
from hybridcomp.errors import CodecMismatchError

# For each rank, the first element and the element count of its part.
Extents = Sequence[tuple[int, int]]


def parse_vector(spec: Any, ranks: int, *, writable: bool) -> tuple[Flat, list[tuple[int, int]]]:
    """View a buffer of one part for each rank as flat elements and the parts' extents.

    Args:
        spec: ``[data, counts]``, ``[data, counts, displs]`` or ``[data, (counts, displs)]``, with or without an MPI
            datatype at the end. Counts left out are near-equal, displacements left out follow from the counts; a
            single number is the count of every part, or the distance between parts.
        ranks: number of parts.
        writable: whether the buffer receives data.

    Raises:
        ForeignBufferError: as in :func:`~hybridcomp.collectives.buffers.parse`.
        ValueError: there is not one part for each rank, or a part is not within the data.
    """
    parts = list(spec) if isinstance(spec, list | tuple) else [spec]
    data, counts, displs, datatype = unpack(parts)
    try:
        flat = retyped(data, datatype, writable=writable)
    except CodecMismatchError as error:
        raise ForeignBufferError(str(error)) from None
    sizes = _counts(counts, ranks, flat.size)
    starts = _displs(displs, sizes)
    if len(sizes) != ranks or len(starts) != ranks:
        raise ValueError(f"{len(sizes)} counts and {len(starts)} displacements for {ranks} ranks")
    for start, n in zip(starts, sizes, strict=True):
        if n < 0 or start < 0 or start + n > flat.size:
            raise ValueError(f"elements {start} to {start + n} are not within a buffer of {flat.size}")
    return flat, list(zip(starts, sizes, strict=True))


def following(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the extents of parts that lie one after the other."""
    return list(zip(itertools.accumulate(counts, initial=0), counts, strict=False))


def byte_extents(extents: Extents, itemsize: int) -> list[tuple[int, int]]:
    """Return the first byte and the number of bytes of each part."""
    return [(start * itemsize, n * itemsize) for start, n in extents]


def _counts(counts: Any, ranks: int, size: int) -> list[int]:
    if counts is None:
        return [size // ranks + (q < size % ranks) for q in range(ranks)]
    if hasattr(counts, "__index__"):
        return [int(counts)] * ranks
    return [int(n) for n in counts]


def _displs(displs: Any, counts: list[int]) -> list[int]:
    if displs is None:
        return [start for start, _ in following(counts)]
    if hasattr(displs, "__index__"):
        return [int(displs) * q for q in range(len(counts))]
    return [int(start) for start in displs]

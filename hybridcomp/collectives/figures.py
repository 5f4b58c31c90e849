"""Define the figures by which ranks decide about codecs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hybridcomp.errors import MismatchError

Figures = npt.NDArray[np.float64]
"""Values of one rank [n], or of each rank [ranks, n]."""


def check_figures(counts: npt.NDArray[np.int64], where: str) -> None:
    """Check that all ranks that decide together have as many figures.

    Args:
        counts: number of figures of each rank.
        where: words for the larger group, such as ``on axis 'dp_tp'``.

    Raises:
        MismatchError: a rank has another number.
    """
    other = np.flatnonzero(counts != counts[0])
    if other.size:
        raise MismatchError(
            f"groups that decide together must start the same operations in the same order: {where} rank 0 has "
            f"{counts[0]} figures, rank {other[0]} has {counts[other[0]]}"
        )


def check_inside(outside: npt.NDArray[np.int64], where: str) -> None:
    """Check that the larger group has all ranks of the groups that decide together.

    Args:
        outside: for each rank, a rank of its group that the larger one lacks, numbered in its group; -1 for none.
        where: as in :func:`check_figures`.

    Raises:
        ValueError: the larger group lacks one.
    """
    told = np.flatnonzero(outside >= 0)
    if told.size:
        raise ValueError(
            f"the larger group must have all ranks of the groups that decide together: {where} rank "
            f"{outside[told[0]]} of the group of rank {told[0]} is lacking"
        )


def check_sizes(sizes: npt.NDArray[np.int64], where: str) -> None:
    """Check that groups of these sizes can decide together.

    Args:
        sizes: number of ranks of each rank's group.
        where: as in :func:`check_figures`.

    Raises:
        ValueError: the groups have unlike numbers of ranks.
    """
    other = np.flatnonzero(sizes != sizes[0])
    if other.size:
        raise ValueError(
            f"groups that decide together must have the same number of ranks: {where} that of rank 0 has "
            f"{sizes[0]}, that of rank {other[0]} has {sizes[other[0]]}"
        )

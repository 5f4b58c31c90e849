"""Conditions on all ranks."""

from __future__ import annotations

from mpi4py import MPI


def everywhere(condition: bool) -> bool:
    """Tell whether a condition holds on all ranks."""
    return bool(MPI.COMM_WORLD.allreduce(condition, MPI.LAND))

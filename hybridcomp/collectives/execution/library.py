"""Where the functions of the MPI are that mpi4py uses, for compiled code."""

from __future__ import annotations

import ctypes
import functools

from mpi4py import MPI


@functools.cache
def address(function: str) -> int:
    """The address of one of MPI's functions."""
    found = getattr(ctypes.CDLL(MPI.__file__), function)
    at = ctypes.cast(found, ctypes.c_void_p).value
    assert at is not None
    return at

"""Find the addresses, for compiled code, of the functions of the MPI that mpi4py uses."""

from __future__ import annotations

import ctypes
import functools

from mpi4py import MPI


@functools.cache
def address(function: str) -> int:
    """Return the address of one of MPI's functions."""
    found = getattr(ctypes.CDLL(MPI.__file__), function)
    at = ctypes.cast(found, ctypes.c_void_p).value
    assert at is not None
    return at

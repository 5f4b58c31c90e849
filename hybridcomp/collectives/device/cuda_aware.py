"""Find out whether MPI takes pointers to a GPU's memory.

There is no standard query. These sources are asked in this order, and the first answer counts:

1.  ``HYBRIDCOMP_CUDA_AWARE``, 0 or 1, for a user who knows better.
2.  Switches of the MPI library at hand that are off. Many libraries are built with CUDA and used without it:
    conda-forge's Open MPI has ``opal_cuda_support`` off, Cray MPICH needs ``MPICH_GPU_SUPPORT_ENABLED=1``, MVAPICH2
    ``MV2_USE_CUDA=1``. The switches of Open MPI and MPICH are control variables, which MPI's tools interface reads
    wherever they were set.
3.  ``MPIX_Query_cuda_support()`` of Open MPI, MPICH and MVAPICH2, or MPICH's older ``MPIX_GPU_query_support``.
4.  MPI 4.1's info key ``mpi_memory_alloc_kinds``, which lists ``cuda`` and its kin.

Without an answer, MPI is taken not to be CUDA-aware: a pointer that MPI cannot take is a segmentation fault, a copy
through host memory only costs time.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

from hybridcomp import variables

_GPU_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA
_THREAD_MULTIPLE = 3
_OFF = ("0", "false", "no", "off", "disabled")


class Awareness(NamedTuple):
    """Kinds of calls in which MPI takes device pointers.

    Attributes:
        messages: whether MPI takes them in sends and receives.
        collectives: whether MPI takes them in its own non-blocking collectives, too. Open MPI says that its
            collectives are not CUDA-aware.
        why: source of this answer.
    """

    messages: bool
    collectives: bool
    why: str


class Library(NamedTuple):
    """Facts about an MPI library that tell whether it is CUDA-aware.

    Attributes:
        version: text of ``MPI_Get_library_version``.
        query: answer of its query function; None if it has none.
        kinds: memory kinds in the info of ``COMM_WORLD``; empty if it names none.
        variable: function that reads a control variable; returns None where there is none of that name.
    """

    version: str
    query: bool | None
    kinds: str
    variable: Callable[[str], int | None]


def decide(environ: Mapping[str, str], library: Library) -> Awareness:
    """Tell whether ``library`` takes device pointers.

    Raises:
        ConfigError: ``HYBRIDCOMP_CUDA_AWARE`` is neither 0 nor 1.
    """
    collectives = "Open MPI" not in library.version
    forced = variables.CUDA_AWARE.read(environ)
    if forced is not None:
        return Awareness(forced, forced and collectives, f"{variables.CUDA_AWARE}={int(forced)}")
    off = _switched_off(environ, library)
    if off is not None:
        return Awareness(False, False, off)
    if library.query is not None:
        answer = "yes" if library.query else "no"
        return Awareness(library.query, library.query and collectives, f"MPI's query says {answer}")
    kinds = [kind.strip().lower() for kind in library.kinds.split(",")]
    if any(kind.partition(":")[0] == "cuda" for kind in kinds):
        return Awareness(True, collectives, f"mpi_memory_alloc_kinds is {library.kinds!r}")
    return Awareness(False, False, "MPI does not say that it does")


@functools.cache
def awareness() -> Awareness:
    """Tell whether this process's MPI library takes device pointers."""
    return decide(os.environ, _library())


def _switched_off(environ: Mapping[str, str], library: Library) -> str | None:
    """Name the setting that switches CUDA off in this library; return None if there is none."""
    version = library.version.upper()
    needed = None
    if "CRAY MPICH" in version:
        needed = "MPICH_GPU_SUPPORT_ENABLED"
    elif "MVAPICH2" in version:
        needed = "MV2_USE_CUDA"
    if needed is not None and environ.get(needed) != "1":
        return f"{needed} is not 1"
    variables = ("opal_cuda_support", "mpi_built_with_cuda_support") if "OPEN MPI" in version else ()
    for name in variables or ("MPIR_CVAR_ENABLE_GPU",):
        value = library.variable(name)
        if value is None:  # no tools interface
            given = environ.get(f"OMPI_MCA_{name}" if variables else name, "1")
            value = int(given.lower() not in _OFF)
        if not value:
            return f"{name} is off"
    return None


def _library() -> Library:
    from mpi4py import MPI  # noqa: PLC0415  (initialises MPI)

    handle = ctypes.CDLL(MPI.__file__)  # symbols of mpi4py, and of the libmpi that it is linked to
    info = MPI.COMM_WORLD.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds") or ""
    info.Free()
    return Library(
        MPI.Get_library_version(), _query(handle), kinds, functools.partial(_control_variable, handle)
    )


def _query(handle: ctypes.CDLL) -> bool | None:
    if hasattr(handle, "MPIX_Query_cuda_support"):
        return bool(handle.MPIX_Query_cuda_support())
    if hasattr(handle, "MPIX_GPU_query_support"):
        supported = ctypes.c_int(0)
        failed = handle.MPIX_GPU_query_support(_GPU_CUDA, ctypes.byref(supported))
        return not failed and bool(supported.value)
    return None


def _control_variable(handle: ctypes.CDLL, name: str) -> int | None:
    """Return an integer or boolean control variable of MPI's tools interface; None if there is none of that name."""
    if not hasattr(handle, "MPI_T_cvar_get_index"):
        return None
    index, count, provided = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    variable = ctypes.c_void_p()
    value = (ctypes.c_int * 64)()  # more than any such variable has elements; only the first matters
    if handle.MPI_T_init_thread(_THREAD_MULTIPLE, ctypes.byref(provided)):
        return None
    try:
        if handle.MPI_T_cvar_get_index(name.encode(), ctypes.byref(index)):
            return None
        if handle.MPI_T_cvar_handle_alloc(index, None, ctypes.byref(variable), ctypes.byref(count)):
            return None
        try:
            failed = count.value != 1 or handle.MPI_T_cvar_read(variable, value)
            return None if failed else int(value[0])
        finally:
            handle.MPI_T_cvar_handle_free(ctypes.byref(variable))
    finally:
        handle.MPI_T_finalize()

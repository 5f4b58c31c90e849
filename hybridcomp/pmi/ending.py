"""End MPI with the process, by its exit status.

``MPI_Finalize`` waits for all ranks. mpi4py calls it at every end of Python: a rank that leaves with an error would
stay there, its launcher would not learn that it has failed, and the others would wait for it. So a session of MPI is
held, which makes ``MPI_Finalize`` a matter of this process alone, and ends in a function that the C library calls with
the exit status (``kernels/engine/waiting/ending.hpp``): with status 0 it waits for all ranks, as ever; with another one
the process ends at once.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from hybridcomp import launcher
from hybridcomp.errors import NativeUnavailableError
from hybridcomp.native import extension

MPICH = ("MPICH", "MVAPICH", "Intel(R) MPI", "CRAY MPICH")  # beginnings of the names of MPICH and its kin
_SESSIONS = (4, 0)  # version of MPI's standard that has them


@functools.cache
def hold() -> bool:
    """Have the initialised MPI end with this process, by its exit status.

    Returns:
        Whether it will; if not, it ends as mpi4py has it, as Open MPI does, and MPI before version 4.
    """
    # Not above: importing it initialises MPI, which is here by now.
    from mpi4py import MPI  # noqa: PLC0415

    from hybridcomp.pmi.library import address  # noqa: PLC0415

    if not MPI.Get_library_version().startswith(MPICH) or MPI.Get_version() < _SESSIONS or MPI.Is_finalized():
        return False
    try:
        kernels = extension()  # a wrong variable is for those to report who use the kernels
    except NativeUnavailableError:
        return False
    session: Any = MPI.Session.Init()
    handle = ctypes.string_at(MPI._addressof(session), MPI._sizeof(session))
    kernels.end_mpi_at_exit(address("MPI_Session_finalize"), handle, launcher.hydra_socket())
    finalize = MPI.Finalize

    @functools.wraps(finalize)
    def end_both() -> None:
        session.Finalize()
        kernels.mpi_has_ended()
        finalize()

    MPI.Finalize = end_both
    return True


def leave_mpi(why: str = "") -> None:
    """Leave MPI as it is when this process ends: its end would wait for ranks that are gone, or crash.

    Args:
        why: line that says what is wrong, printed by a process that would end well otherwise, and ends with status 1;
            empty where its status is to stay.
    """
    if hold():
        extension().leave_mpi(why)

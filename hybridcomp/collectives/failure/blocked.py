"""End the job at exit where a thread has not come back from MPI.

``MPI_Comm_dup`` and others wait for other ranks without a limit. The threads that call them are left behind where the
ranks do not come. ``MPI_Finalize`` frees what such a thread works with, and MPICH 5 crashes: the process would end by a
segmentation fault some time after the error that says why.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import time

from mpi4py import MPI

from hybridcomp.launcher import abort

_EXIT_SECONDS = 5.0  # that threads have to come back once the process exits
_CODE = 1

_threads: dict[threading.Thread, str] = {}


def watch(thread: threading.Thread, what: str) -> None:
    """Abort the job at exit if a thread is alive then.

    Args:
        thread: to be started; calls MPI.
        what: it does, for the message.
    """
    _at_exit()
    for other in [other for other in list(_threads) if other.ident is not None and not other.is_alive()]:
        _threads.pop(other, None)
    _threads[thread] = what


@functools.cache
def _at_exit() -> None:
    atexit.register(_end, os.getpid())


def _end(pid: int) -> None:
    """Wait for the threads for some seconds, and end all ranks if one does not come back."""
    if os.getpid() != pid or MPI.Is_finalized():
        return
    deadline = time.monotonic() + _EXIT_SECONDS
    for thread, what in list(_threads.items()):
        if thread.is_alive():
            thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            print(
                f"hybridcomp: rank {MPI.COMM_WORLD.Get_rank()} is still in MPI at its exit ({what}), where "
                "MPI_Finalize would crash; it ends all ranks by MPI_Abort",
                file=sys.stderr,
            )
            abort(MPI.COMM_WORLD, _CODE)

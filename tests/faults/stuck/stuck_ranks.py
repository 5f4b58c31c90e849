"""Two ranks, one of which MPI does not come back to: ``python -m tests.faults.stuck.stuck_ranks HOW LIBRARY``."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import numpy as np
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.collectives import fast_path_cache
from hybridcomp.collectives.engine import groups
from hybridcomp.collectives.execution import wait
from hybridcomp.collectives.failure import watchdog
from hybridcomp.launcher import abort

TIMEOUT = 1.0
_WRAPPED = ("Isend", "Iallreduce", "Irecv", "Test", "Testsome", "Request_get_status")
_HANDLER_SECONDS = 4.0  # longer than the watchdog looks at a late call before a process ends


def _bind(library: str) -> ctypes.CDLL:
    """Have compiled code call the functions of a library, compiled of ``stuck.c``."""
    shim = ctypes.CDLL(library)
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").split()
    (mpi,) = {word for word in maps if Path(word).name.startswith("libmpi.so")}
    shim.stuck_bind(mpi.encode())
    honest = fast_path_cache.address

    def address(name: str) -> int:
        if name.removeprefix("MPI_") not in _WRAPPED:
            return honest(name)
        at = ctypes.cast(getattr(shim, name), ctypes.c_void_p).value
        assert at is not None
        return at

    for module in (groups, wait, fast_path_cache):
        module.address = address  # type: ignore[attr-defined]
    watchdog.BETWEEN_SECONDS, watchdog.LOOKS = 0.1, 10
    return shim


def main(how: str, library: str) -> None:
    """Get stuck on rank 0 as ``how`` says; rank 1 stays away."""
    shim = _bind(library)
    comm = hc.Communicator(MPI.COMM_WORLD, "none", "dp", timeout=30.0)
    comm.timeout = TIMEOUT
    x = np.ones(10_000, np.float32)
    for codec in (None, "int8"):
        comm.Allreduce(MPI.IN_PLACE, x, codec=codec)
    if comm.rank:
        time.sleep(30.0)
        return
    if how == "late":
        signal.signal(signal.SIGALRM, _handle)
        signal.setitimer(signal.ITIMER_REAL, TIMEOUT / 2)
        try:
            comm.Allreduce(MPI.IN_PLACE, x, codec="int8")
        except hc.CollectiveTimeoutError as error:
            print(error, flush=True)
            abort(MPI.COMM_WORLD, 3)
    if how == "wait":
        stuck = threading.Timer(TIMEOUT / 2, _send, (shim,))
        stuck.daemon = True
        stuck.start()
    else:
        shim.stuck_arm()
    comm.Allreduce(MPI.IN_PLACE, x, codec="int8" if how == "compressed" else None)


def _handle(number: int, frame: FrameType | None) -> None:
    """Keep the thread that waits, as a debugger does: nothing is polled meanwhile, but MPI is well."""
    time.sleep(_HANDLER_SECONDS)


def _send(shim: ctypes.CDLL) -> None:
    shim.stuck_arm()
    shim.MPI_Isend(0, 0, 0, 0, 0, 0, 0, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])

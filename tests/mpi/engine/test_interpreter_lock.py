"""Calls of MPI that compiled code makes, beside functions of Python's that MPI calls in another thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from tests.mpi.conftest import verdict

_SECONDS = 0.5


def _generalized() -> None:
    """Have MPI call functions of Python's, as it ends a request of the program's own."""
    request = MPI.Grequest.Start(lambda status: None, lambda: None, lambda completed: None)
    request.Complete()
    MPI.Request(request).Wait()


def _reduced() -> None:
    """Have MPI sum by a function of Python's."""
    x, out = np.ones(4), np.empty(4)
    MPI.COMM_SELF.Allreduce(x, out, _SUM)


def _sum(given: MPI.buffer, result: MPI.buffer, datatype: MPI.Datatype) -> None:
    np.frombuffer(result, np.float64)[:] += np.frombuffer(given, np.float64)


_SUM = MPI.Op.Create(_sum, commute=True)


@pytest.mark.parametrize("called", [_generalized, _reduced])
@pytest.mark.parametrize("message", ["blocking", "non-blocking", "generalized"])
def test_functions_of_the_programs_own(make: Callable[..., hc.Communicator], called, message):
    """MPI has its lock while it waits for the interpreter's: who calls MPI must not have that and wait for MPI's."""
    comm = make()
    x, out = np.ones(8, np.float32), np.empty(8, np.float32)
    policy = {"generalized": "int8"}.get(message)
    until, ended = time.monotonic() + _SECONDS, threading.Event()

    def call() -> None:
        while not ended.is_set():
            called()

    threads = [threading.Thread(target=call, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    go_on = np.ones(1)
    while go_on[0]:
        if message == "blocking":
            comm.Allreduce(x, out)
        else:
            receive = comm.Irecv(out, left, 3, codec=policy)
            comm.Isend(x, right, 3, codec=policy).Wait()
            receive.Wait()
        assert out[0] == (comm.size if message == "blocking" else 1)
        go_on[0] = time.monotonic() < until
        comm.Bcast(go_on)
    ended.set()
    for thread in threads:
        thread.join(10)
    verdict(not any(thread.is_alive() for thread in threads))

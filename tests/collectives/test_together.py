"""Threads that share MPI: blocking operations of one beside non-blocking ones of another."""

from __future__ import annotations

import textwrap

from tests.torch.harness import mpiexec

# A thread that held the interpreter in MPI, and one that MPI called Python from, once waited for each other for ever.
TOGETHER = """
    import faulthandler, threading
    import numpy as np
    from mpi4py import MPI
    import hybridcomp as hc

    faulthandler.dump_traceback_later(40, exit=True)
    left, right = (hc.Communicator(MPI.COMM_WORLD, "none", axis) for axis in ("left", "right"))
    x = np.ones(8, np.float32)

    def blocking():
        y = np.empty_like(x)
        for _ in range(3000):
            left.Allreduce(x, y)

    thread = threading.Thread(target=blocking)
    thread.start()
    for i in range(1500):
        request = right.Iallreduce(x, np.empty_like(x))
        if i % 10:
            request.wait()
    thread.join()
    request.wait()
    print("well", flush=True)
"""

FORGOTTEN = """
    import numpy as np
    from mpi4py import MPI
    import hybridcomp as hc

    comm = hc.Communicator(MPI.COMM_WORLD, "none")
    request = comm.Iallreduce(np.ones(8, np.float32), np.empty(8, np.float32))
    print("well", flush=True)
"""


def test_blocking_and_non_blocking_operations_in_two_threads():
    done = mpiexec(2, "-c", textwrap.dedent(TOGETHER), timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["well"] * 2


def test_a_request_that_nobody_waits_for_ends_with_the_program():
    done = mpiexec(2, "-c", textwrap.dedent(FORGOTTEN), timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["well"] * 2
    assert not done.stderr

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

FREED = """
    import atexit, time
    import numpy as np

    results = [np.zeros(300_000, np.float32) for _ in range(16)]
    atexit.register(lambda: print(*(int(y.min()) for y in results), flush=True))  # after hybridcomp's own

    from mpi4py import MPI
    import hybridcomp as hc

    freed, dropped = (hc.Communicator(MPI.COMM_WORLD, "lossless") for _ in range(2))
    if MPI.COMM_WORLD.rank:
        time.sleep(0.3)
    x = np.ones_like(results[0])
    requests = [comm.Iallreduce(x, y) for comm, y in zip([dropped, *15 * [freed]], results)]
    freed.Free()
    del dropped, requests
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


def test_operations_of_a_freed_communicator_end_with_the_program():
    done = mpiexec(2, "-c", textwrap.dedent(FREED), timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2"] * 32
    assert not done.stderr

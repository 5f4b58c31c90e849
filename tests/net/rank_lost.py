"""Programs of several ranks, one of which is killed, or whose link is cut; for the tests beside it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import hybridcomp as hc

WORLD = MPI.COMM_WORLD


def say(text: str) -> None:
    """Print whole lines, even while other ranks print."""
    os.write(1, f"{text}\n".encode())


def killed(policy: str, said: str) -> None:
    """Let the last rank die in its third operation; the others, if they are not ended, write what they see to a file.

    Each writes its process's id beforehand, to ``SAID.pid.RANK``.
    """
    Path(f"{said}.pid.{WORLD.rank}").write_text(str(os.getpid()))
    comm = hc.Communicator(WORLD, policy, "dp", timeout=30.0)  # to make it may take longer on a busy machine
    comm.timeout = 2.0
    x = np.ones(2_000_000, np.float32)
    for _ in range(2):
        comm.Allreduce(MPI.IN_PLACE, x)
    began = time.monotonic()
    if WORLD.rank == 0:
        time.sleep(0.5)  # so that none completes before the last rank has died
    request = comm.Iallreduce(MPI.IN_PLACE, x)
    if WORLD.rank == WORLD.size - 1:
        time.sleep(0.05)  # its first messages leave
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        request.wait()
        text = "completed"
    except Exception as error:
        text = f"{type(error).__name__} {error}"
    whole = Path(f"{said}.{WORLD.rank}")  # then it is there with all that is in it
    whole.write_text(f"{time.monotonic() - began} {text}")
    whole.rename(Path(said, str(WORLD.rank)))
    os._exit(3)


def cut(seconds: str) -> None:
    """All-reduce while somebody cuts a link; say whether the result is right."""
    comm = hc.Communicator(WORLD, "int8:block=128", "dp", timeout=float(seconds))
    n = 4_000_000
    values = [np.random.default_rng([5, r]).standard_normal(n).astype(np.float32) for r in range(WORLD.size)]
    x = values[WORLD.rank].copy()
    comm.Barrier()
    say("started")
    began = time.monotonic()
    try:
        comm.Allreduce(MPI.IN_PLACE, x)
    except hc.HybridcompError as error:
        say(f"raised {time.monotonic() - began:.1f} {type(error).__name__} {error}")
        os._exit(0)
    want = np.sum(values, axis=0, dtype=np.float64)
    wrong = np.linalg.norm(x - want) / np.linalg.norm(want)
    say(f"{'right' if wrong < 0.02 else 'WRONG'} {time.monotonic() - began:.1f} {wrong:.4f}")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])

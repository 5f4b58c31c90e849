"""A rank dies before MPI has read its message from its memory: MPI says so once, in whatever call it is in."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hybridcomp.launcher import find_mpiexec

PROGRAM = """
import os, signal, subprocess, sys, time
import numpy as np
from mpi4py import MPI
import hybridcomp as hc
folder, way = sys.argv[1:]
comm = hc.Communicator(MPI.COMM_WORLD, "none", "dp", timeout=20)
reader = MPI.COMM_WORLD.bcast(os.getpid(), root=1)
n = 200_003
x = np.full(n, 7 if comm.rank == 0 else -1, np.float32)
if comm.rank == 0:
    MPI.COMM_WORLD.Barrier()
    os.kill(reader, signal.SIGSTOP)  # it is to find the message after this rank's death
    sent = comm.Isend(x, 1, 5) if way == "message" else comm.Ibcast(x, 0)
    time.sleep(0.3)
    subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -CONT {reader}"])
    os.kill(os.getpid(), signal.SIGKILL)
others = [comm.Irecv(np.empty(n, np.float32), 0, 6) for _ in range(3)]  # of which MPI could say it
received = comm.Irecv(x, 0, 5) if way == "message" else comm.Ibcast(x, 0)
MPI.COMM_WORLD.Barrier()
time.sleep(1)
try:
    while not others[0].done and not received.done:
        comm.Iprobe(0, 9)  # in which all are polled, in their order
    received.wait()
    said = "right" if (x == 7).all() else f"WRONG in {int((x != 7).sum())} elements"
except Exception as error:
    said = f"{type(error).__name__}: {error}"
with open(folder + "/said", "w") as file:
    file.write(said)
os._exit(0)
"""


@pytest.mark.parametrize("way", ["message", "broadcast"])
def test_what_mpi_could_not_read_is_an_error(tmp_path: Path, way: str) -> None:
    program = tmp_path / "ranks.py"
    program.write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, str(program), str(tmp_path), way]
    # A shell stays in the place of the dead rank, or the launcher would end the other.
    kept = ["sh", "-c", f"{shlex.join(command)}; sleep 5; exit 0"]
    subprocess.run(
        [find_mpiexec(), "-n", "1", *kept, ":", "-n", "1", *command],
        capture_output=True,
        timeout=60,
        check=False,
    )
    said = (tmp_path / "said").read_text(encoding="utf-8")
    assert "WRONG" not in said
    assert said == "right" or "failed" in said or "rank 0" in said, said

"""A rank's process ends once the other ranks have what it has: until then they may ask it for its progress."""

import subprocess
from pathlib import Path

import pytest

from hybridcomp.net import Lab

# Rank 0 has sent a short broadcast at once, which rank 1 takes a second later.
PROGRAM = """
import atexit, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
taken = folder / "taken"
rank = None
@atexit.register  # first, so that it runs last
def ended():
    (folder / f"ended.{rank}").write_text(str(taken.exists()))
import numpy as np
from mpi4py import MPI
import hybridcomp as hc
comm = hc.Communicator(MPI.COMM_WORLD, "none")
rank = comm.rank
if rank == 1:
    time.sleep(1)
if rank == 0 or sys.argv[2] == "takes part":
    comm.Bcast(np.ones(10), 0)
if rank == 1:
    taken.touch()
"""


@pytest.mark.lab
@pytest.mark.timeout(60)
@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("other", ["takes part", "never does"])
def test_a_rank_does_not_end_before_the_others_have_what_it_has(tmp_path: Path, other: str) -> None:
    """It does not wait for one that leaves without."""
    with Lab(2, "200mbit", kind="namespaces") as lab:
        ranks = lab.popen(
            ["python", "-c", PROGRAM, str(tmp_path), other],
            1,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            said, _ = ranks.communicate(timeout=40)
        finally:
            ranks.kill()
            ranks.wait()
    assert ranks.returncode == 0, said
    # What ranks print may be mixed.
    assert {f.name: f.read_text() for f in tmp_path.glob("ended.*")} == {"ended.0": "True", "ended.1": "True"}

"""Steps of two ranks of which it is known where their time goes, in the order of ``tests/breakdown/test_real.py``."""

import time

import numpy as np
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp import trace
from hybridcomp.codecs.lossless import LosslessCodec

LATE, SLOW, HIDING = 0.12, 0.1, 0.25
STEPS = 3  # of each kind

comm = hc.Communicator(MPI.COMM_WORLD, "none", "dp")
x, y = np.ones(60_000, np.float32), np.empty(60_000, np.float32)
encode = LosslessCodec.encode_flat


def slowly(self, src, out):
    time.sleep(SLOW)
    return encode(self, src, out)


def late() -> None:
    """Rank 1 comes late."""
    if comm.rank == 1:
        time.sleep(LATE)
    comm.Allreduce(x, y)


def slow() -> None:
    """Rank 0 encodes slowly what rank 1 waits for."""
    if comm.rank == 0:
        comm.Send(x, 1, codec="lossless")
    else:
        comm.Recv(y, 0, codec="lossless")


def hidden() -> None:
    """Ranks compute while they sum."""
    request = comm.Iallreduce(x, y, codec="int8")
    time.sleep(HIDING)
    request.wait()


LosslessCodec.encode_flat = slowly
for kind in (late, slow, hidden):
    kind()  # what is made the first time
    for _ in range(STEPS):
        comm.Barrier()
        kind()
        trace.step_ended()
    comm.Barrier()
    trace.step_ended()  # of no kind
comm.Free()

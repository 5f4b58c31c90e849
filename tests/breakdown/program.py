"""Steps of two ranks whose times are known, in the order of ``tests/breakdown/test_real.py``."""

import time

import numpy as np
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp import trace
from hybridcomp.codecs.lossless import LosslessCodec

LATE, SLOW, HIDING = 0.12, 0.1, 0.25
STEPS = 3  # steps of each kind

comm = hc.Communicator(MPI.COMM_WORLD, "none", "dp")
x, y = np.ones(60_000, np.float32), np.empty(60_000, np.float32)
encode = LosslessCodec.encode_flat


def slowly(self, src, out):
    time.sleep(SLOW)
    return encode(self, src, out)


def late() -> None:
    """Let rank 1 come late to an all-reduce."""
    if comm.rank == 1:
        time.sleep(LATE)
    comm.Allreduce(x, y)


def slow() -> None:
    """Let rank 1 wait for a message that rank 0 encodes slowly."""
    if comm.rank == 0:
        comm.Send(x, 1, codec="lossless")
    else:
        comm.Recv(y, 0, codec="lossless")


def hidden() -> None:
    """Let ranks compute while they sum."""
    request = comm.Iallreduce(x, y, codec="int8")
    time.sleep(HIDING)
    request.wait()


LosslessCodec.encode_flat = slowly
for kind in (late, slow, hidden):
    kind()  # the first run makes what later ones reuse
    for _ in range(STEPS):
        comm.Barrier()
        kind()
        trace.step_ended()
    comm.Barrier()
    trace.step_ended()  # ends a step of no kind
comm.Free()

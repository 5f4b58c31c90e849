"""Print what leaves rank 0's host in a step of FSDP2 and of DDP, over the parameters: by interface, by statistics."""

from pathlib import Path

import numpy as np
from mpi4py import MPI

import hybridcomp as hc

N = 1 << 20  # parameters, of fp32
comm = hc.Communicator(MPI.COMM_WORLD, "none", "dp")
node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
whole = np.random.default_rng(comm.rank).standard_normal(N).astype(np.float32)
part = whole[: N // comm.size].copy()
gathered = np.empty_like(whole)


def fsdp(codec: str) -> None:
    for _ in range(2):  # forward and backward
        comm.Allgather(part, gathered, codec=codec)
    comm.Reduce_scatter_block(whole, np.empty_like(part), codec=codec)


def ddp(codec: str) -> None:
    comm.Allreduce(whole, gathered, codec=codec)


def sent() -> np.ndarray:
    """Return the bytes that have left this host, by its interface and by its ranks' statistics."""
    comm.Barrier()
    (line,) = [one for one in Path("/proc/self/net/dev").read_text().splitlines() if "eth0:" in one]
    counted = np.array(sum(row.between_bytes for row in comm.stats()))
    node.Allreduce(MPI.IN_PLACE, counted)
    return np.array([int(line.split(":")[1].split()[8]), counted])


for step in fsdp, ddp:
    for codec in "none", "int8:block=128", "int4:block=128":
        step(codec)  # the first round makes the connections
        before = sent()
        step(codec)
        if comm.rank == 0:
            by_interface, by_statistics = (sent() - before) / whole.nbytes
            print(
                step.__name__, codec.partition(":")[0], f"{by_interface:.4f} {by_statistics:.4f}", flush=True
            )
        else:
            sent()
node.Free()
comm.Free()

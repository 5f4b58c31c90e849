"""All-gather by each codec, beside MPI's and gloo's; the size is the receive buffer's.

mpirun -n 4 python benchmarks/allgather.py --codec int8,int4 --size 64K:64M:8 --peer mpi,gloo
hybridcomp lab -n 4 --rate 1gbit -- python benchmarks/allgather.py --codec int8 --size 64M
"""

from __future__ import annotations

from typing import Any

from collbench.figures import Piece
from harness import WORLD, Operation, main


def pieces(rank: int, p: int, n: int) -> list[Piece]:
    """Return the pieces of a result: every rank has all ranks' data, one after the other."""
    return [Piece(n // p, ((q, 0),)) for q in range(p)]


def gloo(dist: Any, send: Any, recv: Any) -> None:
    """Call torch's all-gather by its new name, or by its old one."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    call(recv, send)


OPERATION = Operation(
    name="all_gather",
    factor=lambda p: (p - 1) / p,
    pieces=pieces,
    send=lambda n, p: n // p,
    ours=lambda comm, send, recv, **how: comm.Allgather(send, recv, **how),
    mpi=WORLD.Allgather,
    gloo=gloo,
    same_bits=True,
)


if __name__ == "__main__":
    main(OPERATION, __doc__)

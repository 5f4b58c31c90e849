"""Reduce-scatter of equal blocks by each codec, beside MPI's and gloo's; the size is the send buffer's.

mpirun -n 4 python benchmarks/reduce_scatter.py --codec int8,int4 --size 64K:64M:8 --peer mpi,gloo
hybridcomp lab -n 4 --rate 1gbit -- python benchmarks/reduce_scatter.py --codec int8 --size 64M
"""

from __future__ import annotations

from typing import Any

from collbench.figures import Piece
from harness import WORLD, Operation, main


def pieces(rank: int, p: int, n: int) -> list[Piece]:
    """Return the pieces of a result: rank r has block r of the sum of all ranks' data."""
    return [Piece(n // p, tuple((q, rank * (n // p)) for q in range(p)))]


def gloo(dist: Any, send: Any, recv: Any) -> None:
    """Call torch's reduce-scatter by its new name, or by its old one."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    call(recv, send)


OPERATION = Operation(
    name="reduce_scatter",
    factor=lambda p: (p - 1) / p,
    pieces=pieces,
    recv=lambda n, p: n // p,
    ours=lambda comm, send, recv, **how: comm.Reduce_scatter_block(send, recv, **how),
    mpi=WORLD.Reduce_scatter_block,
    gloo=gloo,
)


if __name__ == "__main__":
    main(OPERATION, __doc__)

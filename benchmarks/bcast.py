"""Broadcast from rank 0 by each codec, beside MPI's and gloo's.

mpirun -n 4 python benchmarks/bcast.py --codec int8,int4 --size 64K:64M:8 --peer mpi,gloo
hybridcomp lab -n 4 --rate 1gbit -- python benchmarks/bcast.py --codec int8 --size 64M
"""

from __future__ import annotations

from collbench.figures import Piece
from harness import WORLD, Operation, main


def pieces(rank: int, p: int, n: int) -> list[Piece]:
    """Return the pieces of a result: every rank has rank 0's data."""
    return [Piece(n, ((0, 0),))]


OPERATION = Operation(
    name="broadcast",
    factor=lambda p: 1.0,
    pieces=pieces,
    ours=lambda comm, _, recv, **how: comm.Bcast(recv, 0, **how),
    mpi=lambda _, recv: WORLD.Bcast(recv, 0),
    gloo=lambda dist, _, recv: dist.broadcast(recv, 0),
    in_place=frozenset({"ours", "mpi", "gloo"}),
    same_bits=True,
)


if __name__ == "__main__":
    main(OPERATION, __doc__)

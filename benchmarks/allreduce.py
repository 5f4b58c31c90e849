"""All-reduce by each codec, beside MPI's and gloo's in the same run.

mpirun -n 4 python benchmarks/allreduce.py --codec int8,int4 --size 64K:64M:8 --peer mpi,gloo
hybridcomp lab -n 4 --rate 1gbit -- python benchmarks/allreduce.py --codec int8 --size 64M
"""

from __future__ import annotations

from collbench.figures import Piece
from harness import WORLD, Operation, main


def pieces(rank: int, p: int, n: int) -> list[Piece]:
    """Return the pieces of a result: every rank has the sum of all ranks' data."""
    return [Piece(n, tuple((q, 0) for q in range(p)))]


OPERATION = Operation(
    name="all_reduce",
    factor=lambda p: 2 * (p - 1) / p,
    pieces=pieces,
    ours=lambda comm, send, recv, **how: comm.Allreduce(send, recv, **how),
    mpi=WORLD.Allreduce,
    gloo=lambda dist, _, recv: dist.all_reduce(recv),
    in_place=frozenset({"gloo"}),
    same_bits=True,
)


if __name__ == "__main__":
    main(OPERATION, __doc__)

"""All-to-all of equal parts by each codec, beside MPI's and gloo's; the size is one rank's send buffer's.

mpirun -n 4 python benchmarks/alltoall.py --codec int8,int4 --size 64K:64M:8 --peer mpi,gloo
hybridcomp lab -n 4 --rate 1gbit -- python benchmarks/alltoall.py --codec int8 --size 64M
"""

from __future__ import annotations

from collbench.figures import Piece
from harness import WORLD, Operation, main


def pieces(rank: int, p: int, n: int) -> list[Piece]:
    """Return the pieces of a result: rank r has part r of every rank's data."""
    return [Piece(n // p, ((q, rank * (n // p)),)) for q in range(p)]


OPERATION = Operation(
    name="all_to_all",
    factor=lambda p: (p - 1) / p,
    pieces=pieces,
    ours=lambda comm, send, recv, **how: comm.Alltoall(send, recv, **how),
    mpi=WORLD.Alltoall,
    gloo=lambda dist, send, recv: dist.all_to_all_single(recv, send),
)


if __name__ == "__main__":
    main(OPERATION, __doc__)

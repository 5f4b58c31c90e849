"""Every rank sends to the next and receives from the one before, by each codec, beside MPI's and gloo's.

mpirun -n 4 python benchmarks/sendrecv.py --codec int8,int4 --size 64K:64M:8 --peer mpi,gloo
hybridcomp lab -n 4 --rate 1gbit -- python benchmarks/sendrecv.py --codec int8 --size 64M
"""

from __future__ import annotations

from typing import Any

from collbench.figures import Piece
from harness import WORLD, Operation, main

NEXT, BEFORE = (WORLD.rank + 1) % WORLD.size, (WORLD.rank - 1) % WORLD.size


def pieces(rank: int, p: int, n: int) -> list[Piece]:
    """Return the pieces of a result: every rank has the data of the rank before it."""
    return [Piece(n, (((rank - 1) % p, 0),))]


def ours(comm: Any, send: Any, recv: Any, codec: str) -> None:
    """Send and receive at once."""
    sending = comm.Isend(send, NEXT, codec=codec)
    comm.Recv(recv, BEFORE, codec=codec)
    sending.wait()


def gloo(dist: Any, send: Any, recv: Any) -> None:
    """Send and receive at once."""
    sending = dist.isend(send, NEXT)
    dist.recv(recv, BEFORE)
    sending.wait()


OPERATION = Operation(
    name="sendrecv",
    factor=lambda p: 1.0,
    pieces=pieces,
    ours=ours,
    mpi=lambda send, recv: WORLD.Sendrecv(send, NEXT, recvbuf=recv, source=BEFORE),
    gloo=gloo,
    least=2,
)


if __name__ == "__main__":
    main(OPERATION, __doc__)

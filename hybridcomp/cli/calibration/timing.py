"""Time collectives on the ranks of a communicator, each from a barrier until the slowest rank has its result."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from hybridcomp import variables
from hybridcomp.cli.calibration.ranks import TIMEOUT, gathered
from hybridcomp.collectives import Communicator

_ELEMENT = 4  # bytes
_LEAST, _MOST = 5, 60  # repetitions
_FEW = 2  # repetitions of an operation that alone takes longer than all together should
_TAG = 1


class Prepared(NamedTuple):
    """Operation that can be repeated.

    Attributes:
        call: runs the operation once.
        result: array that receives the result.
        nbytes: bytes of the array that is summed or sent; of all ranks' blocks together where each rank has one.
    """

    call: Callable[[], Any]
    result: npt.NDArray[np.float32]
    nbytes: int


class Repeated(NamedTuple):
    """Times of an operation's repetitions.

    Attributes:
        seconds: slowest rank's seconds for each repetition; the same on all ranks.
        busy: seconds of this process's processor for one repetition.
    """

    seconds: list[float]
    busy: float


def communicator(comm: MPI.Comm, chunk: int, algorithms: Mapping[str, str] | None = None) -> Communicator:
    """Make a communicator that compresses nothing unless a call says so. Collective.

    Args:
        comm: MPI communicator with the ranks.
        chunk: uncompressed bytes of a message.
        algorithms: algorithm of each operation; without it they are chosen.
    """
    forced = ",".join(f"{op}={name}" for op, name in (algorithms or {}).items())
    with _environment({variables.CHUNK_BYTES.name: str(chunk), variables.ALGORITHM.name: forced}):
        return Communicator(comm, "none", "calibration", timeout=TIMEOUT)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def prepared(comm: Communicator, op: str, nbytes: int, codec: str, reduction: MPI.Op = MPI.SUM) -> Prepared:
    """Prepare an operation on Gaussian fp32 values; a ``send`` is from rank 0 to the rank in the middle.

    Args:
        comm: communicator of the ranks.
        op: operation, as the cost model names it.
        nbytes: bytes, about: each rank's part has equally many elements, at least one.
        codec: spec of the codec.
        reduction: reduction of an all-reduce.
    """
    p = comm.size
    each = max(1, nbytes // _ELEMENT // p)
    n = each * p
    data = np.random.default_rng(comm.rank).standard_normal(n, np.float32)
    whole, part = np.empty(n, np.float32), np.empty(each, np.float32)
    shard = data[:each].copy()
    peer = p // 2  # a rank of another host, if there is one

    def send() -> None:
        if comm.rank == 0:
            comm.Send(data, peer, _TAG, codec=codec)
        elif comm.rank == peer:
            comm.Recv(whole, 0, _TAG)

    calls: dict[str, tuple[Callable[[], Any], npt.NDArray[np.float32]]] = {
        "all_reduce": (lambda: comm.Allreduce(data, whole, reduction, codec=codec), whole),
        "reduce_scatter": (lambda: comm.Reduce_scatter_block(data, part, codec=codec), part),
        "all_gather": (lambda: comm.Allgather(shard, whole, codec=codec), whole),
        "broadcast": (lambda: comm.Bcast(data, 0, codec=codec), data),
        "reduce": (lambda: comm.Reduce(data, whole, root=0, codec=codec), whole),
        "all_to_all": (lambda: comm.Alltoall(data, whole, codec=codec), whole),
        "send": (send, whole),
    }
    return Prepared(*calls[op], n * _ELEMENT)


def repeat(world: MPI.Comm, comm: Communicator, call: Callable[[], Any], seconds: float) -> Repeated:
    """Repeat an operation that all ranks have done once, for about so many seconds. Collective.

    Args:
        world: communicator that nobody else uses.
        comm: communicator of the same ranks.
        call: runs the operation.
        seconds: seconds in all: 5 to 60 repetitions, or 2 where one takes longer.
    """
    begin = time.perf_counter()
    call()
    once = max(gathered(world, [time.perf_counter() - begin])[0])
    count = _FEW if once > seconds else int(min(max(seconds / once, _LEAST), _MOST))
    taken = []
    busy = time.process_time()
    for _ in range(count):
        comm.Barrier()  # ours, which sleeps: MPI's takes the cores from ranks that have not ended yet
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    busy = (time.process_time() - busy) / count
    return Repeated([max(column) for column in gathered(world, taken)], busy)

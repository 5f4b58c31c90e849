"""Algorithms on a device's memory: the bits that they give in the host's, and the algorithms that go there."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from hybridcomp.arrays import flatten
from hybridcomp.collectives.algorithms import selection as choosing
from hybridcomp.collectives.choices import OperationOptions
from hybridcomp.collectives.operations.flat_reductions import reduce
from tests.mpi.device.devices import RANK, SIZE, agrees, both, empty, values

pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    # Whether a device runs an algorithm as the host does depends little on the number of ranks.
    pytest.mark.ranks(least=3, most=3),
]
KNOWN, UNKNOWN = "int8", "topk:ratio=0.05"  # the length of a message, before it is encoded


@pytest.fixture(autouse=True)
def many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "chunk_bytes", lambda *_: 4_000)


@pytest.mark.parametrize(
    ("algorithm", "codec"), [("ring", UNKNOWN), ("halving", UNKNOWN), ("halving", KNOWN)]
)
def test_reductions(make, way, algorithm, codec):
    comm = make(codec)
    for n, dtype in ((0, "float32"), (1, "float32"), (5_003, "float16")):
        x, y = both(values(n, dtype), dtype)
        out, want = empty(n, dtype)
        comm.Allreduce(x, out, algorithm=algorithm)
        comm.Allreduce(y, want, algorithm=algorithm)
        agrees(out, want, f"{n} {dtype}")
        comm.Allreduce(MPI.IN_PLACE, x, "avg", algorithm=algorithm)
        comm.Allreduce(MPI.IN_PLACE, y, "avg", algorithm=algorithm)
        agrees(x, y, f"average of {n} {dtype} in place")
        x, y = both(values(n * SIZE, dtype), dtype)
        comm.Reduce_scatter_block(x, out, algorithm=algorithm)
        comm.Reduce_scatter_block(y, want, algorithm=algorithm)
        agrees(out, want, f"blocks of {n} {dtype}")


@pytest.mark.parametrize(("algorithm", "codec"), [("ring", KNOWN), ("doubling", UNKNOWN)])
def test_all_gather(make, way, algorithm, codec):
    comm = make(codec)
    for n in (0, 3, 2_501):
        x, y = both(values(n, "float32"), "float32")
        out, want = empty(n * SIZE, "float32")
        comm.Allgather(x, out, algorithm=algorithm)
        comm.Allgather(y, want, algorithm=algorithm)
        agrees(out, want, f"{n}")


def test_rooted(make, way):
    comm = make(UNKNOWN)
    root = SIZE - 1
    for n in (0, 3, 5_003):
        for algorithm in ("direct", "scatter"):
            x, y = both(values(n, "float32"), "float32")
            comm.Bcast(x, root, algorithm=algorithm)
            comm.Bcast(y, root, algorithm=algorithm)
            agrees(x, y, f"broadcast of {n} by {algorithm}")
        for algorithm in ("direct", "tree"):
            x, y = both(values(n, "float32"), "float32")
            out, want = empty(n, "float32")
            for send, recv in ((x, out), (y, want)):
                given = flatten(recv, writable=True, device=True) if root == RANK else None
                options = OperationOptions(algorithm=algorithm)
                reduce(comm.session, flatten(send, device=True), given, "avg", root, options).wait()
            agrees(out, want, f"reduction of {n} by {algorithm}")

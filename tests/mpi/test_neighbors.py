"""Collectives among the neighbours of a topology, against those of plain mpi4py."""

from __future__ import annotations

import time

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.errors import RemoteError
from tests.mpi.conftest import WORLD, gaussian, verdict

P, ME = WORLD.size, WORLD.rank
POLICIES = ["none", "int8:block=64", "lossless", "bounded:abs=1e-3"]
N = 3000


def graph() -> MPI.Distgraphcomm:
    """Make a graph with several edges between the same ranks, and different numbers of neighbours."""
    edges = [(a, (a + 1) % P) for a in range(P)] * 2 + [(0, 0), (0, P - 1)] + [(P - 1, 0)] * 3
    ins, outs = [a for a, b in edges if b == ME], [b for a, b in edges if a == ME]
    return WORLD.Create_dist_graph_adjacent(ins, outs)


TOPOLOGIES = {
    "closed": lambda: WORLD.Create_cart([P], [True]),
    "open": lambda: WORLD.Create_cart([P], [False]),
    "grid": lambda: WORLD.Create_cart([1, P, 1], [True, True, False]),
    "graph": lambda: WORLD.Create_graph(
        [*range(2, 2 * P + 1, 2)], [(r + d) % P for r in range(P) for d in (1, -1)]
    ),
    "dist_graph": graph,
}


def near(got: np.ndarray, want: np.ndarray) -> bool:
    return bool(np.abs(got.astype(np.float64) - want).max(initial=0) < 0.1)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("policy", POLICIES)
def test_neighbours_get_what_they_get_from_plain_mpi(topology, policy):
    plain = TOPOLOGIES[topology]()
    comm = hc.Communicator(plain, policy, timeout=30)
    ins, outs = plain.inoutedges

    def same(op: str, send, recv) -> None:
        """Compare one operation, blocking and not; ``recv`` makes a buffer, and tells its array."""
        results = []
        for one, begins in (plain, False), (comm, False), (comm, True):
            spec, array = recv()
            if begins:
                getattr(one, f"Ineighbor_{op}")(send, spec).Wait()
            else:
                getattr(one, f"Neighbor_{op}")(send, spec)
            results.append(array)
        verdict(near(results[1], results[0]), f"{op}: {results[0][:4]} {results[1][:4]}")
        verdict(results[1].tobytes() == results[2].tobytes(), f"I{op}")

    def room(n: int, dtype=np.float32):
        array = np.full(n, 7, dtype)
        return array, array

    x = gaussian(N, ME)
    many = gaussian(N * len(outs), ME)
    same("allgather", x, lambda: room(N * len(ins)))
    same("alltoall", many, lambda: room(N * len(ins)))
    same("alltoall", many.astype(np.int32), lambda: room(N * len(ins), np.int32))
    compressed = [row.codec for row in comm.stats() if row.op.startswith("neighbor")]
    verdict(policy == "none" or any(codec != "none" for codec in compressed) or P == 1, compressed)
    # The j-th block from a rank is its j-th to this one: all blocks have sizes of their own, which the ends know.
    sizes = [100 + 7 * q for q in range(P)]
    counts = [0 if q == MPI.PROC_NULL else sizes[q] for q in ins]

    def gaps():
        starts = [sum(counts[:j]) + 3 * j for j in range(len(counts))]
        array = np.full(sum(counts) + 3 * len(counts) + 1, 7, np.float32)
        return [array, (np.array(counts), starts), MPI.FLOAT], array

    same("allgatherv", x[: sizes[ME]], gaps)
    same("alltoallv", [many, [sizes[ME]] * len(outs)], gaps)
    comm.Free()
    plain.Free()


@pytest.mark.ranks(least=2)
@pytest.mark.parametrize("policy", ["none", "int8:block=64"])
@pytest.mark.parametrize("call", ["allgather", "alltoall", "allgatherv", "alltoallv"])
def test_wrong_arguments_on_one_rank_reach_all(policy, call):
    plain = WORLD.Create_cart([P], [True])
    comm = hc.Communicator(plain, policy, timeout=30)
    send = [np.zeros(200, np.float32), [100, 100]] if call == "alltoallv" else np.zeros(200, np.float32)
    recv = [np.zeros(400, np.float32), [200, 200]]
    if call == "alltoallv":
        recv = [np.zeros(200, np.float32), [100, 100]]
    elif call == "alltoall":
        recv = np.zeros(200, np.float32)
    elif call == "allgather":
        recv = np.zeros(400, np.float32)
    began = time.monotonic()
    wrong = "no buffer" if ME == P - 1 else recv
    caught: Exception | None = None
    try:
        getattr(comm, f"Neighbor_{call}")(send, wrong)
    except Exception as error:
        caught = error
    seconds = time.monotonic() - began
    if P - 1 in plain.inoutedges[0]:
        good = isinstance(caught, RemoteError)
    elif ME == P - 1:
        good = caught is not None and not isinstance(caught, RemoteError)
    else:  # it may have ended before it was told
        good = caught is None or isinstance(caught, RemoteError)
    verdict(good, repr(caught))
    verdict(seconds < 10, seconds)


def test_blocks_of_any_datatype_go_by_mpi():
    comm = hc.Communicator(WORLD.Create_cart([P], [True]), "int8:block=64", timeout=30)
    send, recv = np.full(2, ME, np.int32), np.empty(2, np.int32)
    for begin in False, True:
        arguments = ([send, [1, 1], [0, 4], [MPI.INT] * 2], [recv, [1, 1], [0, 4], [MPI.INT] * 2])
        if begin:
            comm.Ineighbor_alltoallw(*arguments).Wait()
        else:
            comm.Neighbor_alltoallw(*arguments)
        verdict(recv.tolist() == [(ME - 1) % P, (ME + 1) % P])


class Subclass(np.ndarray):
    """Array that compiled code does not know."""


@pytest.mark.parametrize("policy", ["none", "int8:block=64"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_ranks_may_spell_a_buffer_unlike_each_other(policy, dtype):
    """The first rank's buffers are read by this package alone, the others' are of a derived datatype."""
    try:
        basic = MPI.Datatype.fromcode(np.dtype(dtype).char)
    except (KeyError, ValueError):
        return  # Open MPI has no float16
    comm = hc.Communicator(WORLD.Create_cart([P], [True]), policy, timeout=20)
    every_second = basic.Create_vector(N, 1, 2).Create_resized(0, 2 * N * basic.Get_size()).Commit()

    def room(blocks: int):
        if ME == 0:
            array = np.zeros(blocks * N, dtype).view(Subclass)
            return array, [array, [N] * blocks, basic], [array, N, basic], array
        array = np.zeros(2 * blocks * N, dtype)
        return array[::2], [array, [1] * blocks, every_second], [array, 1, every_second], array

    for op in "allgather", "alltoall":
        for begins in "Neighbor_", "Ineighbor_":
            sent, parts, block, _ = room(2 if op == "alltoall" else 1)
            sent[:] = np.arange(sent.size) % 100 + ME
            got, into, each, _ = room(2)
            for vector in False, True:
                got[:] = 0
                method = getattr(comm, f"{begins}{op}{'v' if vector else ''}")
                request = method(parts if vector and op == "alltoall" else block, into if vector else each)
                if request is not None:
                    request.Wait()
                own = np.arange(got.size) % N % 100
                if op == "alltoall":  # what goes left comes from the right
                    own = (np.arange(got.size) + N) % (2 * N) % 100
                want = own + np.repeat([(ME - 1) % P, (ME + 1) % P], N)
                verdict(
                    near(got, want) or (policy != "none" and bool(np.abs(got - want).max() < 2)),
                    f"{begins}{op}",
                )
    comm.Free()


def test_small_blocks_of_any_size_stay_exact():
    comm = hc.Communicator(WORLD.Create_cart([P], [True]), "int8", timeout=20)
    values, got = gaussian(2, ME), np.zeros(4, np.float32)
    comm.Neighbor_allgatherv(values, [got, [2, 2]])
    verdict(got.tolist() == [*gaussian(2, (ME - 1) % P), *gaussian(2, (ME + 1) % P)])
    comm.Neighbor_alltoallv([np.concatenate([values, values]), [2, 2]], [got, [2, 2]])
    verdict(got.tolist() == [*gaussian(2, (ME - 1) % P), *gaussian(2, (ME + 1) % P)])

"""Persistent requests, where the policy compresses and where it does not, against those of plain mpi4py."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from hybridcomp.collectives.operations.prequests import Prequest
from tests.mpi.conftest import WORLD, gaussian, verdict

P, ME = WORLD.size, WORLD.rank
POLICIES = ["none", "int8:block=64", "bounded:abs=1e-3"]
RIGHT, LEFT = (ME + 1) % P, (ME - 1) % P
N = 4000

pytestmark = pytest.mark.ranks(least=2)


def near(got: np.ndarray, want: np.ndarray) -> bool:
    return bool(np.abs(got - want).max(initial=0) < 0.05 * P)


def encoded(comm, op: str) -> bool:
    return any(row.op == op and row.codec != "none" for row in comm.stats())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("send", ["Send_init", "Ssend_init", "Bsend_init", "Rsend_init"])
def test_persistent_messages_are_those_of_sends_and_receives(make, policy, send):
    comm = make(policy)
    buffered = send == "Bsend_init"
    if buffered:
        MPI.Attach_buffer(bytearray(1 << 20))
    x, got = np.empty(N, np.float32), np.empty(N + 5, np.float32)
    receive = comm.Recv_init(got, LEFT, 3)
    sends = getattr(comm, send)(x, RIGHT, 3)
    ours = isinstance(receive, Prequest), isinstance(sends, Prequest)
    verdict(ours == ((policy != "none"),) * 2 and isinstance(sends, MPI.Prequest))
    receive.Wait()  # it has not been started
    for k in range(5):
        x[:], got[:] = gaussian(N, ME + k), 7
        status = MPI.Status()
        if k == 0:
            Prequest.Startall([receive])
            WORLD.Barrier()  # for Rsend
            Prequest.Startall([sends])
            MPI.Request.Waitall([receive, sends])
        elif k == 1:  # with a blocking send
            receive.Start()
            comm.Send(x, RIGHT, 3)
            receive.Wait(status)
        elif k == 2 and send != "Rsend_init":  # with a blocking receive
            sends.Start()
            comm.Recv(got, LEFT, 3, status)
            sends.Wait()
        else:
            receive.Start()
            WORLD.Barrier()
            sends.Start()
            while not receive.Test(status):
                pass
            sends.Wait()
        if k:
            verdict((status.Get_source(), status.Get_tag(), status.Get_count(MPI.FLOAT)) == (LEFT, 3, N))
        verdict(near(got[:N], gaussian(N, LEFT + k)) and bool((got[N:] == 7).all()), f"start {k}")
    verdict(policy == "none" or encoded(comm, "send"))
    with pytest.raises(MPI.Exception):
        comm.Send_init(x, P + 7)
    if policy != "none":
        receive.Start()
        with pytest.raises(MPI.Exception):  # it is under way
            receive.Start()
        receive.Cancel()
        status = MPI.Status()
        receive.Wait(status)
        verdict(status.Is_cancelled())
    for request in receive, sends:
        request.Free()
        if policy != "none":
            with pytest.raises(MPI.Exception):
                request.Start()
    if buffered:
        MPI.Detach_buffer()


def test_small_persistent_operations_of_a_policy_that_compresses_are_mpis_while_under_way(make):
    comm = make("exact")  # which leaves them as they are
    mine, all_of_them, got = np.full(2, ME, np.float32), np.zeros(2 * P, np.float32), np.zeros(2, np.float32)
    gather, receive = comm.Allgather_init(mine, all_of_them), comm.Recv_init(got, LEFT, 3)
    send = comm.Send_init(mine, RIGHT, 3)
    for k in range(6):
        mine[:], all_of_them[:], got[:] = ME + k, -1, -1
        requests = [gather, receive, send]
        Prequest.Startall(requests)
        verdict(gather._running.passed and gather.handle == gather._running.handle)
        with pytest.raises(MPI.Exception):  # it is under way
            gather.Start()
        if k % 3 == 0:
            MPI.Request.Waitall(requests)
            if k:
                for request in requests:
                    request.Wait()  # which has nothing to wait for
        elif k % 3 == 1:
            for request in requests:
                request.Wait()
        else:
            for request in requests:
                while not request.Test():
                    pass
        verdict(all(request.handle == MPI.REQUEST_NULL.handle for request in requests))
        verdict(
            all_of_them.tolist() == [r + k for r in range(P) for _ in range(2)]
            and got.tolist() == [LEFT + k] * 2
        )
    gather.Start()
    gather.Free()  # it goes on
    receive.Start()
    receive.Cancel()
    status = MPI.Status()
    receive.Wait(status)
    verdict(status.Is_cancelled())
    for request in receive, send:
        request.Free()
    comm.Barrier()


@pytest.mark.parametrize("policy", POLICIES)
def test_persistent_collectives_give_what_those_of_plain_mpi_give(make, policy):
    comm, root = make(policy), P - 1
    at_root = root == ME
    x, many = gaussian(N, ME), gaussian(N * P, ME)
    counts = [N - 3 * q for q in range(P)]
    room = sum(counts)

    def of(n: int, given=None):
        return np.zeros(n, np.float32) if given is None else given.copy()

    places, floats = [4 * N * q for q in range(P)], [MPI.FLOAT] * P
    # name, what makes its arguments and tells the result
    calls = {
        "Scan": (lambda r: (x, r, MPI.SUM), lambda: of(N)),
        "Exscan": (lambda r: (x, r), lambda: of(N)),
        "Alltoallw": (
            lambda r: ([many, [N] * P, places, floats], [r, [N] * P, places, floats]),
            lambda: of(N * P),
        ),
        "Allreduce": (lambda r: (x, r), lambda: of(N)),
        "Allreduce in place": (lambda r: (MPI.IN_PLACE, r, MPI.SUM), lambda: of(N, x)),
        "Reduce": (lambda r: (x, r if at_root else None, MPI.SUM, root), lambda: of(N)),
        "Reduce_scatter_block": (lambda r: (many, r), lambda: of(N)),
        "Reduce_scatter": (lambda r: (many[:room], r, counts), lambda: of(counts[ME])),
        "Allgather": (lambda r: (x, r), lambda: of(N * P)),
        "Allgatherv": (lambda r: (x[: counts[ME]], [r, counts]), lambda: of(room)),
        "Alltoall": (lambda r: (many, r), lambda: of(N * P)),
        "Alltoallv": (lambda r: ([many, [counts[ME]] * P], [r, counts]), lambda: of(room)),
        "Bcast": (lambda r: (r, root), lambda: of(N, x)),
        "Gather": (lambda r: (x, r if at_root else None, root), lambda: of(N * P)),
        "Gatherv": (
            lambda r: (x[: counts[ME]], [r, counts] if at_root else None, root),
            lambda: of(room),
        ),
        "Scatter": (lambda r: (many if at_root else None, r, root), lambda: of(N)),
        "Scatterv": (
            lambda r: ([many, counts] if at_root else None, r, root),
            lambda: of(counts[ME]),
        ),
    }
    for name, (arguments, make_room) in calls.items():
        method, results = f"{name.split()[0]}_init", []
        for one in WORLD, comm:
            result = make_room()
            begun = result.copy()
            request = getattr(one, method)(*arguments(result))
            for _ in range(2):
                result[:] = begun
                request.Start()
                request.Wait()
            verdict(isinstance(request, Prequest) == (one is comm), name)
            request.Free()
            results.append(result)
        verdict(near(results[1], results[0]), name)
    verdict(policy == "none" or all(encoded(comm, op) for op in ("all_reduce", "all_gather", "all_to_all")))


@pytest.mark.parametrize("policy", POLICIES)
def test_persistent_collectives_of_neighbours(make, policy):
    cart, plain = make(policy).Create_cart([P], [True]), WORLD.Create_cart([P], [True])
    x, many = gaussian(N, ME), gaussian(2 * N, ME)
    for name, send, spec in (
        ("allgather", x, lambda r: r),
        ("alltoall", many, lambda r: r),
        ("allgatherv", x, lambda r: [r, [N, N]]),
        ("alltoallv", [many, [N, N]], lambda r: [r, [N, N]]),
    ):
        wanted = np.zeros(2 * N, np.float32)
        getattr(plain, f"Neighbor_{name}")(send, spec(wanted))  # Open MPI's persistent one has another order
        result = np.zeros(2 * N, np.float32)
        request = getattr(cart, f"Neighbor_{name}_init")(send, spec(result))
        for _ in range(2):
            result[:] = 0
            request.Start()
            request.Wait()
        request.Free()
        verdict(near(result, wanted), name)
    verdict(policy == "none" or encoded(cart, "neighbor_allgather"))
    cart.Free()
    plain.Free()

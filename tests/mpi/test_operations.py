"""The operations that gather, scatter and reduce parts of any size, and what programs of mpi4py's expect."""

from __future__ import annotations

import time

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.codecs import get_codec
from hybridcomp.errors import CodecMismatchError, CollectiveTimeoutError, MismatchError, WireError
from tests.calls import python_calls
from tests.mpi.conftest import WORLD, gaussian, identical, relative_error, total, verdict

CODECS = {"none": 1e-6, "lossless": 1e-6, "int8": 0.02}
P, ME = WORLD.size, WORLD.rank
COUNTS = [[1000, 0, 70_001, 1, 300_007][r] for r in range(P)]
STARTS = [sum(COUNTS[:r]) + 3 * r for r in range(P)]  # with gaps
ROOM = sum(COUNTS) + 3 * P


def parts() -> list[np.ndarray]:
    return [gaussian(COUNTS[r], r) for r in range(P)]


def laid_out() -> np.ndarray:
    want = np.full(ROOM, 7, np.float32)
    for start, part in zip(STARTS, parts(), strict=True):
        want[start : start + part.size] = part
    return want


def near(got: np.ndarray, want: np.ndarray, tolerance: float) -> bool:
    return relative_error(got, want.astype(np.float64)) < tolerance


@pytest.mark.parametrize("codec", CODECS)
def test_allgatherv(make, codec):
    comm = make(codec)
    got = np.full(ROOM, 7, np.float32)
    comm.Allgatherv(gaussian(COUNTS[ME]), [got, (COUNTS, STARTS), MPI.FLOAT])
    verdict(identical(got), "different bits")
    verdict(near(got, laid_out(), CODECS[codec]))
    again = np.full(ROOM, 7, np.float32)
    again[STARTS[ME] : STARTS[ME] + COUNTS[ME]] = gaussian(COUNTS[ME])
    comm.Allgatherv(MPI.IN_PLACE, [again, (COUNTS, STARTS)])
    verdict(again.tobytes() == got.tobytes(), "in place")


@pytest.mark.parametrize("codec", CODECS)
def test_gatherv_and_scatterv(make, codec):
    comm = make(codec)
    root = P - 1
    got = np.full(ROOM, 7, np.float32)
    comm.Gatherv(gaussian(COUNTS[ME]), [got, (COUNTS, STARTS)] if root == ME else None, root)
    verdict(near(got, laid_out() if root == ME else np.full(ROOM, 7), CODECS[codec]))
    mine = np.empty(COUNTS[ME], np.float32)
    comm.Scatterv([laid_out(), (COUNTS, STARTS)] if root == ME else None, mine, root)
    verdict(near(mine, gaussian(COUNTS[ME]), CODECS[codec]))
    if root == ME:
        exact = laid_out()
        comm.Gatherv(MPI.IN_PLACE, [exact, (COUNTS, STARTS)], root)
        own = slice(STARTS[root], STARTS[root] + COUNTS[root])
        verdict(exact[own].tobytes() == gaussian(COUNTS[root]).tobytes(), "a rank's own part is exact")
    else:
        comm.Gatherv(gaussian(COUNTS[ME]), None, root)
        verdict(True)


@pytest.mark.parametrize("codec", CODECS)
def test_gather_and_scatter(make, codec):
    comm = make(codec)
    n = 300_001
    every = np.empty((P, n), np.float32) if ME == 0 else None
    comm.Gather(gaussian(n), every, 0)
    want = np.stack([gaussian(n, r) for r in range(P)])
    verdict(ME != 0 or near(every, want, CODECS[codec]))
    mine = np.empty(n, np.float32)
    comm.Scatter(want if ME == 0 else None, mine)
    verdict(near(mine, gaussian(n), CODECS[codec]))
    used = {row.codec for row in comm.stats()}
    verdict(P == 1 or used == {hc.get_codec(codec).spec})


@pytest.mark.parametrize("kind", ["sum", "max", "avg"])
@pytest.mark.parametrize("codec", CODECS)
def test_reduce_scatter(make, codec, kind):
    comm = make(codec)
    op = {"sum": MPI.SUM, "max": MPI.MAX, "avg": "avg"}[kind]
    n = sum(COUNTS)
    got = np.empty(COUNTS[ME], np.float32)
    comm.Reduce_scatter(gaussian(n), got, COUNTS, op)
    want = {
        "sum": total(n),
        "avg": total(n) / P,
        "max": np.max([gaussian(n, r) for r in range(P)], axis=0).astype(np.float64),
    }[kind]
    start = sum(COUNTS[:ME])
    verdict(
        relative_error(got, want[start : start + COUNTS[ME]]) < CODECS[codec] * (50 if COUNTS[ME] < 9 else 3)
    )
    unasked = np.empty(COUNTS[ME], np.float32)
    comm.Reduce_scatter(gaussian(n), unasked, op=op)  # the ranks tell each other their counts
    verdict(unasked.tobytes() == got.tobytes())
    here = gaussian(n)
    comm.Reduce_scatter(MPI.IN_PLACE, here, COUNTS, op)
    verdict(here[: COUNTS[ME]].tobytes() == got.tobytes(), "in place")


@pytest.mark.parametrize("codec", CODECS)
def test_sendrecv(make, codec):
    comm = make(codec)
    right, left, n = (ME + 1) % P, (ME - 1) % P, 70_003
    got, status = np.zeros(n + 5, np.float32), MPI.Status()
    comm.Sendrecv(gaussian(n), right, 4, got, left, 4, status)
    verdict(near(got[:n], gaussian(n, left), CODECS[codec]) and not got[n:].any())
    verdict((status.source, status.tag, status.Get_count(MPI.FLOAT)) == (left, 4, n))
    x = gaussian(n)
    request = comm.Isendrecv_replace(x, right, 5, left, 5)
    request.wait()
    verdict(x.tobytes() == got[:n].tobytes() and request.status.Get_source() == left)


@pytest.mark.parametrize("codec", CODECS)
def test_arrays_of_unknown_length(make, codec):
    comm = make(codec)
    right, left = (ME + 1) % P, (ME - 1) % P
    for n, dtype in ((0, "float32"), (70_001, "float32"), (5, "int64"), (3, "complex128")):
        request = comm.Isend_array(gaussian(n + ME).astype(dtype), right, 8)
        status = MPI.Status()
        got = comm.Recv_array(left, 8, status)
        request.wait()
        want = gaussian(n + left, left).astype(dtype)
        verdict(
            got.dtype == want.dtype and got.size == want.size == status.Get_count(MPI.BYTE) // got.itemsize
        )
        verdict(near(np.abs(got), np.abs(want), CODECS[codec] * 3))
    request = comm.Isend_array(np.ones(1000), right, 9)
    with pytest.raises(MismatchError):
        comm.Recv_array(left, 9, most_bytes=100)
    request.wait()
    plain = comm.session.p2p.Isend(np.ones(9), right, 10)
    with pytest.raises(WireError):
        comm.Recv_array(left, 10)
    plain.Wait()
    verdict(True)


def test_nothing_to_receive_is_late_by_name(make):
    comm = make("none", timeout=0.3)
    with pytest.raises(CollectiveTimeoutError, match="a message"):
        comm.Recv_array((ME + 1) % P, 3)
    with pytest.raises(CollectiveTimeoutError, match="probe"):
        comm.Probe((ME + 1) % P, 3)
    verdict(True)


def test_requests_are_mpis(make):
    comm = make("int8")
    x, y, z = gaussian(70_001), np.empty(70_001, np.float32), np.empty(70_001, np.float32)
    requests = [comm.Iallreduce(x, y), comm.Iallreduce(x, z, codec="none"), comm.Ibarrier()]
    verdict(all(requests) and isinstance(requests[0], MPI.Request))
    MPI.Request.Waitall(requests)
    verdict(not any(requests) and relative_error(y, total(70_001)) < 0.02)
    statuses = [MPI.Status(), MPI.Status()]
    pair = [comm.Isend(x, (ME + 1) % P, 6), comm.Irecv(z, (ME - 1) % P, 6)]
    MPI.Request.Waitall(pair, statuses)
    verdict((statuses[1].source, statuses[1].tag) == ((ME - 1) % P, 6))
    request = comm.Irecv(z, MPI.ANY_SOURCE, 77)
    verdict(not request.Test() and request.cancel())
    request.wait(5)
    verdict(request.done and request.status.Is_cancelled())


def test_what_only_mpi_understands(make):
    comm = make("int8")
    column = MPI.FLOAT.Create_vector(100, 1, 2).Commit()
    x = np.zeros(200, np.float32)
    if ME == 0:
        x[::2] = np.arange(100)
    comm.Bcast([x, 1, column], 0)
    column.Free()
    verdict(float(np.abs(x[::2] - np.arange(100)).max()) < 1 and not x[1::2].any(), "it is compressed, too")
    longs, got = np.ones(5, np.longdouble), np.zeros(5, np.longdouble)
    comm.Allreduce(longs, got)
    verdict(bool((got == P).all()))
    comm.Scan(np.ones(3), scanned := np.zeros(3))
    verdict(scanned.tolist() == [ME + 1.0] * 3)
    with pytest.raises(CodecMismatchError):
        comm.Allreduce(longs, got, codec="int8")
    with pytest.raises(MPI.Exception):
        comm.Bcast(x, P + 3)
    with pytest.raises(AttributeError, match="allreduce_of"):
        comm.allreduce_of  # noqa: B018
    verdict(comm.Get_group().Get_size() == P and comm.Get_topology() == MPI.UNDEFINED)


def test_split_keeps_the_policy(make):
    comm = make("int8", axis="tp")
    half = comm.Split(ME % 2, ME)
    verdict((half.policy, half.axis, half.size) == (comm.policy, "tp", len(range(ME % 2, P, 2))))
    nobody = comm.Split(MPI.UNDEFINED if ME else 0)
    verdict(nobody == MPI.COMM_NULL if ME else nobody.size == 1)
    half.Free()
    if not ME:
        nobody.Free()


@pytest.mark.parametrize("codec", CODECS)
def test_plans(make, codec):
    comm = make(codec)
    n = 70_001
    with comm.plan_allreduce(n, "float32") as plan:
        for seed in (1, 2):
            plan.send[:] = gaussian(n, seed=seed)
            request = plan.start()
            request.wait()
            verdict(relative_error(plan.recv, total(n, seed)) < CODECS[codec])
    with pytest.raises(RuntimeError, match="freed"):
        plan.run()
    with comm.plan_reduce_scatter_block((7, 1000), np.float32) as plan:
        plan.send[:] = gaussian(7000 * P).reshape(P, 7, 1000)
        want = total(7000 * P).reshape(P, 7, 1000)[ME]
        verdict(relative_error(plan.run(), want) < CODECS[codec])
    with comm.plan_allgather(n, "float32") as plan:
        plan.send[:] = gaussian(n)
        verdict(near(plan.run(), np.stack([gaussian(n, r) for r in range(P)]), CODECS[codec]))
    with comm.plan_bcast(n, "float32", P - 1) as plan:
        plan.send[:] = gaussian(n) if ME == P - 1 else 0
        verdict(near(plan.run(), gaussian(n, P - 1), CODECS[codec]))


def test_small_messages_keep_the_books_and_the_order(make):
    comm = make("none")
    x, y = np.ones(100, np.float32), np.zeros(100, np.float32)
    requests = []
    for i in range(30):
        requests.append(comm.Iallreduce(np.full(100, i, np.float32), np.zeros(100, np.float32)))
        comm.Allreduce(x, y)
        x[:] = y / P
        comm.Allreduce(MPI.IN_PLACE, y)
        comm.Allreduce(x[:50], x[50:])  # other parts of one array
        verdict(bool((y == P * P).all() and (x[50:] == P).all()))
        x[50:] = 1
    for request in requests:
        request.wait()
    verdict(sum(r.calls for r in comm.stats() if r.op == "all_reduce") == 120)


@pytest.mark.ranks(least=2, most=3)
def test_what_python_does_for_a_call_stays_little(make):
    comm, codec = make("int8"), get_codec("int8")
    small, large = np.ones(1024, np.float32), np.ones(1 << 20, np.float32)
    sums, large_sums = np.empty_like(small), np.empty_like(large)

    def behind() -> None:
        if ME == P - 1:
            time.sleep(0.03)  # longer than the others wait within the call
        comm.Allreduce(small, sums)

    for most, run in (
        (2, lambda: comm.Allreduce(small, sums)),
        (5, lambda: comm.Allreduce(small, sums, codec=codec)),
        (3, lambda: comm.Allreduce(small, sums, codec="int8")),
        (2, lambda: comm.Allreduce(large, large_sums)),
        (40, behind),
        (20, lambda: comm.Iallreduce(small, sums).Wait()),
    ):
        run()
        calls = python_calls(run, WORLD.Barrier)
        verdict(calls <= most, f"{calls} for {most}")


def test_a_communicator_inherits_from_no_other_class_of_ours():
    ours = [kind.__name__ for kind in hc.Communicator.__mro__ if kind.__module__.startswith("hybridcomp")]
    assert ours == ["Communicator"]


@pytest.mark.ranks(least=2, most=3)
def test_requests_that_no_thread_has_polled_are_mpis_too(make):
    """Waited for out of order, inside MPI, dropped, or tested: MPI and ours see the same end, and the bits are one."""
    comm = make("int8")
    sends = [gaussian(1024, seed) for seed in range(6)]
    wanted = [np.empty(1024, np.float32) for _ in sends]
    for send, want in zip(sends, wanted, strict=True):
        comm.Allreduce(send, want)
    sums = [np.empty(1024, np.float32) for _ in sends]
    requests = [comm.Iallreduce(send, out) for send, out in zip(sends, sums, strict=True)]
    verdict(all(request != MPI.REQUEST_NULL for request in requests))
    status = MPI.Status()
    requests[3].Wait(status)  # the others were begun before it, or after
    verdict(requests[3] == MPI.REQUEST_NULL and status.Get_count(MPI.BYTE) == 0 and not status.Is_cancelled())
    requests[4].Cancel()
    MPI.Request.Waitall([requests[0], requests[4]])
    MPI.Request.Wait(requests[1])
    while not requests[2].Test():
        pass
    del requests[5]
    for _ in range(20):  # each is the only one: most end as blocking calls do
        comm.Iallreduce(sends[5], sums[5]).Wait()
    comm.Barrier()
    verdict(all(request == MPI.REQUEST_NULL and request.done for request in requests))
    verdict(all(np.array_equal(out, want) for out, want in zip(sums, wanted, strict=True)))
    all_of_them, deadline = 2 * len(sends) + 20, time.monotonic() + 20

    def counted() -> int:
        return sum(row.calls for row in comm.stats() if row.op == "all_reduce")

    while counted() < all_of_them and time.monotonic() < deadline:
        time.sleep(1e-3)  # the dropped one ends when the engine looks at it
    verdict(counted() == all_of_them)


def test_one_rank_alone_leaves_small_all_reduces_to_mpi(make):
    comm = make("int8")
    for send, recv, op in (
        (np.array([1, np.nan], np.float32), np.zeros(2, np.float32), MPI.MAX),
        ([np.arange(3), MPI.LONG], [np.zeros(3, np.int64), MPI.LONG], MPI.SUM),
        (MPI.IN_PLACE, np.ones(5000, np.float32), MPI.SUM),
    ):
        request = comm.Iallreduce(send, recv, op)
        verdict(request.passed == (P == 1))
        request.Wait()
        if P == 1:
            want = np.ones(5000) if send is MPI.IN_PLACE else send[0] if isinstance(send, list) else send
            verdict(np.array_equal(recv[0] if isinstance(recv, list) else recv, want, equal_nan=True))
    if P == 1:
        verdict(
            [(row.reason, row.wire_bytes) for row in comm.stats() if row.op == "all_reduce"]
            == [("one rank", 0)]
        )


def test_it_is_a_communicator_of_mpis(make, tmp_path):
    """Methods that no policy compresses are mpi4py's own: pickled objects, attributes, windows, files, groups."""
    comm = make("int8")
    verdict(isinstance(comm, MPI.Intracomm) and WORLD.Compare(comm) == MPI.CONGRUENT and comm.is_intra)
    verdict(comm.bcast({"rank": comm.rank}, 0) == {"rank": 0} and comm.allreduce(1) == P)
    right, left = (comm.rank + 1) % P, (comm.rank - 1) % P
    request = comm.isend([comm.rank], right, 5)
    verdict(comm.recv(source=left, tag=5) == [left])
    request.wait()
    keyval = MPI.Comm.Create_keyval()
    comm.Set_attr(keyval, "kept")
    verdict(comm.Get_attr(keyval) == "kept")
    comm.Set_name("mine")
    verdict(comm.Get_name() == "mine" and comm.group.Get_size() == P)
    window = MPI.Win.Allocate(8, comm=comm)
    window.Free()
    path = WORLD.bcast(str(tmp_path / "numbers"))
    file = MPI.File.Open(comm, path, MPI.MODE_CREATE | MPI.MODE_RDWR)
    file.Write_at_all(comm.rank * 4, np.full(1, comm.rank, np.int32))
    numbers = np.empty(P, np.int32)
    file.Read_at_all(0, numbers)
    file.Close()
    verdict(numbers.tolist() == [*range(P)])
    with pytest.raises(MPI.Exception):
        hc.Communicator(MPI.COMM_NULL)


def test_a_communicator_of_a_topology_compresses_and_has_its_methods(make):
    comm = make("int8:block=64")
    cart = comm.Create_cart([P], periods=[True])
    right, left = (cart.rank + 1) % P, (cart.rank - 1) % P
    ring = comm.Create_dist_graph_adjacent([left], [right])
    graph = comm.Create_graph([*range(1, P + 1)], [(rank + 1) % P for rank in range(P)])
    made = [
        cart,
        ring,
        graph,
        cart.Dup(),
        cart.Sub([True]),
        hc.Communicator(WORLD.Create_cart([P]), "int8:block=64"),
    ]
    verdict(isinstance(cart, MPI.Cartcomm) and cart.Shift(0, 1) == (left, right))
    verdict(isinstance(ring, MPI.Distgraphcomm) and ring.inoutedges == ([left], [right]))
    verdict(isinstance(graph, MPI.Graphcomm) and graph.nneighbors == 1)
    verdict([type(one) for one in made[3:]] == [type(cart)] * 3)
    for one in made:
        x = np.ones(5000, np.float32)
        one.Allreduce(MPI.IN_PLACE, x)
        verdict((bool((x == P).all()) and one.stats()[0].codec == "int8:block=64") or P == 1)
        one.Free()
        verdict(one == MPI.COMM_NULL and not one)

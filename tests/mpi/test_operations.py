"""The operations that gather, scatter and reduce parts of any size, and what programs of mpi4py's expect."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.errors import CodecMismatchError, CollectiveTimeoutError, MismatchError, WireError
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
    plain = comm._p2p.Isend(np.ones(9), right, 10)
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
    verdict(x[::2].tolist() == list(range(100)) and not x[1::2].any())
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


def test_methods_that_pickle_are_not_offered(make):
    comm = make("none")
    offered = [name for name in dir(MPI.Intracomm) if name[0].islower() and hasattr(comm, name)]
    verdict(set(offered) <= {"rank", "size"}, str(offered))

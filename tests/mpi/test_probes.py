"""Probes: their statuses and messages, where the policy compresses sends, against those of plain mpi4py."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from mpi4py import MPI

from hybridcomp.collectives.operations.probes import Message
from hybridcomp.errors import MismatchError
from tests.mpi.conftest import WORLD, gaussian, verdict

P, ME = WORLD.size, WORLD.rank
POLICIES = ["none", "int8:block=64", "lossless", "bounded:abs=1e-4"]
RIGHT, LEFT = (ME + 1) % P, (ME - 1) % P

pytestmark = pytest.mark.ranks(least=2)


def near(got: np.ndarray, want: np.ndarray) -> bool:
    return bool(np.abs(got - want).max(initial=0) < 0.1)


def seen(status: MPI.Status, datatype: MPI.Datatype = MPI.DOUBLE) -> tuple[int, ...]:
    return (
        status.Get_source(),
        status.Get_tag(),
        status.Get_count(datatype),
        status.Get_elements(datatype),
        status.Get_count(MPI.BYTE),
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("n", [0, 1, 500, 5001])
def test_a_probe_tells_what_the_receive_gives(make, policy, n):
    comm = make(policy)
    want = (LEFT, 9, n, n, 8 * n)
    x = gaussian(n, ME).astype(np.float64)
    status = MPI.Status()
    for way in ("Probe", "Iprobe", "Mprobe", "Improbe"):
        request = comm.Isend(x, RIGHT, 9)
        got, message = np.empty(n), None
        for source, tag in (LEFT, 9), (MPI.ANY_SOURCE, MPI.ANY_TAG):  # the same message twice
            if way == "Probe":
                comm.Probe(source, tag, status)
            elif way == "Iprobe":
                while not comm.Iprobe(source, tag, status):
                    pass
            elif message is None:
                message = comm.Mprobe(source, tag, status)
                while way == "Improbe" and not message:
                    message = comm.Improbe(source, tag, status)
            verdict(seen(status) == want, f"{way}: {seen(status)}")
        received = MPI.Status()
        if message is None:
            comm.Recv(got, status.Get_source(), status.Get_tag(), received)
        elif way == "Mprobe":
            message.Recv(got, received)
        else:
            message.Irecv(got).Wait(received)
        request.Wait()
        verdict(seen(received) == want, f"{way}: {seen(received)}")
        verdict(near(got, gaussian(n, LEFT)), way)
        verdict(message is None or not message)
        verdict(not comm.Iprobe(), "nothing is left")


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_messages_keep_their_order_where_a_later_one_was_looked_into(make, policy):
    comm = make(policy)
    arrays = [gaussian(n, k).astype(np.float64) for k, n in enumerate((700, 2, 900, 1001, 3, 800))]
    tags = [4, 5, 4, 6, 4, 6]
    odd = np.arange(7, dtype=np.uint8)
    requests = [comm.Isend(x, RIGHT, tag) for x, tag in zip(arrays, tags, strict=True)]
    requests += [comm.Isend(odd, RIGHT, 7), comm.isend("pickled" * 3, RIGHT, 8), comm.isend(ME, RIGHT, 8)]
    status = MPI.Status()
    for tag, size in (6, 8 * 1001), (4, 8 * 700), (7, 7), (6, 8 * 1001):  # in no order
        comm.Probe(LEFT, tag, status)
        verdict(seen(status)[-1] == size, f"{tag}: {seen(status)}")
    order = []
    for _ in range(3):  # tags 4, 5, 4
        got = np.empty(2000)
        comm.Recv(got, LEFT, MPI.ANY_TAG, status)
        order.append((status.Get_tag(), status.Get_count(MPI.DOUBLE)))
        verdict(near(got[: order[-1][1]], arrays[len(order) - 1]))
    verdict(order == [(4, 700), (5, 2), (4, 900)], order)
    got = np.empty(1001)
    comm.Sendrecv(None, MPI.PROC_NULL, 0, got, LEFT, 6)
    verdict(near(got, arrays[3]))
    comm.Irecv(got[:3], LEFT).Wait()
    verdict(near(got[:3], arrays[4]))
    small = np.empty(10)
    with pytest.raises(MismatchError, match="room"):
        comm.Recv(small, LEFT, 6)
    raw = np.empty(7, np.uint8)
    comm.Recv(raw, LEFT, 7)
    verdict(raw.tolist() == odd.tolist())
    verdict(comm.recv(source=LEFT, tag=8) == "pickled" * 3)
    verdict(comm.irecv(source=LEFT, tag=8).wait() == LEFT)
    for request in requests:
        request.Wait()
    verdict(not comm.Iprobe())


def test_a_pickle_of_odd_length_that_was_looked_into_is_still_a_pickle(make):
    comm = make("int8:block=64")
    texts = ["a" * 100, "a" * 101]  # one of them has an odd number of bytes
    for take in "recv", "irecv", "mprobe":
        requests = [comm.isend(text, RIGHT, 3) for text in texts]
        got = []
        for _ in texts:
            comm.Probe(LEFT, 3, MPI.Status())
            if take == "recv":
                got.append(comm.recv(source=LEFT, tag=3))
            elif take == "irecv":
                got.append(comm.irecv(source=LEFT, tag=3).wait())
            else:
                got.append(comm.mprobe(LEFT, 3).recv())
        for request in requests:
            request.wait()
        verdict(got == texts, take)
    verdict(comm.session.unexpected is not None, "neither was odd")


@pytest.mark.parametrize("policy", POLICIES)
def test_structures_of_odd_length_are_received_after_a_probe(make, policy):
    """An odd number of bytes is that of encoded messages; only MPI understands the datatype."""
    comm = make(policy)
    of_nine = MPI.Datatype.Create_struct([1, 1], [0, 8], [MPI.CHAR, MPI.DOUBLE])
    of_nine = of_nine.Create_resized(0, 16).Commit()
    layout = np.dtype([("a", "i1"), ("b", "f8")], align=True)
    values, want = np.zeros(3, layout), np.zeros(3, layout)
    for array, who in (values, ME), (want, LEFT):
        array["a"], array["b"] = [who, 2, 3], [who, 0.5, -1]
    for take in "Recv", "Irecv", "Mprobe", "into too little":
        request = comm.Isend([values, 3, of_nine], RIGHT, 4)
        got, status = np.zeros(5, layout), MPI.Status()
        if take == "Mprobe":
            comm.Mprobe(LEFT, 4, status).Recv([got, 5, of_nine], status)
        else:
            comm.Probe(LEFT, 4, status)
            verdict(seen(status, of_nine)[:4] == (LEFT, 4, 3, 6), seen(status, of_nine))
        if take == "into too little":
            with pytest.raises((MPI.Exception, MismatchError)):
                comm.Recv([got, 2, of_nine], LEFT, 4, status)
        elif take == "Recv":
            comm.Recv([got, 5, of_nine], LEFT, 4, status)
        elif take == "Irecv":
            comm.Irecv([got, 5, of_nine], LEFT, 4).Wait(status)
        request.Wait()
        if take != "into too little":
            verdict((got[:3] == want).all() and (got[3:] == np.zeros(2, layout)).all(), take)
            verdict(seen(status, of_nine)[:3] == (LEFT, 4, 3), seen(status, of_nine))
    of_nine.Free()


def test_an_array_of_unknown_length_may_be_looked_into(make):
    comm = make("int8:block=64")
    x = gaussian(3000, ME)
    request, status = comm.Isend_array(x, RIGHT, 2), MPI.Status()
    comm.Probe(LEFT, 2, status)
    verdict(status.Get_count(MPI.FLOAT) == 3000)
    verdict(near(comm.Recv_array(LEFT, 2), gaussian(3000, LEFT)))
    request.Wait()
    request = comm.Isend(x, RIGHT, 2)
    message = Message.Probe(comm, LEFT, 2, status)
    verdict(status.Get_count(MPI.FLOAT) == 3000)
    got = np.empty(3000, np.float32)
    message.Recv(got)
    request.Wait()
    verdict(near(got, gaussian(3000, LEFT)) and Message.Iprobe(comm) is None)


def test_threads_that_probe_and_receive_lose_no_message(make):
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("MPI takes calls of one thread alone")
    comm, over, counts = make("int8:block=64"), threading.Event(), set()

    def look() -> None:
        status = MPI.Status()
        while not over.is_set():
            if comm.Iprobe(status=status):
                counts.add(status.Get_count(MPI.FLOAT))

    watcher = threading.Thread(target=look)
    watcher.start()
    sizes = [2000 + k for k in range(60)]
    good = []
    for n in sizes:
        request = comm.Isend(gaussian(n, ME), RIGHT, n)
        got = np.empty(n, np.float32)
        comm.Recv(got, LEFT, n)
        request.Wait()
        good.append(near(got, gaussian(n, LEFT)))
    over.set()
    watcher.join()
    verdict(all(good) and counts <= set(sizes))

"""Buffers as mpi4py's callers give them: any spelling, memory order and datatype has mpi4py's values, on any ranks."""

from __future__ import annotations

import array
import ctypes
import mmap
import time

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.collectives.requests import Generalized, Request
from tests.mpi.conftest import WORLD, verdict

P, ME = WORLD.size, WORLD.rank
BOUND = 1e-3
POLICIES = ["none", f"bounded:abs={BOUND}"]
N = 48 * P  # floats in a buffer
calls = pytest.mark.parametrize("policy", POLICIES)


def values(rank: int = ME, n: int = N) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(n).astype(np.float32)


class Cells(np.ndarray):
    """Array of a class of the program's own, as numpy.memmap is one."""


class Memory:
    """Buffers of N floats, each in memory of its own: ``spec`` for mpi4py, ``get`` for the values in MPI's order."""

    def __init__(self, kind: str, filled: bool, n: int = N, blocks: int = 1) -> None:
        given = values()[:n] if filled else np.full(n, 7, np.float32)
        self.n, self.kind = n, kind
        self.free = None
        if kind == "derived":
            self.whole = np.full(2 * n, 9, np.float32)
            self.whole[::2] = given
            self.type = MPI.FLOAT.Create_vector(n, 1, 2).Commit()
            self.spec = [self.whole, 1, self.type]
        elif kind == "indexed":
            self.whole = np.full(2 * n, 9, np.float32)
            self.whole[1::2] = given
            self.type = MPI.FLOAT.Create_indexed_block(1, list(range(1, 2 * n, 2))).Commit()
            self.spec = (self.whole, (1, None), self.type)
        elif kind == "mapped":
            self.whole = mmap.mmap(-1, 4 * n)
            self.whole[:] = given.tobytes()
            self.spec = [self.whole, n // blocks, MPI.FLOAT]
        else:
            self.whole = given.reshape(-1, 4).copy()
            if kind == "fortran":
                self.whole = np.asfortranarray(given.reshape(4, -1, order="F").copy(order="F"))
            self.spec = {
                "array": self.whole,
                "subclass": self.whole.view(Cells),
                "fortran": self.whole,
                "list": [self.whole, MPI.FLOAT],
                "counted": [self.whole, n // blocks, MPI.FLOAT],
                "code": [self.whole, "f"],
                "view": memoryview(self.whole.reshape(-1)),
                "placed": [self.whole, (n // blocks, 0), MPI.FLOAT],
            }[kind]

    def get(self) -> np.ndarray:
        if self.kind == "derived":
            assert (self.whole[1::2] == 9).all(), "gaps are written"
            return self.whole[::2].copy()
        if self.kind == "indexed":
            assert (self.whole[::2] == 9).all(), "gaps are written"
            return self.whole[1::2].copy()
        if self.kind == "mapped":
            return np.frombuffer(self.whole[:], np.float32)
        return self.whole.ravel("K").copy()

    def close(self) -> None:
        if hasattr(self, "type"):
            self.type.Free()


KINDS = ["array", "fortran", "list", "counted", "code", "view", "placed", "derived", "indexed"]
KINDS += ["mapped", "subclass"]


def allreduce(c, s, r):
    c.Allreduce(s.spec, r.spec)


def reduce_scatter_block(c, s, r):
    c.Reduce_scatter_block(s.spec, r.spec)


def reduce(c, s, r):
    c.Reduce(s.spec, r.spec, MPI.SUM, P - 1)


def allgather(c, s, r):
    c.Allgather(s.spec, r.spec)


def alltoall(c, s, r):
    c.Alltoall(s.spec, r.spec)


def bcast(c, s, r):
    c.Bcast((s if ME == P - 1 else r).spec, P - 1)


def gather(c, s, r):
    c.Gather(s.spec, r.spec if ME == 0 else None, 0)


def scatter(c, s, r):
    c.Scatter(s.spec if ME == 0 else None, r.spec, 0)


def scan(c, s, r):
    c.Scan(s.spec, r.spec)


def sendrecv(c, s, r):
    c.Sendrecv(s.spec, (ME + 1) % P, 3, r.spec, (ME - 1) % P, 3)


def isend_recv(c, s, r):
    request = c.Isend(s.spec, (ME + 1) % P, 4)
    status = MPI.Status()
    c.Recv(r.spec, (ME - 1) % P, 4, status)
    request.Wait()
    assert status.Get_count(MPI.FLOAT) == N
    assert status.source == (ME - 1) % P


def send_irecv(c, s, r):
    request = c.Irecv(r.spec, (ME - 1) % P, 5)
    c.Send(s.spec, (ME + 1) % P, 5)
    MPI.Request.Waitall([request])


OPERATIONS = [allreduce, reduce, bcast, scan, alltoall, sendrecv, isend_recv, send_irecv]
PARTS = {
    allgather: (N // P, N),
    gather: (N // P, N),
    scatter: (N, N // P),
    reduce_scatter_block: (N, N // P),
}
BLOCKS = {allgather: (1, P), gather: (1, P), scatter: (P, 1), reduce_scatter_block: (P, 1), alltoall: (P, P)}
NO_TYPE_OF_ITS_OWN = ("derived", "indexed")  # MPI reduces no elements of a derived datatype


@calls
@pytest.mark.parametrize("operation", [*OPERATIONS, *PARTS], ids=lambda f: f.__name__)
def test_any_buffer_has_the_values_of_mpi4py_whatever_the_other_ranks_have(make, policy, operation):
    """Each rank has another kind of buffer in turn: same count and type, which is legal MPI."""
    comm = make(policy)
    sizes = PARTS.get(operation, (N, N))
    reduces = operation in (allreduce, reduce, scan, reduce_scatter_block)
    for turn in range(len(KINDS)):
        own = [KINDS[(turn + ME) % len(KINDS)], KINDS[(turn + 2 * ME + 1) % len(KINDS)]]
        if (reduces and (policy == "none" or P == 1)) or operation is scan or operation in BLOCKS:
            own = ["fortran" if kind in NO_TYPE_OF_ITS_OWN else kind for kind in own]
        if operation is bcast:
            own[1] = own[0]
        results = []
        for plain in (True, False):
            kinds = own
            if plain and reduces:
                kinds = ["array" if kind in NO_TYPE_OF_ITS_OWN else kind for kind in own]
            blocks = BLOCKS.get(operation, (1, 1))
            send, recv = (Memory(kinds[i], i == 0, sizes[i], blocks[i]) for i in range(2))
            operation(WORLD if plain else comm, send, recv)
            results.append(recv.get())
            send.close()
            recv.close()
        error = float(np.abs(results[0] - results[1]).max())
        limit = 1e-5 if policy == "none" else P * BOUND * 2
        verdict(error <= limit, f"{operation.__name__} of {own}: {error}")


@calls
def test_counts_of_parts_are_any_integers(make, policy):
    comm = make(policy)
    counts = [300 + rank for rank in range(P)]
    displs = [sum(counts[:rank]) + rank for rank in range(P)]
    room = sum(counts) + P
    mine = values(ME, counts[ME])
    forms = [counts, np.array(counts), np.array(counts, np.int16), (counts, None)]
    forms += [(np.array(counts), None)]
    whole = np.concatenate([values(rank, counts[rank]) for rank in range(P)])
    for form in forms:
        got = np.zeros(sum(counts), np.float32)
        comm.Allgatherv([mine, MPI.FLOAT], [got, form, MPI.FLOAT])
        verdict(float(np.abs(got - whole).max()) <= 2 * BOUND, str(form))
    for form in ((counts, displs), (np.array(counts), np.array(displs)), (counts, np.array(displs))):
        got = np.full(room, 7, np.float32)
        comm.Gatherv(mine, [got, form, MPI.FLOAT] if ME == 0 else None, 0)
        if ME == 0:
            want = np.full(room, 7, np.float32)
            for rank in range(P):
                want[displs[rank] : displs[rank] + counts[rank]] = values(rank, counts[rank])
            assert float(np.abs(got - want).max()) <= 2 * BOUND
        back = np.zeros(counts[ME], np.float32)
        comm.Scatterv([got, form, MPI.FLOAT] if ME == 0 else None, back, 0)
        verdict(float(np.abs(back - mine).max()) <= 3 * BOUND)
    out = np.zeros(3 * P, np.float32)
    comm.Alltoallv([np.repeat(np.float32(ME), 3 * P), 3], [out, np.full(P, 3)])
    verdict(float(np.abs(out - np.repeat(np.arange(P), 3)).max()) <= BOUND)
    part = np.zeros(counts[ME], np.float32)
    comm.Reduce_scatter(np.ones(sum(counts), np.float32), part, np.array(counts))
    verdict(float(np.abs(part - P).max()) <= P * BOUND * 2)


@calls
def test_a_column_is_received_where_a_row_was_sent(make, policy):
    comm = make(policy)
    grid = np.zeros((300, 300))
    column = MPI.DOUBLE.Create_subarray([300, 300], [300, 1], [0, 5]).Commit()
    request = comm.Irecv([grid, 1, column], (ME - 1) % P)
    comm.Send(np.random.default_rng(ME).random(300), (ME + 1) % P)
    request.Wait()
    column.Free()
    want = np.random.default_rng((ME - 1) % P).random(300)
    verdict(float(np.abs(grid[:, 5] - want).max()) <= BOUND and not np.delete(grid, 5, 1).any())


@pytest.mark.parametrize("policy", ["none", "exact", "int8"])
@pytest.mark.parametrize("counted", [[3, 2], (3, 2)], ids=["list", "tuple"])
@pytest.mark.parametrize("method", ["Recv", "Irecv", "Recv_init", "Sendrecv"])
def test_a_small_message_is_received_where_a_displacement_says(make, policy, method, counted):
    comm = make(policy)
    around, data = (ME - 1) % P, np.arange(3, dtype=np.float32) + ME
    for spell in (
        lambda a: [a, counted],
        lambda a: [a, counted, MPI.FLOAT],
        lambda a: [a, *counted, MPI.FLOAT],
    ):
        got = np.full(7, -1, np.float32)
        if method == "Sendrecv":
            comm.Sendrecv(data, (ME + 1) % P, 0, spell(got), around, 0)
        else:
            sent = comm.Isend(data, (ME + 1) % P)
            receive = getattr(comm, method)(spell(got), around)
            if method == "Recv_init":
                receive.Start()
            if receive is not None:
                receive.Wait()
            if method == "Recv_init":
                receive.Free()
            sent.Wait()
        off = np.abs(got - [-1, -1, *(np.arange(3) + around), -1, -1])
        verdict(bool((off <= [0, 0, *[0 if policy != "int8" else 0.05] * 3, 0, 0]).all()), str(got))


@pytest.mark.ranks(least=2)
@pytest.mark.parametrize("policy", ["none", "exact"])
def test_a_message_longer_than_the_count_at_a_displacement_is_refused(make, policy):
    comm, got = make(policy), np.zeros(9, np.float32)
    sent = comm.Isend(np.ones(3, np.float32), (ME + 1) % P)
    with pytest.raises((MPI.Exception, hc.MismatchError)):
        comm.Recv([got, [2, 4], MPI.FLOAT], (ME - 1) % P)
    sent.Wait()
    verdict(not got[6:].any() and not got[:4].any())


@pytest.mark.parametrize("policy", ["none", "int8"])
@pytest.mark.parametrize("counted", [None, 5, (3, 2)])
def test_types_that_only_the_memory_tells_are_exchanged_in_place(make, policy, counted):
    comm, around = make(policy), (ME - 1) % P
    for method in "Sendrecv_replace", "Isendrecv_replace":
        numbers = np.arange(5, dtype=np.longdouble) + 10 * ME
        given = memoryview(numbers) if counted is None else [memoryview(numbers), counted]
        request = getattr(comm, method)(given, (ME + 1) % P, 0, around, 0)
        if request is not None:
            request.Wait()
        want = np.arange(5, dtype=np.longdouble) + 10 * around
        if counted == (3, 2):
            want[:2] = np.arange(2) + 10 * ME
        verdict(bool((numbers == want).all()), f"{method}: {numbers}")


def test_buffers_of_other_kinds(make):
    comm = make("int8")
    numbers = array.array("d", [ME + 1.0] * 10)
    total = array.array("d", [0.0] * 10)
    comm.Allreduce(numbers, total)
    verdict(abs(total[0] - sum(range(1, P + 1))) < 0.2)
    text = bytearray(b"....")
    comm.Bcast(b"abcd" if ME == 0 else text, 0)
    verdict(ME == 0 or bytes(text) == b"abcd")
    fixed = np.float32(ME)
    if P > 1:
        request = comm.Isend(fixed, (ME + 1) % P)
        got = np.zeros((), np.float32)
        comm.Recv(got, (ME - 1) % P)
        request.Wait()
        verdict(float(got) == (ME - 1) % P)
    address = values().copy()
    absolute = MPI.FLOAT.Create_hindexed([N], [MPI.Get_address(address)]).Commit()
    comm.Bcast([MPI.BOTTOM, 1, absolute], 0)
    absolute.Free()
    verdict(float(np.abs(address - values(0)).max()) < 0.1)


def started(request: MPI.Prequest) -> None:
    request.Start()
    request.Wait()


class Dlpack:
    """Array of another library, which has DLPack alone."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack__(self, **how):
        return self._array.__dlpack__(**how)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


@pytest.mark.parametrize("dtype", ["f4", "c8", "g"])
@pytest.mark.parametrize("method", ["Reduce", "Reduce in place", "Scan", "Exscan", "Reduce_init"])
def test_ranks_reduce_by_the_same_operator_whatever_holds_their_buffers(make, method, dtype):
    """MPI's algorithm of so many elements depends on whether the operator is MPI's own."""
    comm = make("none", timeout=10.0)
    x, got = np.full(20_000, ME % 2 + 1, dtype), np.zeros(20_000, dtype)
    wrap = [lambda a: a, memoryview, Dlpack if dtype != "g" else memoryview][ME % 3]
    arguments = (wrap(x), wrap(got), MPI.PROD)
    method, _, in_place = method.partition(" ")
    if in_place and ME == 0:
        got[:] = x
        arguments = (MPI.IN_PLACE, *arguments[1:])
    if method == "Reduce_init":
        started(comm.Reduce_init(*arguments, root=0))
    else:
        getattr(comm, method)(*arguments)
    factors = {"Scan": ME + 1, "Exscan": ME, "Reduce": P, "Reduce_init": P}[method]
    mine = ME == 0 or "Reduce" not in method
    verdict(not mine or not factors or bool((got == np.prod([q % 2 + 1 for q in range(factors)])).all()))


def test_messages_of_any_memory_are_mpis_own_and_keep_it_until_they_are_done(make):
    comm = make("none")
    following, before = (ME + 1) % P, (ME - 1) % P
    comm.Sendrecv(GOOD, following, 0, ROOM, before, 0)  # in a rank's first message MPI may stay for ever
    memories = [mmap.mmap(-1, 64), bytearray(64), (ctypes.c_char * 64)(), np.zeros(64, np.uint8)]
    for memory in memories:
        text = f"{ME:8}".encode()
        requests = [comm.Irecv([memory, 8, MPI.BYTE], before, 6), comm.Isend([text, MPI.BYTE], following, 6)]
        own = [isinstance(one, Request) and not isinstance(one, Generalized) for one in requests]
        verdict(all(own), f"requests of {type(memory).__name__} are {requests}")
        if isinstance(memory, mmap.mmap):
            with pytest.raises(BufferError):
                memory.close()
        MPI.Request.Waitall(requests)
        verdict(bytes(memory[:8]) == f"{before:8}".encode(), f"of {type(memory).__name__}")
    memories[0].close()


@pytest.mark.parametrize("memory", [np.zeros, lambda n: mmap.mmap(-1, n)], ids=["array", "mapped"])
def test_buffers_that_overlap_are_taken_where_nothing_is_compressed(make, memory):
    """MPI allows it of no operation, and MPICH ends the process or gives wrong values."""
    comm = make("none")
    whole = memoryview(memory(8 * P + 5)).cast("B")
    for operation, n in ("Alltoall", 8 * P), ("Allgather", 8):
        whole[5 : 5 + n] = bytes(range(8 * P)) if operation == "Alltoall" else bytes([ME] * 8)
        getattr(comm, operation)(whole[5 : 5 + n], whole[: 8 * P])
        own = range(8 * ME, 8 * ME + 8)
        blocks = [own] * P if operation == "Alltoall" else [[rank] * 8 for rank in range(P)]
        verdict(bytes(whole[: 8 * P]) == bytes(value for block in blocks for value in block), operation)


STRIDED = np.zeros(200, np.float32)[::2]
GOOD, ROOM = np.ones(100, np.float32), np.zeros(100, np.float32)
BIG = np.zeros(100 * P, np.float32)


WRONG = {
    "Allreduce operator": lambda c: c.Allreduce(GOOD, ROOM, "SUM"),
    "Reduce operator": lambda c: c.Reduce(GOOD, ROOM, "SUM", 0),
    "Reduce_scatter_block operator": lambda c: c.Reduce_scatter_block(BIG, ROOM, "SUM"),
    "Exscan operator": lambda c: c.Exscan(GOOD, ROOM, "SUM"),
    "Allreduce_init": lambda c: started(c.Allreduce_init(STRIDED, ROOM)),
    "Allreduce_init operator": lambda c: started(c.Allreduce_init(GOOD, ROOM, "SUM")),
    "Bcast_init": lambda c: started(c.Bcast_init(GOOD, P + 3)),
    "Alltoallw_init": lambda c: started(c.Alltoallw_init("no buffer", EACH)),
    "Scan_init": lambda c: started(c.Scan_init(STRIDED, ROOM, MPI.SUM)),
    "Allreduce": lambda c: c.Allreduce(STRIDED, ROOM),
    "Allreduce count": lambda c: c.Allreduce([GOOD, 1000, MPI.FLOAT], ROOM),
    "Bcast": lambda c: c.Bcast(object(), 0),
    "Bcast root": lambda c: c.Bcast(GOOD, P + 3),
    "Allgather": lambda c: c.Allgather(GOOD, "no buffer"),
    "Allgatherv": lambda c: c.Allgatherv(GOOD, [BIG, [1] * (P + 1), MPI.FLOAT]),
    "Alltoall": lambda c: c.Alltoall(STRIDED, BIG),
    "Gather": lambda c: c.Gather(GOOD, STRIDED, 0),
    "Reduce": lambda c: c.Reduce(GOOD, np.zeros(3, np.float64), MPI.SUM, 0),
    "Scatter": lambda c: c.Scatter([BIG, "no code"], ROOM, 0),
    "Scan": lambda c: c.Scan(STRIDED, ROOM),
    "Reduce_scatter_block": lambda c: c.Reduce_scatter_block(BIG, STRIDED),
    "Iallreduce": lambda c: c.Iallreduce(STRIDED, ROOM).Wait(),
    "Ibcast": lambda c: c.Ibcast(STRIDED, 0).Wait(),
}
EACH = [BIG, [1] * P, [0] * P, [MPI.FLOAT] * P]
RIGHT = {
    "Exscan": lambda c: c.Exscan(GOOD, ROOM),
    "Allreduce_init": lambda c: started(c.Allreduce_init(GOOD, ROOM)),
    "Bcast_init": lambda c: started(c.Bcast_init(ROOM, 0)),
    "Alltoallw_init": lambda c: started(c.Alltoallw_init(EACH, [BIG.copy(), *EACH[1:]])),
    "Scan_init": lambda c: started(c.Scan_init(GOOD, ROOM, MPI.SUM)),
    "Allreduce": lambda c: c.Allreduce(GOOD, ROOM),
    "Bcast": lambda c: c.Bcast(ROOM, 0),
    "Allgather": lambda c: c.Allgather(GOOD, BIG),
    "Allgatherv": lambda c: c.Allgatherv(GOOD, [BIG, [100] * P, MPI.FLOAT]),
    "Alltoall": lambda c: c.Alltoall(BIG, BIG.copy()),
    "Gather": lambda c: c.Gather(GOOD, None, 0),
    "Reduce": lambda c: c.Reduce(GOOD, None, MPI.SUM, 0),
    "Scatter": lambda c: c.Scatter(None, ROOM, 0),
    "Scan": lambda c: c.Scan(GOOD, ROOM),
    "Reduce_scatter_block": lambda c: c.Reduce_scatter_block(BIG, ROOM),
    "Iallreduce": lambda c: c.Iallreduce(GOOD, ROOM).Wait(),
    "Ibcast": lambda c: c.Ibcast(ROOM, 0).Wait(),
}
ERRORS = (ValueError, TypeError, BufferError, KeyError, MPI.Exception)


@calls
@pytest.mark.parametrize("wrong", WRONG)
def test_an_argument_that_one_rank_refuses_is_told_to_all(make, policy, wrong):
    """The root is rank 0, which is the one that errs; who only sends to it may have gone on."""
    if P == 1:
        return
    comm = make(policy, timeout=20.0)
    WORLD.Barrier()
    began, error = time.monotonic(), None
    try:
        (WRONG if ME == 0 else RIGHT)[wrong if ME == 0 else wrong.split()[0]](comm)
        comm.Barrier()
    except Exception as e:
        error = e
    seconds = time.monotonic() - began
    verdict(
        isinstance(error, ERRORS if ME == 0 else hc.RemoteError) and seconds < 5, f"{error!r} after {seconds}"
    )


@calls
def test_what_all_ranks_refuse_leaves_nothing_behind(make, policy):
    comm = make(policy)
    for name, wrong in WRONG.items():
        if name in ("Gather", "Reduce", "Scatter"):  # of which the root alone looks at the wrong buffer
            continue
        with pytest.raises(ERRORS):
            wrong(comm)
        comm.Allreduce(GOOD, ROOM)
        verdict(bool(np.allclose(ROOM, P, atol=P * BOUND)))
    deadline = time.monotonic() + 10
    while WORLD.allreduce(comm.failed and time.monotonic() < deadline, MPI.LOR):  # all ranks go on, or none
        comm.Barrier()
        time.sleep(0.01)
    verdict(not comm.failed)

"""A communicator may end with operations under way, as MPI's may: they end as if it had not."""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.collectives.failure.notices import Notices
from hybridcomp.collectives.failure.release import collect
from tests.mpi.conftest import WORLD, communicator, gaussian, step_by_step, verdict

ME, P = WORLD.rank, WORLD.size
SIZES = (1_000, 30_000, 200_000)
LATE = 0.15  # seconds by which one rank is later than the others, whose operations wait for it


def started(comm):
    """Start operations of all kinds; return their requests, and the arrays that they write to."""
    requests, results = [], []

    def begin(method, *arguments, result, **options):
        requests.append(method(*arguments, **options))
        results.append(result)

    right, left = (ME + 1) % P, (ME - 1) % P
    for n in SIZES:
        x = gaussian(n)
        begin(comm.Iallreduce, x, y := np.zeros_like(x), result=y)
        begin(comm.Ireduce, x, y := np.zeros_like(x), root=P - 1, result=y)
        begin(comm.Ibcast, y := x.copy(), P - 1, result=y)
        begin(comm.Iallgather, x, y := np.zeros((P, n), np.float32), result=y)
        begin(comm.Iallreduce, whole := np.arange(n), y := np.zeros_like(whole), result=y)
        begin(comm.Irecv, y := np.zeros_like(x), left, n // 100, result=y)
        begin(comm.Isend, x, right, n // 100, result=x)
    begin(comm.Ibarrier, result=x)
    begin(comm.Iscan, x, y := np.zeros_like(x), result=y)
    return requests, results


def late() -> None:
    """Have the last rank come later than the others."""
    WORLD.Barrier()
    if ME == P - 1:
        time.sleep(LATE)


WAYS = [
    "none",
    "int8",
    "lossless",
    "topk:ratio=0.1",
    "bounded:abs=1e-3",
    "powersgd:rank=2",
    "step by step",
    "detail",
]


@pytest.mark.parametrize("way", WAYS)
def test_operations_under_way_end_as_if_the_communicator_had_not(way):
    policy = {"step by step": "int8", "detail": "int8"}.get(way, way)

    def made() -> hc.Communicator:
        comm = hc.Communicator(WORLD, policy, timeout=30.0, detail=way == "detail")
        return step_by_step(comm) if way == "step by step" else comm

    waited = made()
    requests, wanted = started(waited)
    MPI.Request.Waitall(requests)
    waited.Free()
    freed, disconnected, dropped = made(), made(), made()
    late()
    left = [started(freed), started(disconnected), started(dropped)]
    freed.Free()
    disconnected.Disconnect()
    del dropped
    gc.collect()
    # While they are under way, others are made and freed.
    other, idle = made(), made()
    left.append(started(other))
    other.Free()
    idle.Free()
    wrong = []
    for requests, results in left:
        for request in requests:
            request.Wait()
        wrong += [
            i for i, (a, b) in enumerate(zip(results, wanted, strict=True)) if a.tobytes() != b.tobytes()
        ]
    verdict(not wrong, f"results {wrong}")


def test_it_is_the_null_communicator_at_once_and_starts_nothing_more(make):
    comm = make("none")
    x, y = np.ones(50_000, np.float32), np.zeros(50_000, np.float32)
    comm.Allreduce(x, y)
    late()
    request = comm.Iallreduce(x, y, codec="int8")
    comm.Free()
    verdict(comm == MPI.COMM_NULL and not comm)
    for method, *arguments in [
        (comm.Allreduce, x, y),
        (comm.Iallreduce, x, y),
        (comm.Iallreduce, x[:10], y[:10]),
        (comm.Bcast, x),
        (comm.Ibcast, x),
        (comm.Allgather, x[:10], np.zeros(10 * P, np.float32)),
        (comm.Barrier,),
        (comm.Send, x, ME),
        (comm.Isend, x, ME),
        (comm.Recv, y, ME),
        (comm.Irecv, y, ME),
        (comm.Iprobe,),
        (comm.Mprobe,),
        (comm.Dup,),
        (comm.Split,),
        (comm.Shrink,),
        (comm.Create_group, WORLD.group),
    ]:
        try:
            method(*arguments)
            error = None
        except Exception as raised:
            error = raised
        good = isinstance(error, MPI.Exception) and error.Get_error_class() == MPI.ERR_COMM
        verdict(good, f"{method.__name__}: {error!r}")
    request.Wait()
    verdict(bool((np.abs(y - P) < 0.1).all()))
    comm.Free()
    comm.Disconnect()


def test_mpi_gets_it_back_once_all_ranks_have_ended_what_was_under_way():
    comm = communicator("int8")
    mpi, x = comm.mpi, np.ones(50_000, np.float32)
    late()
    request = comm.Iallreduce(MPI.IN_PLACE, x)
    comm.Free()
    WORLD.Barrier()
    request.Wait()
    deadline = time.monotonic() + 20
    while mpi and time.monotonic() < deadline:
        collect()
    verdict(not mpi)


def test_disconnect_waits_for_what_is_under_way():
    comm = communicator("int8")
    x = np.ones(50_000, np.float32)
    late()
    request = comm.Iallreduce(MPI.IN_PLACE, x)
    comm.Disconnect()
    verdict(comm == MPI.COMM_NULL and bool((np.abs(x - P) < 0.1).all()))
    request.Wait()


@pytest.mark.ranks(least=2)
def test_what_fails_after_the_end_keeps_it_from_mpi():
    comm = communicator("int8", timeout=0.5)
    mpi, x = comm.mpi, np.ones(50_000, np.float32)
    request = comm.Iallreduce(MPI.IN_PLACE, x) if ME else None
    comm.Free()
    error = None
    try:
        if request is not None:
            request.Wait()
    except hc.CollectiveTimeoutError as raised:
        error = raised
    WORLD.Barrier()
    other = communicator("int8")
    other.Allreduce(MPI.IN_PLACE, y := np.ones(50_000, np.float32))
    other.Free()
    collect()
    verdict(bool(mpi) and (error is not None or not ME) and bool((np.abs(y - P) < 0.1).all()), repr(error))


def test_children_outlive_their_parent(make):
    parent = make("int8")
    late()
    before = started(parent)
    made = [parent.Dup(), parent.Split(0, ME), parent.Create_cart([P])]
    late()
    after = started(parent)
    parent.Free()
    left = [started(one) for one in made]
    for one in made:
        one.Free()
    wrong = []
    for requests, results in [before, after, *left]:
        MPI.Request.Waitall(requests)
        wrong += [
            i for i, (a, b) in enumerate(zip(results, before[1], strict=True)) if a.tobytes() != b.tobytes()
        ]
    verdict(not wrong, f"results {wrong}")


def test_a_callback_of_an_attribute_may_free_another():
    comm, held = communicator(), communicator()
    keyval = MPI.Comm.Create_keyval(delete_fn=lambda _comm, _key, value: value.Free())
    comm.Set_attr(keyval, held)
    comm.Free()
    WORLD.Barrier()
    deadline = time.monotonic() + 20
    while held and time.monotonic() < deadline:
        collect()
    verdict(not held)
    MPI.Comm.Free_keyval(keyval)


def test_duplicates_that_take_no_hints_and_their_requests(make):
    comm = make("int8")
    made = [comm.Dup(MPI.INFO_NULL), comm.Dup_with_info(MPI.INFO_NULL)]
    for one, request in comm.Idup(), comm.Idup(MPI.INFO_NULL), comm.Idup_with_info(MPI.INFO_NULL):
        verdict(request != MPI.REQUEST_NULL)
        request.Wait()
        made.append(one)
    for one in made:
        one.Allreduce(MPI.IN_PLACE, x := np.ones(100, np.float32))
        verdict(bool((x == P).all()))
        one.Free()


@pytest.mark.ranks(least=2)
def test_what_ranks_ask_each_other_while_they_wait_is_taken_before_they_free(monkeypatch):
    """Or the next communicator would get it, with MPI's context."""
    counts = {"_send": 0, "_take": 0}

    def counting(name: str) -> None:
        honest = getattr(Notices, name)

        def counted(self: Notices, *arguments: Any, **how: Any) -> None:
            if not self._closed or name == "_take":
                counts[name] += len(arguments[3]) if name == "_send" else 1
            honest(self, *arguments, **how)

        monkeypatch.setattr(Notices, name, counted)

    comm = hc.Communicator(WORLD, "int8", timeout=30.0)
    WORLD.Barrier()
    counting("_send")
    counting("_take")
    if WORLD.rank == 0:
        time.sleep(1)
    comm.Allreduce(MPI.IN_PLACE, gaussian(30_000))
    if WORLD.rank:  # the first rank is done with it
        time.sleep(0.3)
        comm.session.notices._inquire(1, time.monotonic(), 1.0)
    comm.Free()
    WORLD.Barrier()
    collect()
    sent, taken = (WORLD.allreduce(counts[name]) for name in ("_send", "_take"))
    verdict(sent == taken > 0, f"{sent} sent, {taken} taken")
    verdict(not comm.mpi)

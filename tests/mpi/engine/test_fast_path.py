"""Blocking operations that the compiled module posts: small, plain, uncompressed, and what is not quite so."""

from __future__ import annotations

import time

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.errors import CollectiveTimeoutError, MismatchError
from hybridcomp.policy import Policy, Rule
from tests.mpi.conftest import WORLD, communicator, verdict

P, ME = WORLD.size, WORLD.rank
RIGHT, LEFT = (ME + 1) % P, (ME - 1) % P
LATE = 0.05  # seconds: far more than the compiled module looks


def calls(comm: hc.Communicator, op: str) -> int:
    return sum(row.calls for row in comm.stats() if row.op == op)


@pytest.mark.parametrize("late", range(min(P, 2)))
def test_an_operation_that_waits_goes_on_in_the_engine(make, late):
    comm = make("none")
    x, y = np.full(50, ME + 1.0, np.float32), np.zeros(50, np.float32)
    for _ in range(3):
        if late == ME:
            time.sleep(LATE)
        comm.Allreduce(x, y)
        verdict(bool((y == P * (P + 1) / 2).all()), "sum")
        if late == ME:
            time.sleep(LATE)
        comm.Bcast(y if ME == 0 else x, 0)
        comm.Barrier()
        x[:] = ME + 1
    verdict(calls(comm, "all_reduce") == 3 and calls(comm, "broadcast") == 3 and calls(comm, "barrier") == 3)


def test_a_receive_that_waits_keeps_its_status(make):
    if P == 1:
        return
    comm = make("none")
    if ME == P - 1:
        time.sleep(LATE)
        comm.Send(np.arange(20, dtype=np.float64), 0, 7)
    elif ME == 0:
        got, status = np.zeros(30), MPI.Status()
        comm.Recv(got, MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        assert (got[:20] == np.arange(20)).all()
        assert (status.Get_source(), status.Get_tag(), status.Get_count(MPI.DOUBLE)) == (P - 1, 7, 20)
    comm.Barrier()


def test_more_sizes_than_are_kept(make):
    comm = make("none")
    for n in [*range(1, 150), *range(1, 10)]:
        x, y = np.full(n, 2.0, np.float32), np.zeros(n, np.float32)
        comm.Allreduce(x, y)
        assert (y == 2 * P).all()
    verdict(calls(comm, "all_reduce") == 158, "each is counted once, kept or not")


def test_a_new_step_asks_the_policy_again(make):
    comm = make(Policy("late", Rule((hc.get_codec("int4"),), warmup_steps=2, min_bytes=0)))
    x = np.random.default_rng(ME).standard_normal(1000).astype(np.float32)
    want = np.sum([np.random.default_rng(r).standard_normal(1000).astype(np.float32) for r in range(P)], 0)
    errors = []
    for step in range(4):
        comm.step = step
        y = np.zeros_like(x)
        for _ in range(2):
            comm.Allreduce(x, y)
        errors.append(float(np.abs(y - want).max()))
    if P > 1:
        verdict(max(errors[:2]) < 1e-4 < min(errors[2:]), f"{errors}")
    verdict(calls(comm, "all_reduce") == 8)


def test_freed_and_timed_out():
    comm = communicator(timeout=0.3)
    x = np.ones(10, np.float32)
    comm.Allreduce(MPI.IN_PLACE, x)
    verdict(bool((x == P).all()))
    with pytest.raises(
        CollectiveTimeoutError, match=rf"recv .*rank {ME} of {P}.*did not end within the timeout of 0.3 s"
    ):
        comm.Recv(x, LEFT, 5)
    WORLD.Barrier()  # nobody sends before all have given up
    # The receive was cancelled: this message is for the next one.
    y = np.zeros(10, np.float32)
    other = comm.Irecv(y, LEFT, 5)
    comm.Send(x, RIGHT, 5)
    other.wait(10)
    verdict(bool((y == P).all()))
    comm.Free()


def test_a_message_without_room(make):
    if P == 1:
        return
    comm = make("none")
    if ME == 0:
        comm.Send(np.ones(100, np.float32), 1, 0)
    elif ME == 1:
        with pytest.raises(MismatchError, match="rank 0 sent more than this rank has room for"):
            comm.Recv(np.ones(10, np.float32), 0, 0)
    comm.Barrier()


def test_arrays_that_are_not_plain(make):
    """Unaligned, overlapping, read-only, of another type: as everywhere."""
    comm = make("none")
    base = np.zeros(200, np.float32)
    strided, want = base[::2], np.full(100, float(P), np.float32)
    with pytest.raises(BufferError, match="not contiguous"):  # mpi4py's own answer
        comm.Allreduce(np.ones(100, np.float32), strided)
    verdict(not base.any())
    unaligned = np.zeros(401, np.uint8)[1:].view(np.float32)
    comm.Allreduce(np.ones(100, np.float32), unaligned)
    verdict(np.array_equal(unaligned, want), "unaligned")
    both = np.ones(150, np.float32)
    comm.Allreduce(both[:100], both[50:])
    verdict(np.array_equal(both[50:], want), "overlapping")
    given = np.ones(100, np.float32)
    given.flags.writeable = False
    comm.Allreduce(given, unaligned)
    verdict(np.array_equal(unaligned, want), "from a read-only array")
    with pytest.raises((ValueError, BufferError)):
        comm.Allreduce(unaligned, given)
    comm.Allreduce(given.astype(np.int64), counted := np.zeros(100, np.int64))
    verdict(bool((counted == P).all()), "integers")

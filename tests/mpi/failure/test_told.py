"""A rank that has ended an operation that fails elsewhere, or starts one that has failed, is told."""

from __future__ import annotations

import time

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.collectives.execution.progress import engine
from hybridcomp.collectives.failure.notices import _BYTES, _FORM, _MAGIC, TAG, _NoticeType
from tests.mpi.conftest import WORLD, gaussian, identical, verdict
from tests.mpi.failure.test_failure import N, damaged, failure

__all__ = ["damaged"]


@pytest.mark.usefixtures("damaged")
def test_who_has_ended_an_operation_that_fails_elsewhere_is_told_in_the_next(make):
    if WORLD.size == 1:
        return
    comm = make("int8")
    x = gaussian(1000, 0)
    if WORLD.rank:
        WORLD.Barrier()  # what they find must not reach the root before it has ended
    first = failure(comm.Ibcast(x, 0, codec="int8"))  # its root has nobody to wait for
    if not WORLD.rank:
        WORLD.Barrier()
    verdict(
        first is None if WORLD.rank == 0 else WORLD.rank != 1 or isinstance(first, hc.WireError), repr(first)
    )
    began = time.monotonic()
    second = failure(comm.Iallreduce(MPI.IN_PLACE, gaussian(N)))
    # Each rank has failed by itself, or is told by one that has.
    named = "rank 1 failed in number 1, which had ended well on rank"
    verdict(first is not None or (isinstance(second, hc.RemoteError) and named in str(second)), repr(second))
    verdict(time.monotonic() - began < 10)
    y = gaussian(N, seed=2)  # once told, it goes on
    comm.Allreduce(MPI.IN_PLACE, y)
    verdict(identical(y))


def test_a_quick_operation_is_not_done_by_who_is_still_to_be_told(make):
    if WORLD.size == 1:
        return
    comm = make("none")
    x = np.ones(10, np.float32)
    comm.Allreduce(MPI.IN_PLACE, x)
    WORLD.Barrier()  # all have ended it
    notices = comm.session.notices
    if WORLD.rank == 1:
        notices.tell(1, hc.WireError("made up"))
    deadline = time.monotonic() + 10
    while WORLD.rank != 1 and notices.belated is None and time.monotonic() < deadline:
        time.sleep(0.01)  # the progress thread looks ten times a second
    WORLD.Barrier()
    try:
        comm.Allreduce(MPI.IN_PLACE, x)
        error = None
    except hc.RemoteError as told:
        error = told
    verdict(WORLD.rank == 1 or (error is not None and "made up" in str(error)), repr(error))


def test_a_notice_that_came_while_nobody_waited_is_not_forgotten(make):
    """The progress thread may look just before an operation starts to wait: what it took in is for that, too."""
    if WORLD.size == 1:
        return
    comm = make("int8")
    notices = comm.session.notices
    comm.Barrier()
    if WORLD.rank != 0:
        request = comm.Iallreduce(MPI.IN_PLACE, gaussian(N))  # rank 0 does not start it
        with engine().lock:
            assert not request.done
            WORLD.Barrier()
            while not notices.comm.Iprobe(0, TAG):
                time.sleep(0.001)
            # As `_listen_idle` does, which holds the lock when it looks.
            while not notices.failures:
                notices.poll()
    else:
        WORLD.Barrier()
        words = b"WireError: made up"
        head = _FORM.pack(_MAGIC, _NoticeType.FAILED, 0, len(words), notices.key, 2, 2)
        raw = (head + words).ljust(_BYTES, b"\0")
        for rank in range(1, WORLD.size):
            notices.comm.Isend([raw, MPI.BYTE], rank, TAG).Wait()
        request = None
    began = time.monotonic()
    error = None if request is None else failure(request, 10.0)
    verdict(WORLD.rank == 0 or (isinstance(error, hc.RemoteError) and "made up" in str(error)), repr(error))
    verdict(time.monotonic() - began < 5)


@pytest.mark.parametrize("policy", ["none", "int8"])
@pytest.mark.parametrize("erring", ["first", "last"])
def test_who_has_refused_what_others_have_begun_takes_part_in_nothing_more(make, policy, erring):
    """Its next broadcast would meet the one that it has refused: it received that one's values, without a word."""
    if WORLD.size == 1:
        return
    comm = make(policy, timeout=10.0)
    alone = 0 if erring == "first" else WORLD.size - 1
    x = gaussian(1000, 0)
    WORLD.Barrier()
    caught: list[BaseException | None] = []
    for k in range(3):
        y = x + k if WORLD.rank == 0 else np.zeros_like(x)
        try:
            comm.Bcast("no buffer" if k == 0 and WORLD.rank == alone else y, 0)
            caught.append(None)
            verdict_here = bool(np.abs(y - (x + k)).max() < 0.1)
        except (hc.HybridcompError, TypeError) as error:
            caught.append(error)
            verdict_here = True
        verdict(verdict_here, f"values of broadcast {k}")
    if WORLD.rank == alone:
        good = isinstance(caught[0], TypeError) and all(isinstance(e, hc.MismatchError) for e in caught[1:])
        verdict(good and "make a new communicator" in str(caught[1]), repr(caught))
    else:
        # A root waits for nobody: what it began before it heard has ended well, and what needs all ranks cannot.
        if not any(caught):
            try:
                comm.Barrier()
            except hc.HybridcompError as error:
                caught.append(error)
        verdict(any(isinstance(error, hc.RemoteError) for error in caught), repr(caught))


def test_who_has_refused_waits_until_the_others_have_refused_too(make):
    if WORLD.size == 1:
        return
    comm = make("none")
    for k in range(3):
        if WORLD.rank == 0:
            time.sleep(0.2)
        with pytest.raises(TypeError):
            comm.Bcast("no buffer", 0)
        x = np.full(10, float(WORLD.rank + k), np.float32)
        comm.Bcast(x, 0)
        verdict(bool((x == k).all()), x[0])
    verdict(not comm.failed)


def test_a_notice_taken_in_while_compiled_code_runs_the_operation_is_not_lost(make):
    if WORLD.size == 1:
        return
    comm = make("none")
    x = np.ones(10, np.float32)
    comm.Allreduce(MPI.IN_PLACE, x)
    notices = comm.session.notices
    if WORLD.rank == 1:
        notices.tell(2, hc.WireError("made up"))
    WORLD.Barrier()
    deadline = time.monotonic() + 10
    while WORLD.rank != 1 and not notices.failures and time.monotonic() < deadline:
        time.sleep(0.01)  # of an operation that has not begun here
    comm.session.started += 1  # as compiled code counts it, once it has ended
    notices.latest = comm.session.started
    error = None
    try:
        comm.Allreduce(MPI.IN_PLACE, x)
    except hc.RemoteError as told:
        error = told
    verdict(WORLD.rank == 1 or (error is not None and "made up" in str(error)), repr(error))

"""An operation that fails on one rank ends on all, with an error that says what and where."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.collectives.engine.groups import native_engine
from hybridcomp.collectives.failure.notices import _BYTES, _FORM, _MAGIC, TAG, State, _NoticeType
from hybridcomp.collectives.transport.mpi import MpiTransport
from hybridcomp.variables import SHARED_MEMORY
from tests.mpi.conftest import WORLD, gaussian, identical, step_by_step, verdict

N = 50_000


@pytest.fixture
def damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first message of at least 1 KiB that rank 0 sends to rank 1 arrives with a bit turned."""
    monkeypatch.setenv(SHARED_MEMORY.name, "0")
    if WORLD.rank == 0:
        native_engine().engine_damage(1, 1024)
    honest = MpiTransport.isend
    left = [1]

    def isend(self: MpiTransport, data: Any, peer: int, tag: int) -> MPI.Request:
        if WORLD.rank == 0 and peer == 1 and left and np.asarray(data).nbytes > 1024:
            left.pop()
            data = np.array(data)
            data[500] ^= 4
        return honest(self, data, peer, tag)

    monkeypatch.setattr(MpiTransport, "isend", isend)


def matches(pattern: str, error: BaseException | None) -> bool:
    return re.search(pattern, str(error)) is not None


def failure(request: Any, timeout: float | None = None) -> BaseException | None:
    try:
        request.wait(timeout)
    except hc.HybridcompError as error:
        return error
    return None


@pytest.mark.usefixtures("damaged")
def test_damage_is_an_error_on_all_ranks_at_once(make):
    if WORLD.size == 1:
        return
    comm = make("int8")
    x = gaussian(N)
    WORLD.Barrier()
    began = time.monotonic()
    error = failure(comm.Iallreduce(MPI.IN_PLACE, x, algorithm="direct"))  # all ranks need the message
    took = time.monotonic() - began
    if WORLD.rank == 1:
        verdict(isinstance(error, hc.WireError), repr(error))
        verdict(error.__notes__ == [f"in all_reduce number 1 on axis 'dp', rank 1 of {WORLD.size}"])
    else:
        text = "all_reduce number 1 on axis 'dp'.*rank 1 failed: WireError"
        verdict(isinstance(error, hc.RemoteError) and matches(text, error), repr(error))
        verdict(True)
    verdict(took < 15, f"{took}")
    y = gaussian(N, seed=2)  # the communicator goes on
    comm.Allreduce(MPI.IN_PLACE, y)
    verdict(identical(y))


@pytest.mark.usefixtures("damaged")
def test_who_starts_a_failed_operation_later_is_told(make):
    if WORLD.size == 1:
        return
    comm = make("int8")
    if WORLD.rank == WORLD.size - 1 and WORLD.size > 2:
        time.sleep(0.5)
    error = failure(comm.Iallreduce(MPI.IN_PLACE, gaussian(N), algorithm="direct"))
    verdict(isinstance(error, hc.WireError if WORLD.rank == 1 else hc.RemoteError), repr(error))


@pytest.mark.parametrize("policy", ["int8", "none"])
def test_a_timeout_names_number_and_who_has_not_arrived(make, policy):
    if WORLD.size == 1:
        return
    comm = make(policy, timeout=1.0)
    absent = WORLD.size - 1
    comm.Barrier()
    error = failure(comm.Iallreduce(MPI.IN_PLACE, gaussian(N))) if WORLD.rank != absent else None
    WORLD.Barrier()
    if WORLD.rank == absent:  # it comes to an operation that the others have given up, and has been told
        time.sleep(0.3)
        error = failure(comm.Iallreduce(MPI.IN_PLACE, gaussian(N)))
        verdict(isinstance(error, hc.CollectiveTimeoutError) and matches("gave up", error), repr(error))
    else:
        own = rf"all_reduce number 2 .* of 1 s; still waiting for .*; not arrived: rank {absent} \(at number 1\)$"
        told = rf"all_reduce number 2 .* rank \d gave up: .*not arrived: rank {absent} "
        verdict(
            isinstance(error, hc.CollectiveTimeoutError) and (matches(own, error) or matches(told, error)),
            repr(error),
        )


def test_one_that_hears_nothing_is_called_silent(make, monkeypatch):
    if WORLD.size == 1:
        return
    comm = make("int8", timeout=0.5)
    absent = WORLD.size - 1
    if WORLD.rank == absent:
        monkeypatch.setattr(comm.session.notices, "poll", lambda: False)
    WORLD.Barrier()
    error = failure(comm.Iallreduce(MPI.IN_PLACE, gaussian(N))) if WORLD.rank != absent else None
    WORLD.Barrier()
    monkeypatch.undo()
    verdict(WORLD.rank == absent or matches(rf"rank {absent} \(silent\)", error), repr(error))


def test_who_waits_in_compiled_code_tells_that_it_has_begun(make, monkeypatch):
    if WORLD.size == 1:
        return
    comm = make("int8")
    x = gaussian(N)
    comm.Allreduce(MPI.IN_PLACE, x)
    notices, number = comm.session.notices, comm.session.started + 1
    polled, states = notices.poll, []

    def poll() -> bool:
        if comm.session.started >= number:  # another thread may poll before
            states.append(notices._state(number))
        return polled()

    monkeypatch.setattr(notices, "poll", poll)
    WORLD.Barrier()
    late = WORLD.rank == WORLD.size - 1
    if late:
        time.sleep(0.07)
    comm.Allreduce(MPI.IN_PLACE, x)
    verdict(late or (len(states) > 1 and {*states} == {State.IN_FLIGHT}), repr(states))
    verdict(notices._state(number) is State.ENDED)


def test_a_rank_that_makes_no_communicator_is_waited_for_no_longer_than_the_timeout():
    if WORLD.size == 1:
        return
    absent = WORLD.size - 1
    if WORLD.rank != absent:
        with pytest.raises(
            hc.CollectiveTimeoutError, match=r"making a communicator on axis 'pp', rank \d of"
        ):
            hc.Communicator(WORLD, "none", "pp", timeout=0.5)
    verdict(True)
    if WORLD.rank == absent:  # MPI matches what the others have begun
        WORLD.Ibarrier().Wait()
    verdict(True)


def test_hostile_notices_change_nothing(make):
    if WORLD.size == 1:
        return
    comm = make("int8")
    notices = comm.session.notices
    rng = np.random.default_rng(WORLD.rank)
    good = _FORM.pack(_MAGIC, _NoticeType.FAILED, 0, 3, notices.key, 1, 1)
    for raw in (
        b"",
        rng.bytes(_BYTES),
        good[:20],
        good,
        _FORM.pack(_MAGIC, _NoticeType.FAILED, 0, 3, notices.key ^ 1, 1, 1).ljust(_BYTES, b"x"),
        _FORM.pack(_MAGIC, _NoticeType.FAILED, 0, 60_000, notices.key, 1, 1).ljust(_BYTES, b"x"),
        _FORM.pack(_MAGIC, _NoticeType.FAILED, 9, 3, notices.key, 1, 1).ljust(_BYTES, b"x"),
        _FORM.pack(_MAGIC, _NoticeType.ANSWER, State.ENDED, 0, notices.key, 1, 1).ljust(_BYTES, b"x"),
        _FORM.pack(_MAGIC, 77, 0, 0, notices.key, 1, 1).ljust(_BYTES, b"x"),
        rng.bytes(3 * _BYTES),
    ):
        notices.comm.Isend([raw, MPI.BYTE], (WORLD.rank + 1) % WORLD.size, TAG).Wait()
    x = gaussian(N)
    comm.Allreduce(MPI.IN_PLACE, x)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and notices.comm.Iprobe(MPI.ANY_SOURCE, TAG):
        time.sleep(0.01)
    comm.Allreduce(MPI.IN_PLACE, x)
    verdict(identical(x) and not notices.failures and not notices._replies)


@pytest.mark.parametrize("policy", ["none", "int8"])
def test_a_receive_that_mpi_gives_up_is_an_error(make, policy):
    comm = step_by_step(make(policy))  # receives are MPI's requests
    request = comm.Irecv(np.zeros(1000, np.float32), WORLD.rank, 9)
    (operation,) = request.operations
    while not operation.pending.requests:
        request.test()
    operation.pending.requests[0].Cancel()  # as MPICH does where a link is silent
    error = failure(request)
    verdict(
        "MPI has given up the receive from rank" in str(error) and "nobody has cancelled" in str(error),
        repr(error),
    )


def test_a_receive_can_be_cancelled(make):
    for policy in ("none", "int8"):
        comm = make(policy, timeout=5.0)
        x = np.zeros(N, np.float32)
        request = comm.Irecv(x, (WORLD.rank + 1) % WORLD.size, 5)
        verdict(request.cancel())
        request.wait()
        verdict(request.status is not None and request.status.Is_cancelled())
        verdict(not request.cancel())
        sent = comm.Isend(gaussian(N), (WORLD.rank - 1) % WORLD.size, 5)
        verdict(not sent.cancel())
        again = comm.Irecv(x, (WORLD.rank + 1) % WORLD.size, 5)
        again.wait()
        sent.wait()
        verdict(again.status is not None and not again.status.Is_cancelled() and bool(x.any()))
        summed = comm.Iallreduce(MPI.IN_PLACE, x)
        verdict(not summed.cancel())
        summed.wait()
        verdict(identical(x))

"""A first message to a rank that MPI does not come back from keeps nobody else, and ends in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.collectives.failure import contact
from hybridcomp.collectives.transport.mpi import MpiTransport
from tests.mpi.conftest import WORLD, gaussian, identical, step_by_step, verdict
from tests.mpi.failure.test_failure import N, failure

LAST = WORLD.size - 1


class Stuck:
    """A communicator whose sends to the last rank do not return until they may."""

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        self.back = threading.Event()

    def Isend(self, buffer: Any, peer: int, tag: int) -> MPI.Request:
        if peer == LAST:
            assert self.back.wait(60)
        return self._comm.Isend(buffer, peer, tag)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)


@pytest.fixture
def strangers(make: Callable[..., hc.Communicator], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A communicator of ranks that have had no message from each other, some of whose sends are stuck."""
    comm = make("int8", timeout=30.0)
    step_by_step(comm)  # the compiled engine has contacts of its own
    comm.Barrier()
    monkeypatch.setattr(contact, "_contacts", {})
    transports: list[MpiTransport] = [comm.session.transport, comm.session.message_transport]
    stuck = []
    for transport in transports:
        transport.contacts.met.clear()
        transport.comm = Stuck(transport.comm)  # type: ignore[assignment]
        stuck.append(transport.comm)
    yield comm, stuck
    for one in stuck:
        one.back.set()
    for thread in threading.enumerate():
        if thread.name == "hybridcomp-contact":
            thread.join(10)


def test_who_is_gone_before_the_first_message_is_named_in_time(strangers):
    if WORLD.size < 3:
        return
    comm, _ = strangers
    comm.timeout = 1.0
    error, took = None, 0.0
    if WORLD.rank != LAST:
        began = time.monotonic()
        error = failure(comm.Iallreduce(MPI.IN_PLACE, gaussian(N)))
        took = time.monotonic() - began
    words = f"not arrived: rank {LAST} (at number 1)"
    good = isinstance(error, hc.CollectiveTimeoutError) and words in str(error) and took < 5
    verdict(WORLD.rank == LAST or good, f"{error!r} {took}")


def test_a_send_to_who_is_gone_names_it_and_the_quick_way_is_not_taken(strangers):
    if WORLD.size == 1:
        return
    comm, _ = strangers
    comm.timeout = 0.5
    error: BaseException | None = None
    began = time.monotonic()
    if WORLD.rank != LAST:
        try:
            comm.Send(np.ones(3, np.int32), LAST, 5)
        except hc.CollectiveTimeoutError as late:
            error = late
    took = time.monotonic() - began
    verdict(WORLD.rank == LAST or (f"still waiting for rank {LAST}" in str(error) and took < 5), f"{error!r}")


def test_messages_that_are_started_late_arrive_in_order(strangers):
    if WORLD.size == 1:
        return
    comm, stuck = strangers
    x = gaussian(N)
    requests = [comm.Iallreduce(MPI.IN_PLACE, x)]
    got = np.zeros((3, 4), np.int32)
    if WORLD.rank == 0:
        requests += [comm.Isend(np.full(4, i, np.int32), LAST, 5) for i in range(3)]
    if WORLD.rank == LAST:
        requests += [comm.Irecv(row, 0, 5) for row in got]
    WORLD.Barrier()
    blocked = [request.test() for request in requests[:1]]
    WORLD.Barrier()  # all have looked: the operation goes on once one of them lets it
    for one in stuck:
        one.back.set()
    for request in requests:
        request.wait()
    verdict(identical(x) and blocked == [False])
    verdict(WORLD.rank != LAST or got.tolist() == [[i] * 4 for i in range(3)], str(got))
    met = comm.session.transport.contacts.met
    verdict(WORLD.rank == LAST or LAST in met or contact._contacts[LAST].met, str(met))

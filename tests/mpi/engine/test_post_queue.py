"""An operation that fails while it waits in line to be posted does not keep the line."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.codecs import get_codec
from hybridcomp.collectives.starting import Operands
from hybridcomp.collectives.transport.mpi import MpiTransport
from tests.mpi.conftest import WORLD, gaussian, step_by_step, verdict
from tests.mpi.failure.test_failure import failure

NEXT, BEFORE = (WORLD.rank + 1) % WORLD.size, (WORLD.rank - 1) % WORLD.size
N = 5000


@pytest.fixture
def broken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = type(get_codec("int8"))
    honest = codec.encode_flat
    left = [1]

    def encode_flat(self: Any, *given: Any, **more: Any) -> Any:
        if left:
            left.pop()
            raise MemoryError("made up")
        return honest(self, *given, **more)

    monkeypatch.setattr(codec, "encode_flat", encode_flat)


@pytest.mark.usefixtures("broken_once")
def test_a_send_that_fails_gives_its_place_to_the_next(make):
    if WORLD.size == 1:
        return  # it compresses nothing
    comm = make("none", timeout=5.0)
    with pytest.raises(MemoryError, match="made up"):
        comm.Send(gaussian(N), NEXT, 3, codec="int8")
    got = np.zeros(N, np.float32)
    received = comm.Irecv(got, BEFORE, 3, codec="int8")
    comm.Isend(gaussian(N), NEXT, 3, codec="int8").wait()
    received.wait()
    plain = np.zeros(N, np.float32)
    received = comm.Irecv(plain, BEFORE, 4)
    comm.Isend(gaussian(N), NEXT, 4).wait()
    received.wait()
    verdict(bool(np.allclose(got, gaussian(N, BEFORE), atol=0.05) and (plain == gaussian(N, BEFORE)).all()))


def test_after_a_collective_that_was_not_posted_the_next_fail_at_once(make, monkeypatch):
    """Otherwise the next would meet the one before it on the other ranks."""
    if WORLD.size == 1:
        return
    comm = make("none")
    step_by_step(comm)  # Python then widens 16-bit arrays
    half = gaussian(1000, dtype=np.float16)
    with monkeypatch.context() as patched:
        if WORLD.rank == 0:

            def broken(*_: Any) -> Any:
                raise MemoryError("made up")

            patched.setattr("hybridcomp.collectives.execution.mpi_collectives.widen", broken)
        began = time.monotonic()
        with pytest.raises(MemoryError if WORLD.rank == 0 else hc.RemoteError, match="made up"):
            comm.Iallreduce(MPI.IN_PLACE, half).wait()
    verdict(time.monotonic() - began < 10)
    for _ in range(2):
        error: BaseException | None = None
        try:
            error = failure(comm.Iallreduce(MPI.IN_PLACE, np.ones(1000, np.float32)))
        except hc.MismatchError as at_once:
            error = at_once
        verdict(isinstance(error, hc.MismatchError if WORLD.rank == 0 else hc.RemoteError), repr(error))
        verdict("started before this one has failed" in str(error), repr(error))
    verdict(time.monotonic() - began < 10)
    verdict(WORLD.rank != 0 or len(comm.session.transport.post_queue.tickets) == 1)


def test_an_operation_that_is_given_up_in_line_keeps_no_message_back(make):
    comm = make("none", timeout=0.5)

    class Never:
        def done(self) -> bool:
            return False

    transport: MpiTransport = comm.session.message_transport
    stuck = comm.session.start_native(
        lambda _s, _r, ticket, _e: (yield from ticket.post(lambda: MPI.REQUEST_NULL, [Never()])),
        comm.session.new_plain_call("send", 0, 0),
        Operands(),
        transport=transport,
    )
    error = failure(stuck)
    verdict(isinstance(error, hc.CollectiveTimeoutError), repr(error))
    comm.timeout = 30.0
    got = np.zeros(N, np.float32)
    received = comm.Irecv(got, BEFORE, 5)
    comm.Isend(gaussian(N), NEXT, 5).wait()
    received.wait()
    verdict(bool((got == gaussian(N, BEFORE)).all()) and transport.post_queue.empty)

"""Ctrl-C, and whatever else is raised in the middle of an operation or of a callback, leaves no operation half done."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.collectives.execution.progress import engine
from hybridcomp.collectives.execution.request import Request as Operation
from hybridcomp.collectives.execution.steps import Pending, Steps
from hybridcomp.collectives.requests import Request
from hybridcomp.collectives.transport.mpi import MpiTransport
from tests.mpi.conftest import WORLD, gaussian, identical, step_by_step, verdict

N = 1 << 21  # elements: 8 MiB


class Gate:
    open = False

    def done(self) -> bool:
        return self.open


class Later:
    """Request that is done at the third look of the main thread, which runs the next step."""

    def __init__(self) -> None:
        self.polls = 0

    def done(self) -> bool:
        self.polls += threading.current_thread() is threading.main_thread()
        return self.polls > 2 and threading.current_thread() is threading.main_thread()


def test_a_signal_in_a_step_is_answered_after_it():
    log = []

    def steps() -> Steps:
        yield Pending([], [], events=[Later()])
        signal.raise_signal(signal.SIGINT)
        log.append("the rest of the step")
        yield Pending([], [])
        log.append("the next")

    request = engine().start(steps(), "a test", 20.0)
    with pytest.raises(KeyboardInterrupt):
        request.wait()
    request.wait()
    verdict(log == ["the rest of the step", "the next"], str(log))
    verdict(signal.getsignal(signal.SIGINT) is signal.default_int_handler)


def interrupted(request: Any, seconds: float, number: int = signal.SIGINT) -> bool:
    """Wait for a request, with Ctrl-C or another signal after some time; return whether that came in the wait."""
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        time.sleep(seconds)
        signal.pthread_kill(main, number)

    thread = threading.Thread(target=interrupt)
    ended = False
    try:
        thread.start()
        request.wait()
        ended = True
        for _ in range(1000):  # the signal is on its way
            time.sleep(0.01)
    except (KeyboardInterrupt, SystemExit):
        return not ended
    raise AssertionError("the signal has not come")


def interrupt_often(comm: hc.Communicator, n: int, least: int) -> None:
    """Interrupt waits for all-reduces at random moments: every one goes on, and ends right."""
    want = gaussian(n)
    comm.Allreduce(MPI.IN_PLACE, want)
    began = time.monotonic()
    comm.Allreduce(MPI.IN_PLACE, gaussian(n))
    usual = time.monotonic() - began
    rng = np.random.default_rng(WORLD.rank)
    hits = tries = 0
    enough = WORLD.size == 1  # one rank's waits have nothing to wait for
    while tries < least or not enough:
        x = gaussian(n)
        request = comm.Iallreduce(MPI.IN_PLACE, x)
        hits += interrupted(request, rng.uniform(0, usual))
        request.wait()
        verdict(bool((x == want).all()))
        tries += 1
        enough = enough or WORLD.allreduce(hits) >= 8
        verdict(enough or tries < 200, f"{hits} of {tries} waits were interrupted")


def test_an_all_reduce_that_was_interrupted_goes_on_and_ends_right(make):
    interrupt_often(make("int8"), N, 30)


def test_what_is_thrown_into_a_step_reaches_its_thread_and_fails_the_operation_everywhere(make, monkeypatch):
    if WORLD.size == 1:
        return
    comm = make("int8")
    step_by_step(comm)  # a step of Python's
    honest = MpiTransport.isend
    left = [1] if WORLD.rank == 0 else []

    def isend(self: MpiTransport, data: Any, peer: int, tag: int) -> MPI.Request:
        if left:
            left.pop()
            raise KeyboardInterrupt
        return honest(self, data, peer, tag)

    monkeypatch.setattr(MpiTransport, "isend", isend)
    x = gaussian(50_000)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt if WORLD.rank == 0 else hc.RemoteError) as caught:
        comm.Iallreduce(MPI.IN_PLACE, x).wait()
    verdict(time.monotonic() - began < 10)
    verdict(WORLD.rank == 0 or "rank 0 failed: HybridcompError" in str(caught.value), str(caught.value))
    comm.Allreduce(MPI.IN_PLACE, x)
    verdict(identical(x))


def test_a_step_that_was_thrown_out_of_has_not_ended_well():
    def steps() -> Steps:
        yield Pending([], [], events=[Later()])
        raise SystemExit(3)

    request = engine().start(steps(), "a test", 20.0)
    with pytest.raises(SystemExit):
        request.wait()
    with pytest.raises(hc.HybridcompError, match=r"a test was stopped by SystemExit\(3\)"):
        request.wait()
    verdict(True)


@pytest.mark.parametrize("waits", [True, False], ids=["in a wait", "in the background"])
def test_a_callback_that_raises_keeps_no_other_from_running(monkeypatch, waits):
    reported: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda about: reported.append(about.exc_value))
    gate, ran, background = Gate(), threading.Event(), threading.Event()

    def steps() -> Steps:
        yield Pending([], [], events=[gate])

    def broken(_: object) -> None:
        raise ValueError("of a callback")

    request = engine().start(steps(), "a test", 20.0)
    request.add_done_callback(broken)
    request.add_done_callback(lambda _: ran.set())
    gate.open = True
    if waits:
        request.wait()
    verdict(ran.wait(10))
    verdict([str(error) for error in reported] == ["of a callback"], str(reported))
    again = engine().start(steps(), "another test", 20.0)  # by the same thread
    again.add_done_callback(lambda _: background.set())
    verdict(background.wait(10))


def ends_with(event: Any) -> Request:
    """Start an operation of this rank alone, which ends once the event is done."""

    def steps() -> Steps:
        yield Pending([], [], events=[event])

    return Request(engine().start(steps(), "a test", 20.0))


@pytest.mark.parametrize("late", [0, 1])
def test_callbacks_wait_for_others_where_nothing_else_makes_progress(make, late):
    """A callback waits for another operation, and for what the callback of a third does, in any thread.

    The third ends only after one rank's callback has started it, while all others wait for it.
    """
    comm, other, event, seen = make("none"), make("int8:block=64"), threading.Event(), []
    y, z = (np.ones(5000, np.float32) for _ in range(2))
    third = []

    def start_third() -> None:
        third.append(other.Iallreduce(MPI.IN_PLACE, z))
        third[0].add_done_callback(lambda _: event.set())

    def waits(_: object) -> None:
        comm.Iallreduce(MPI.IN_PLACE, y).wait()
        if WORLD.rank == late:
            start_third()
        seen.append(event.wait(20))

    gate = Gate()
    first = ends_with(gate)
    first.add_done_callback(waits)
    if WORLD.rank != late:
        start_third()
    gate.open = True
    if WORLD.rank % 2:
        first.wait()
        verdict(seen == [True], "a thread that waits returns only after the callbacks")
    else:
        while not first.test():
            time.sleep(1e-3)
        verdict(seen == [True], "an operation is done only after its callbacks")
    third[0].wait()
    verdict(bool(y[0] == WORLD.size))


@pytest.mark.parametrize("waits", [True, False], ids=["in a wait", "in the background"])
def test_a_callback_waits_for_the_next_one_of_its_request(waits):
    """Some thread looks for callbacks whose turn comes, whichever thread has taken the one that waits."""
    gate, event, seen, last = Gate(), threading.Event(), [], threading.Event()
    request = ends_with(Later() if waits else gate)
    request.add_done_callback(lambda _: seen.append(event.wait(10)))
    request.add_done_callback(lambda _: event.set())
    request.add_done_callback(lambda _: last.set())
    gate.open = True
    if not waits:
        last.wait(20)  # nothing polls, and takes callbacks, here
    request.wait()
    verdict(last.is_set() and seen == [True], str(seen))


def test_the_callbacks_of_an_interrupted_wait_are_left_to_another_thread():
    ran = threading.Event()

    def steps() -> Steps:
        yield Pending([], [], events=[Later()])
        signal.raise_signal(signal.SIGINT)

    request = Request(engine().start(steps(), "a test", 20.0))
    request.add_done_callback(lambda _: ran.set())
    with pytest.raises(KeyboardInterrupt):
        request.wait()
    verdict(ran.wait(10))


def test_a_request_whose_two_operations_end_in_two_threads_calls_back_once():
    """One thread stands still in the middle of its count of operations while the other one ends the last."""
    first, second = (Operation(engine(), iter(()), "a test", 20.0) for _ in range(2))
    request, ran = Request(first, second), []
    request.add_done_callback(ran.append)
    other = threading.Thread(target=second.run_callbacks)

    def let_other_pass(frame: Any, event: str, _: Any) -> None:
        if event == "c_return" and frame.f_code.co_name == "ended" and other.ident is None:
            other.start()
            other.join()

    def end() -> None:
        sys.setprofile(let_other_pass)
        first.run_callbacks()

    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    passed = other.ident is not None
    request.wait()
    verdict(passed and ran == [request], f"{passed}, {len(ran)} calls")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "what exits"])
def test_a_quick_operation_that_was_interrupted_goes_on(make, ends_by_sigterm, number):
    """A signal that comes while compiled code waits is answered as that returns, before its result is used."""
    comm = make("none")
    x = np.full(100, WORLD.rank, np.int64)
    comm.Allreduce(MPI.IN_PLACE, x)  # the quick way has learnt of it
    for late in range(min(2, WORLD.size)):
        x = np.full(100, WORLD.rank, np.int64)
        WORLD.Barrier()
        before = comm.session.started
        if WORLD.rank == late and WORLD.size > 1:
            time.sleep(0.1)  # the others are interrupted while they wait for this rank
        else:
            quick_interrupted(comm, x, 0.002, number)
        if comm.session.started == before:  # or before they have begun
            comm.Allreduce(MPI.IN_PLACE, x)
        engine().attend(lambda: not comm.busy)
        verdict(bool((x == sum(range(WORLD.size))).all()), str(x[:3]))
        verdict(len(set(WORLD.allgather(comm.session.started))) == 1, "numbers differ")
    y = gaussian(1000)
    comm.Allreduce(MPI.IN_PLACE, y, codec="int8")
    verdict(identical(y))


@pytest.fixture
def ends_by_sigterm() -> Iterator[None]:
    """SIGTERM raises SystemExit, as programs have it that want to clean up."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    yield
    signal.signal(signal.SIGTERM, before)


def quick_interrupted(comm: hc.Communicator, x: np.ndarray, seconds: float, number: int) -> None:
    """Do an operation, with a signal after some time."""

    class Doing:
        def wait(self) -> None:
            comm.Allreduce(MPI.IN_PLACE, x)

    interrupted(Doing(), seconds, number)

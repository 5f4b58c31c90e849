"""Waiting for MPI's requests in compiled code, the lock held meanwhile, the progress thread's alarm, and callbacks."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

from hybridcomp.collectives.execution.callbacks import Callback, Callbacks
from hybridcomp.collectives.execution.steps import Pending
from hybridcomp.collectives.execution.wait import PollingLock
from hybridcomp.native import kernels
from hybridcomp.pmi.library import address

HOW = {"least": 20e-6, "most": 1e-3, "share": 1 / 16}


@pytest.fixture
def message():
    """Yield a receive that no message has reached, and a function that sends one, called in the end at the latest."""
    comm = MPI.COMM_SELF.Dup()
    request = comm.Irecv(np.empty(1), 0, 5)
    sent: list[MPI.Request] = []

    def send() -> None:
        if not sent:
            sent.append(comm.Isend(np.ones(1), 0, 5))

    yield request, send
    send()
    MPI.Request.Waitall([request, *sent])
    comm.Free()


def operation(request: MPI.Request, **more) -> SimpleNamespace:
    return SimpleNamespace(pending=Pending([request], [0], **more), arrived=0)


def test_it_waits_until_the_time_is_over_or_the_message_is_there(message):
    request, send = message
    wait = kernels().MpiWait(address("MPI_Request_get_status"))
    handles, brief = [MPI._handleof(request)], 1e-4
    began = time.monotonic()
    assert not wait.wait(handles, 0.0, brief, longest=0.05, **HOW)
    assert 0.05 <= time.monotonic() - began < 2
    timer = threading.Timer(0.05, send)
    timer.start()
    assert wait.wait(handles, 0.0, brief, longest=20.0, **HOW)
    assert 0.05 <= time.monotonic() - began < 10
    timer.join()
    assert request != MPI.REQUEST_NULL  # left to the caller that tests it
    assert request.Test()


def test_who_wants_the_lock_need_not_wait_for_a_message(message):
    request, _ = message
    lock = PollingLock()
    with lock:  # makes the compiled part
        lock.wait([operation(request)], 0.0, longest=0.0, **HOW)
    took: list[float] = []

    def other() -> None:
        began = time.monotonic()
        with lock:
            took.append(time.monotonic() - began)

    thread = threading.Thread(target=other)
    with lock:
        thread.start()
        assert lock.wait([operation(request)], 0.0, longest=20.0, **HOW)
    thread.join()
    assert took[0] < 10


def test_what_waits_for_more_than_messages_is_not_for_it(message):
    request, _ = message
    lock = PollingLock()
    polled = operation(request, poll=lambda: False)
    arrived = SimpleNamespace(pending=Pending([request], [0]), arrived=1)
    with lock:
        for active in ([], [polled], [operation(request), arrived]):
            assert not lock.wait(active, 0.0, longest=20.0, **HOW)


def test_an_address_is_needed():
    with pytest.raises(ValueError, match="MPI_Request_get_status"):
        kernels().MpiWait(0)


def test_an_alarm_wakes_who_sleeps_and_who_dozes():
    alarm = kernels().Alarm(1e-3, 0.05)
    for before in (0.1, 0.01, 0.0):  # asleep, dozing after that ring, and not yet waiting
        timer = threading.Timer(before, alarm.ring)
        began = time.monotonic()
        timer.start()
        assert alarm.wait(20.0)
        assert time.monotonic() - began < 10
        timer.join()


def test_a_ring_is_for_one_wait_and_stopping_for_all():
    alarm = kernels().Alarm(1e-3, 3e-3)
    began = time.monotonic()
    assert not alarm.wait(0.02)
    assert 0.02 <= time.monotonic() - began < 5
    alarm.ring()
    alarm.ring()
    assert alarm.wait(20.0)
    assert not alarm.wait(0.0)
    alarm.stop()
    for _ in range(3):
        assert alarm.wait(20.0)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("beside", [False, True])
def test_a_callback_may_wait_for_what_the_next_one_does(beside, threads):
    """Give the next callback a thread, whether it came before or after a thread looked."""
    callbacks = Callbacks()
    within = Callback(lambda: None) if beside else None
    if threads:  # which is idle, and still counts as idle until it has woken
        callbacks.submit(lambda: None, None)
        time.sleep(0.05)
    done, waited = threading.Event(), []
    calls = [
        callbacks.submit(lambda: waited.append(done.wait(10)), None, within),
        callbacks.submit(done.set, None, within),
    ]
    deadline = time.monotonic() + 20
    while not all(call.ended for call in calls) and time.monotonic() < deadline:
        time.sleep(1e-3)
    callbacks.stop()
    assert waited == [True]


def test_many_callbacks_take_few_threads():
    callbacks, count, order = Callbacks(), 5_000, []
    for i in range(count):
        last = callbacks.submit(lambda i=i: order.append(i), None)
    deadline = time.monotonic() + 20
    while not last.ended and time.monotonic() < deadline:
        time.sleep(1e-3)
    callbacks.stop()
    assert order == [*range(count)]
    assert len(callbacks._threads) <= 4


GIVEN_UP = """
import atexit
import numpy as np
from mpi4py import MPI
from hybridcomp.collectives.execution.progress import engine
from hybridcomp.collectives.execution.steps import Pending
from hybridcomp.errors import CollectiveTimeoutError

late = MPI.COMM_WORLD.Irecv(np.zeros(1), 0, 5)
atexit.register(lambda: print("MPI has freed it:", late == MPI.REQUEST_NULL))  # runs after the engine's
def steps():
    yield Pending([late], [-1])
try:
    engine().start(steps(), "a receive", 0.05).wait()
except CollectiveTimeoutError:
    MPI.COMM_WORLD.Send(np.ones(1), 0, 5)
"""


def test_what_was_given_up_and_has_ended_since_is_freed_at_exit():
    done = subprocess.run(
        [sys.executable, "-c", GIVEN_UP], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "MPI has freed it: True" in done.stdout
    assert "pending" not in done.stderr  # MPICH tells of communicators that something still uses

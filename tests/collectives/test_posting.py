"""Calls that tell other ranks of trouble come back though MPI does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from mpi4py import MPI

from hybridcomp.collectives.failure import blocked
from hybridcomp.collectives.failure.contact import Contact
from hybridcomp.collectives.failure.posting import Outbox

pytestmark = pytest.mark.timeout(30)


class Request:
    def __init__(self, tests: int) -> None:
        self.tests = tests

    def Test(self) -> bool:
        self.tests -= 1
        return self.tests < 0


class Comm:
    """Communicator that sends to all ranks but those that are gone, to which it does not return; it refuses some."""

    def __init__(self, gone: set[int], refused: set[int]) -> None:
        self.gone, self.refused = gone, refused
        self.sent: list[tuple[int, bytes]] = []
        self.requests: list[Request] = []
        self.back = threading.Event()

    def Isend(self, buffer: tuple[bytes, object], rank: int, tag: int) -> Request:
        if rank in self.gone:
            self.back.wait()
        if rank in self.refused:
            raise MPI.Exception(MPI.ERR_RANK)
        self.sent.append((rank, bytes(buffer[0])))
        self.requests.append(Request(2))
        return self.requests[-1]


@pytest.fixture
def comm() -> Iterator[Comm]:
    comm = Comm(gone={2, 5}, refused={3})
    yield comm
    comm.back.set()


def test_ranks_that_are_gone_keep_nobody_from_the_others(comm: Comm) -> None:
    outbox = Outbox(comm)
    outbox.post(b"x", [1, 2, 3, 4, 5], 0)
    assert comm.sent == [(1, b"x"), (4, b"x")]
    assert not outbox.leave()  # MPI still works on the communicator
    comm.back.set()
    for _ in range(200):
        if outbox.leave():
            break
        time.sleep(0.01)
    assert outbox.leave()
    assert sorted(comm.sent) == [(1, b"x"), (2, b"x"), (4, b"x"), (5, b"x")]


def test_the_number_of_threads_left_behind_is_bounded(comm: Comm) -> None:
    outbox = Outbox(comm)
    before = threading.active_count()
    for _ in range(20):
        outbox.post(b"x", [2, 5], 0)
    assert threading.active_count() - before == 4
    assert comm.sent == []


def test_what_is_sent_is_let_go(comm: Comm) -> None:
    outbox = Outbox(comm)
    outbox.post(b"x", [1, 4], 0)
    assert outbox.leave()
    for _ in range(5):
        outbox.poll()
    assert [request.tests for request in comm.requests] == [-1, -1]


def test_what_there_was_no_thread_for_is_sent_later(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    outbox = Outbox(comm)
    monkeypatch.setattr(threading.Thread, "start", start)
    outbox.post(b"x", [1, 4], 0)
    outbox.poll()
    assert comm.sent == []
    monkeypatch.undo()
    outbox.poll()
    assert comm.sent == [(1, b"x"), (4, b"x")]


def test_a_first_message_that_no_thread_could_send_is_never_sent(
    comm: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    contact = Contact()
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="new thread"):
        contact.post(lambda: comm.Isend((b"lost", None), 1, 0))
    monkeypatch.undo()
    contact.post(lambda: comm.Isend((b"x", None), 1, 0))
    assert comm.sent == [(1, b"x")]


def test_a_thread_that_dies_before_it_runs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that finds no memory for its first steps dies so; Python's own start does not return then."""
    ran: list[str] = []
    late: list[Callable[[], None]] = []
    monkeypatch.setattr(blocked, "_START_LOOKS", 1)
    for name in ("_start_new_thread", "_start_joinable_thread"):  # the names in Python to 3.12, and later
        monkeypatch.setattr(threading, name, lambda run, *_, **__: late.append(run), raising=False)
    thread = blocked.Thread("late", lambda: ran.append("late"))
    with pytest.raises(RuntimeError, match="does not run"):
        thread.start()
    monkeypatch.undo()
    thread.run()
    assert late
    assert ran == []
    thread = blocked.start_thread("good", "a test", lambda: ran.append("good"))
    thread.join(10)
    assert ran == ["good"]

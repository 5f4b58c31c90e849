"""Operations that compiled code starts, and that nobody waits for yet: as quick as they are right."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp import trace
from hybridcomp.collectives.execution.progress import engine
from hybridcomp.collectives.operations import flat_gather_scatter, flat_p2p, flat_reductions
from hybridcomp.collectives.session import Session
from hybridcomp.collectives.stats import Call, StatRow
from tests.mpi.conftest import WORLD, gaussian, identical, relative_error, total, verdict
from tests.mpi.failure.test_interrupts import interrupted

P, ME = WORLD.size, WORLD.rank
RIGHT, LEFT = (ME + 1) % P, (ME - 1) % P
N = 6000  # elements, which ranks up to five share evenly
LATE = 0.05  # seconds: far more than the compiled module looks
_USUAL = {
    flat_reductions: ["allreduce", "reduce_scatter_block", "barrier"],
    flat_gather_scatter: ["allgather", "alltoallv", "bcast"],
    flat_p2p: ["send", "recv"],
}

Usual = Callable[[hc.Communicator], hc.Communicator]


@pytest.fixture
def quick(make, monkeypatch: pytest.MonkeyPatch) -> Callable[..., hc.Communicator]:
    """Make a communicator of which each rank has met the others, and whose usual way is closed."""

    made: list[hc.Communicator] = []

    def closed(module: Any, name: str) -> None:
        honest = getattr(module, name)

        def start(session: Session, *args: Any, **about: Any) -> Any:
            assert all(session is not comm.session for comm in made), "the usual way"
            return honest(session, *args, **about)

        monkeypatch.setattr(module, name, start)

    for module, names in _USUAL.items():
        for name in names:
            closed(module, name)

    def factory(policy: Any = "none", **about: Any) -> hc.Communicator:
        comm = make(policy, **about)
        meet(comm)
        made.append(comm)
        return comm

    return factory


def meet(comm: hc.Communicator) -> None:
    one = np.zeros(2, np.int32)
    for distance in range(P):
        received = comm.Irecv(one, (ME - distance) % P, 99)
        comm.Isend(np.ones(2, np.int32), (ME + distance) % P, 99).wait()
        received.wait()


def every(comm: Any, codec: str | None) -> list[tuple[str, list[Any], np.ndarray, np.ndarray]]:
    """Start each operation; return its name, its requests, its result, and what that should be."""
    x, ours = gaussian(N), {} if codec is None or P == 1 else {"codec": codec}  # one rank has no messages
    n = N // P
    share = slice(ME * n, (ME + 1) * n)
    parts = np.concatenate([gaussian(N, r)[share] for r in range(P)])
    started = []

    def begin(name: str, start: Callable[[], list[Any]], got: np.ndarray, want: np.ndarray) -> None:
        started.append((name, start(), got, want))

    y = np.zeros(N, np.float32)
    begin("all_reduce", lambda: [comm.Iallreduce(x, y, **ours)], y, total(N))
    z = x.copy()
    begin("all_reduce in place", lambda: [comm.Iallreduce(MPI.IN_PLACE, z, **ours)], z, total(N))
    s = np.zeros(n, np.float32)
    begin("reduce_scatter", lambda: [comm.Ireduce_scatter_block(x[: n * P], s, **ours)], s, total(N)[share])
    g = np.zeros(N * P, np.float32)
    begin(
        "all_gather",
        lambda: [comm.Iallgather(x, g, **ours)],
        g,
        np.concatenate([gaussian(N, r) for r in range(P)]),
    )
    e = np.zeros(n * P, np.float32)
    begin("all_to_all", lambda: [comm.Ialltoall(x[: n * P], e, **ours)], e, parts)
    root = P - 1
    b = gaussian(N, root) if root == ME else np.zeros(N, np.float32)
    begin("broadcast", lambda: [comm.Ibcast(b, root, **ours)], b, gaussian(N, root))
    begin("barrier", lambda: [comm.Ibarrier()], b, gaussian(N, root))
    r = np.zeros(N + 5, np.float32)
    begin(
        "message",
        lambda: [comm.Irecv(r, LEFT, 7, **ours), comm.Isend(x, RIGHT, 7, **ours)],
        r[:N],
        gaussian(N, LEFT),
    )
    return started


def wrong(started: list[tuple[str, list[Any], np.ndarray, np.ndarray]], codec: str | None) -> str:
    """Wait for all of them, the last first; return what is wrong."""
    for _, requests, _, _ in reversed(started):
        for request in reversed(requests):
            request.wait()
    allowed = 1e-4 if codec is None else 0.02 * P
    off = {name: float(np.abs(got - want).max()) for name, _, got, want in started}
    return ", ".join(f"{name} is off by {by}" for name, by in off.items() if by > allowed)


def told(rows: list[StatRow]) -> list[tuple[Any, ...]]:
    """Return what rows say but for seconds, which depend on the machine."""
    return [
        (*row.key, row.calls, row.raw_bytes, row.plain_bytes, row.wire_bytes, row.shared_bytes)
        for row in rows
    ]


@pytest.mark.parametrize("codec", [None, "int8"])
def test_what_is_started_natively_ends_right_and_is_counted_as_the_usual_way_counts(quick, make, codec):
    comm, usual = quick("none"), make("none")
    usual.on_start = lambda call: None  # no native start calls it
    meet(usual)
    for i in range(3):
        problem = wrong(every(comm, codec), codec) or wrong(every(usual, codec), codec)
        verdict(not problem, f"{i}: {problem}")
    verdict(told(comm.stats()) == told(usual.stats()), f"{told(comm.stats())}\n{told(usual.stats())}")
    verdict(all(row.wire_seconds >= 0 for row in comm.stats()))
    verdict(len(set(WORLD.allgather(comm.session.started))) == 1, "numbers differ")


def test_bits_are_those_of_the_usual_way(quick, make):
    comm, usual = quick("int8"), make("int8")
    usual.on_start = lambda call: None
    for n in (1, 7, 1000, 100_000):
        x, y = gaussian(n), gaussian(n)
        requests = [comm.Iallreduce(MPI.IN_PLACE, x), usual.Iallreduce(MPI.IN_PLACE, y)]
        MPI.Request.Waitall(requests)
        verdict(x.tobytes() == y.tobytes() and identical(x), f"{n}")


def test_a_start_is_seen_by_on_start_and_by_a_trace(make, tmp_path):
    comm = make("none")
    x, y = gaussian(N), np.zeros(N, np.float32)
    comm.Iallreduce(x, y).wait()
    seen: list[Call] = []
    comm.on_start = seen.append
    comm.Iallreduce(x, y).wait()
    comm.Allreduce(x, y)  # another way, which is blocking
    comm.on_start = None
    verdict([(call.op, call.raw_bytes) for call in seen] == [("all_reduce", 4 * N)] * 2, str(seen))
    request = comm.Iallreduce(x, y)
    trace.start(tmp_path / f"{ME}")
    try:
        request.wait()
        comm.Iallreduce(x, y, name="of a trace").wait()
        comm.Allreduce(x, y)
        assert trace.recorder is not None
        spans = [span for span in trace.recorder._spans if span.name == "all_reduce"]
    finally:
        trace.stop()
    # Operations that began before the trace are not in it.
    verdict([span.args.get("name") for span in spans] == ["of a trace", None], str(spans))
    verdict(sum(row.calls for row in comm.stats()) == 6, str(comm.stats()))


def test_who_does_not_come_is_named(make):
    if P == 1:
        return
    comm = make("none")
    x, y = gaussian(N), np.zeros(N, np.float32)
    comm.Iallreduce(x, y).wait()
    comm.timeout = 0.3
    if ME:
        with pytest.raises(
            hc.CollectiveTimeoutError,
            match=rf"all_reduce number 2 on axis 'dp', rank {ME} of {P} .*not arrived: .*rank 0 \(at number 1\)",
        ):
            comm.Iallreduce(x, y).wait()
    else:
        engine().attend(lambda: comm.session.notices.troubled)  # the others ask
    WORLD.Barrier()
    got = np.zeros(4, np.float32)
    request = comm.Irecv(got, LEFT, 3)
    verdict(not request.test() and request.cancel() and request.status.Is_cancelled(), "cancelled")


def test_callbacks_and_requests_of_mpi(quick):
    comm = quick("int8")
    x = gaussian(N)
    ended: list[Any] = []
    request = comm.Iallreduce(MPI.IN_PLACE, x)
    request.add_done_callback(ended.append)
    began = time.monotonic()
    while not ended and time.monotonic() - began < 10:
        time.sleep(0.001)  # the background thread ends it
    verdict(ended == [request] and request.done and request.exception is None)
    a, b = gaussian(100), gaussian(100)
    theirs = WORLD.Iallreduce(MPI.IN_PLACE, b)
    MPI.Request.Waitall([comm.Iallreduce(MPI.IN_PLACE, a, codec="none"), theirs])
    verdict(bool(np.allclose(a, b)))


def test_a_request_in_flight_does_not_send_others_the_long_way(quick):
    comm = quick("none")
    got, sums = np.zeros(50, np.int64), np.zeros(50, np.int64)
    open_request = comm.Irecv(got, LEFT, 11)
    for _ in range(3):
        comm.Allreduce(np.full(50, ME, np.int64), sums)
        comm.Barrier()
    comm.Send(np.full(50, ME, np.int64), RIGHT, 11)
    open_request.wait()
    verdict(bool((got == LEFT).all() and (sums == P * (P - 1) // 2).all()))
    verdict(open_request.status.Get_source() == LEFT and open_request.status.Get_count(MPI.INT64_T) == 50)


@pytest.mark.parametrize("codec", [None, "int8"])
@pytest.mark.parametrize("late", range(min(P, 2)))
def test_an_exchange(quick, codec, late):
    comm = quick("none")
    ours = {} if codec is None or P == 1 else {"codec": codec}
    for i in range(4):
        got, status = np.zeros(N + 3, np.float32), MPI.Status()
        if late == ME and i % 2:
            time.sleep(LATE)
        comm.Sendrecv(gaussian(N), RIGHT, i, got, LEFT, i, status, **ours)
        off = float(np.abs(got[:N] - gaussian(N, LEFT)).max())
        verdict(off <= (0.05 if codec else 0) and not got[N:].any(), f"{i}: {off}")
        verdict((status.Get_source(), status.Get_tag(), status.Get_count(MPI.FLOAT)) == (LEFT, i, N))
    counted = {row.op: row.raw_bytes // (4 * N) for row in comm.stats() if row.raw_bytes > 4 * N}
    verdict(counted == {"send": 4, "recv": 4}, str(counted))


def test_an_exchange_that_goes_wrong(make):
    comm = make("none")
    meet(comm)
    small = np.zeros(10, np.float32)
    with pytest.raises(hc.MismatchError, match=f"rank {LEFT} sent more than this rank has room for"):
        comm.Sendrecv(gaussian(100), RIGHT, 0, small, LEFT, 0)
    comm.timeout = 0.3
    with pytest.raises(
        hc.CollectiveTimeoutError, match=rf"recv number \d+ on axis 'dp', rank {ME} of {P} did"
    ):
        comm.Sendrecv(gaussian(100), RIGHT, 1, small, LEFT, 2)
    comm.timeout = 30.0
    got = np.zeros(100, np.float32)
    comm.Recv(got, LEFT, 1)
    verdict(bool((got == gaussian(100, LEFT)).all()))
    got = np.zeros(100, np.float32)
    with pytest.raises(MPI.Exception):  # the send has no such tag; the receive goes on
        comm.Sendrecv(gaussian(100), RIGHT, -5, got, LEFT, 4)
    comm.Send(gaussian(100), RIGHT, 4)
    began = time.monotonic()
    while not got.any() and time.monotonic() - began < 10:
        engine().poll()
    verdict(bool((got == gaussian(100, LEFT)).all()))


def test_an_exchange_that_was_interrupted_goes_on(make):
    if P == 1:
        return
    comm = make("none")
    meet(comm)
    sent = gaussian(N)  # drawn first: NumPy imports its generators then, and they swallow an interrupt
    for late in range(2):
        got = np.zeros(N, np.float32)
        WORLD.Barrier()
        before = comm.session.messages

        class Doing:
            def wait(self, got: np.ndarray = got) -> None:
                comm.Sendrecv(sent, RIGHT, 1, got, LEFT, 1)

        if late == ME:
            time.sleep(0.1)  # the others are interrupted while they wait
            Doing().wait()
        else:
            interrupted(Doing(), 0.004)
        if late != ME and comm.session.messages == before and not got.any():  # interrupted before it began
            Doing().wait()
        engine().attend(lambda: not engine().active and not engine().begun)
        WORLD.Barrier()
        verdict(bool((got == gaussian(N, LEFT)).all()))


def test_an_irecv_refuses_what_is_compressed_and_too_large(make):
    if P == 1:
        return
    comm = make("int8")
    meet(comm)
    small = np.zeros(100, np.float32)
    request = comm.Irecv(small, LEFT, 0)
    comm.Isend(gaussian(N), RIGHT, 0).wait()
    with pytest.raises(hc.MismatchError):
        request.wait()
    request = comm.Irecv(got := np.zeros(N, np.float32), LEFT, 0)
    comm.Isend(gaussian(N), RIGHT, 0).wait()
    request.wait()
    verdict(float(np.abs(got - gaussian(N, LEFT)).max()) < 0.05)


def test_wrong_arguments_are_refused_in_the_call(make):
    comm = make("none")
    meet(comm)
    x = gaussian(N)
    for codec in (None, "int8"):
        ours = {} if codec is None else {"codec": codec}
        for _ in range(2):
            with pytest.raises(MPI.Exception):
                comm.Isend(x, RIGHT, -7, **ours)
            with pytest.raises(MPI.Exception):
                comm.Irecv(x, P, 0, **ours)
            with pytest.raises(MPI.Exception):
                comm.Ibcast(x, P, **ours)
    with pytest.raises(
        ValueError, match="recv buffer" if P > 1 else "receive count 3"
    ):  # mpi4py's of one rank
        comm.Iallreduce(x, np.zeros(3, np.float32))
    if P > 1:  # or nothing is compressed
        with pytest.raises(ValueError, match="algorithm"):
            comm.Iallreduce(x, x.copy(), codec="int8", algorithm="none of that name")
    comm.Iallreduce(MPI.IN_PLACE, x).wait()
    verdict(identical(x))


@pytest.mark.parametrize("codec", [None, "int8"])
def test_a_blocking_broadcast(quick, codec):
    comm = quick("none")
    ours = {} if codec is None else {"codec": codec}
    for root in range(P):
        b = gaussian(N, root) if root == ME else np.zeros(N, np.float32)
        comm.Bcast(b, root, **ours)
        verdict(
            float(np.abs(b - gaussian(N, root)).max()) <= (0.05 if codec else 0) and identical(b), f"{root}"
        )


@pytest.mark.parametrize("codec", [None, "int8"])
def test_a_root_whose_array_is_read_only(make, codec):
    """The root gets the decoded values, too, unless its array is read-only, which the others need not know."""
    comm = make("none")
    b = gaussian(N, 0) if ME == 0 else np.zeros(N, np.float32)
    b.flags.writeable = ME != 0
    for _ in range(2):
        comm.Bcast(b, 0, codec=codec)
    verdict(ME != 0 or bool((b == gaussian(N, 0)).all()))
    verdict(relative_error(b, gaussian(N, 0)) < (0.02 if codec else 1e-9))


def test_another_policy_or_axis_is_asked_anew(make):
    if P == 1:
        return
    comm = make("none")
    x, y = gaussian(N), np.zeros(N, np.float32)

    def codecs() -> set[str]:
        before = {row.key: row.calls for row in comm.stats()}
        comm.Iallreduce(x, y).wait()
        comm.Allreduce(x, y)
        return {row.codec for row in comm.stats() if row.calls != before.get(row.key, 0)}

    found = [codecs()]
    comm.policy = hc.load_policy("int8:min_bytes=0")
    found.append(codecs())
    comm.policy = hc.load_policy("none")
    comm.axis = "another"
    found.append(codecs())
    verdict([len(f) for f in found] == [1, 1, 1] and found[0] == found[2] == {"none"}, str(found))
    verdict(found[1] != {"none"} and {row.axis for row in comm.stats()} == {"dp", "another"}, str(found))

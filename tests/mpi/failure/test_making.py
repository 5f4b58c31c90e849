"""Making and splitting communicators: what goes wrong on one rank is told to all, and nobody waits for ever."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.collectives.agreement import earlier, making
from hybridcomp.collectives.execution.progress import engine
from hybridcomp.collectives.failure.notices import Notices
from hybridcomp.collectives.failure.release import collect
from hybridcomp.collectives.transport.arena import shares_memory
from tests.mpi.conftest import WORLD, communicator, verdict

LAST = WORLD.size - 1
last = WORLD.rank == LAST


def error_of(work: Callable[[], Any]) -> BaseException | None:
    try:
        made = work()
    except Exception as error:
        return error
    if made != MPI.COMM_NULL:
        made.Free()
    return None


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("Could not determine home directory.")


def test_what_one_rank_cannot_prepare_is_told_to_all(monkeypatch):
    if WORLD.rank == 0:
        monkeypatch.setattr("hybridcomp.collectives.algorithms.selection.load_profile", broken)
    began = time.monotonic()
    error = error_of(lambda: hc.Communicator(WORLD, "none", "dp", timeout=60.0))
    if WORLD.rank == 0:
        verdict(isinstance(error, RuntimeError) and "home directory" in str(error), repr(error))
    else:
        words = f"making a communicator on axis 'dp', rank {WORLD.rank} of {WORLD.size}: rank 0 failed: RuntimeError"
        verdict(isinstance(error, hc.RemoteError) and words in str(error), repr(error))
    verdict(time.monotonic() - began < 30)
    monkeypatch.undo()
    verdict(error_of(lambda: hc.Communicator(WORLD, "none")) is None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NUM_THREADS", "0"),
        ("SHARED_MEMORY", "off"),
        ("SUMMARY", "garbage"),
        ("CHUNK_BYTES", "many"),
        ("HOOK", "x"),
    ],
)
def test_a_wrong_variable_of_one_rank_is_told_to_all(monkeypatch, name, value):
    """Tell all ranks of it whether or not making a communicator reads it."""
    if last:
        monkeypatch.setenv(f"HYBRIDCOMP_{name}", value)
    error = error_of(lambda: hc.Communicator(WORLD, "none", "dp", timeout=60.0))
    kind = hc.ConfigError if last else hc.RemoteError
    verdict(
        isinstance(error, kind) and f"HYBRIDCOMP_{name} is '{value}'; allowed: " in str(error), repr(error)
    )
    monkeypatch.undo()
    verdict(error_of(lambda: hc.Communicator(WORLD, "none")) is None)


def no_kernels() -> Any:
    raise hc.NativeUnavailableError("HYBRIDCOMP_ISA='avx999': this machine runs portable")


LACKS: dict[str, tuple[str, Callable[..., Any], type[Exception]]] = {
    "engine": ("hybridcomp.collectives.agreement.making.engine", no_kernels, hc.NativeUnavailableError),
    "threads": ("hybridcomp.collectives.agreement.making.check_threads", broken, RuntimeError),
    "collect": ("hybridcomp.collectives.agreement.making.collect", broken, RuntimeError),
    "trace": ("hybridcomp.trace.joined", broken, RuntimeError),
}


@pytest.mark.parametrize("lack", LACKS)
def test_what_one_rank_lacks_is_told_to_all(monkeypatch, lack):
    name, fails, kind = LACKS[lack]
    if last:
        monkeypatch.setattr(name, fails)
    began = time.monotonic()
    error = error_of(lambda: hc.Communicator(WORLD, "none", "dp", timeout=60.0))
    if last:
        verdict(isinstance(error, kind), repr(error))
    else:
        words = f"rank {LAST} failed: {kind.__name__}"
        verdict(isinstance(error, hc.RemoteError) and words in str(error), repr(error))
    verdict(time.monotonic() - began < 30)
    monkeypatch.undo()
    verdict(error_of(lambda: hc.Communicator(WORLD, "none")) is None)


@pytest.mark.parametrize("slow", [False, True], ids=["", "while another rank is still making its own"])
def test_what_one_rank_cannot_do_with_its_parts_is_told_in_the_next_operation(monkeypatch, slow):
    """Tell it at once to a rank that is still making its communicator, and to the others in their next operation."""
    if WORLD.size == 1:
        return
    if last:
        monkeypatch.setattr("hybridcomp.collectives.session.MpiTransport", broken)
        error = error_of(lambda: hc.Communicator(WORLD, "none", "dp", timeout=60.0))
        verdict(isinstance(error, RuntimeError) and "home directory" in str(error), repr(error))
        verdict(True)
        return
    if slow and WORLD.rank == 0:
        honest = making.chooser
        monkeypatch.setattr(making, "chooser", lambda *given: time.sleep(0.5) or honest(*given))
    began = time.monotonic()
    error = error_of(lambda: hc.Communicator(WORLD, "none", "dp", timeout=60.0).Barrier() or MPI.COMM_NULL)
    # Who was still making it has the error of that.
    told = f"rank {LAST} failed" in str(error) and "home directory" in str(error)
    verdict(isinstance(error, hc.RemoteError) and told, repr(error))
    verdict(time.monotonic() - began < 30)


def test_a_policy_that_one_rank_cannot_read_is_told_to_all():
    if WORLD.size == 1:
        return
    error = error_of(lambda: hc.Communicator(WORLD, "int9" if last else "int8", "dp", timeout=60.0))
    kind = hc.RemoteError if not last else Exception
    verdict(isinstance(error, kind) and (last or f"rank {LAST} failed: " in str(error)), repr(error))


def test_a_rank_that_has_no_thread_for_it_tells_all(monkeypatch):
    honest = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "hybridcomp-making":
            raise RuntimeError("can't start new thread")
        honest(thread)

    if last:
        monkeypatch.setattr(threading.Thread, "start", start)
    began = time.monotonic()
    error = error_of(lambda: hc.Communicator(WORLD, "none", "dp", timeout=60.0))
    kind = RuntimeError if last else hc.RemoteError
    verdict(isinstance(error, kind) and "can't start new thread" in str(error), repr(error))
    verdict(time.monotonic() - began < 30)
    monkeypatch.undo()
    verdict(error_of(lambda: hc.Communicator(WORLD, "none")) is None)


def test_what_goes_wrong_while_mpi_makes_it_is_told_to_all(monkeypatch):
    if WORLD.size == 1:
        return
    honest, left = making.discover, []

    def discover(comm: MPI.Comm, node: MPI.Comm) -> Any:
        left.append((comm, node))
        raise MemoryError("made up")

    if last:
        monkeypatch.setattr(making, "discover", discover)
    began = time.monotonic()
    error = error_of(lambda: hc.Communicator(WORLD, "none", "dp", timeout=60.0))
    words = f"rank {LAST} failed: MemoryError: made up"
    good = (
        isinstance(error, MemoryError) if last else isinstance(error, hc.RemoteError) and words in str(error)
    )
    verdict(good, repr(error))
    verdict(time.monotonic() - began < 30)
    if last:  # what the others' threads still wait for in MPI
        comm, node = left[0]
        honest(comm, node)
        making.connect_engine(comm, node)
        making.gathered(comm, making.open_group(comm.rank, comm.size, comm.size - 1)[1])
        making.same_text(comm, "")
    verdict(ended())


def passed(comm: MPI.Comm) -> None:
    """Wait for a barrier of all ranks, for a while."""
    request, deadline = comm.Ibarrier(), time.monotonic() + 15
    while not request.Test() and time.monotonic() < deadline:
        time.sleep(0.01)


def ended() -> bool:
    """Tell whether no thread is left behind in MPI, after a while."""
    deadline = time.monotonic() + 10
    while any(t.name == "hybridcomp-making" for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return time.monotonic() < deadline


def test_a_rank_that_stops_while_mpi_makes_it_is_waited_for_no_longer_than_the_timeout(monkeypatch):
    if WORLD.size == 1:
        return
    honest, aside = making.discover, WORLD.Dup()

    def discover(comm: MPI.Comm, node: MPI.Comm) -> Any:
        passed(aside)
        return honest(comm, node)

    if last:
        monkeypatch.setattr(making, "discover", discover)
        monkeypatch.setattr(Notices, "poll", lambda _: False)  # as if it were stopped
        error = error_of(lambda: hc.Communicator(WORLD, "none", "dp", timeout=20.0))
        verdict(error is None, repr(error))
    else:
        monkeypatch.setattr(making, "LEAST_SECONDS", 2.0)
        began = time.monotonic()
        error = error_of(lambda: hc.Communicator(WORLD, "none", "dp", timeout=2.0))
        took = time.monotonic() - began
        passed(aside)
        words = "finding out who is on which host did not end within the timeout of 2 s"
        good = words in str(error) and f"rank {LAST} (silent)" in str(error) and took < 10
        verdict(isinstance(error, hc.CollectiveTimeoutError) and good, repr(error))
    verdict(ended())
    aside.Free()


MAKERS: dict[str, Callable[[hc.Communicator], Any]] = {
    "split": lambda comm: comm.Split(0, 0),
    "split_type": lambda comm: comm.Split_type(MPI.COMM_TYPE_SHARED),
    "create": lambda comm: comm.Create(WORLD.Get_group()),
    "dup": lambda comm: comm.Dup(),
}


@pytest.mark.parametrize("op", MAKERS)
def test_a_rank_that_does_not_come_to_a_split_is_named(make, op):
    comm = make("none", timeout=0.5)
    if WORLD.size == 1:
        verdict(error_of(lambda: MAKERS[op](comm)) is None)
        return
    error = None if last else error_of(lambda: MAKERS[op](comm))
    own, told = f"not arrived: rank {LAST} (at number 0)", "gave up"
    good = isinstance(error, hc.CollectiveTimeoutError) and f"{op} number 1 on axis 'dp'" in str(error)
    verdict(last or (good and (own in str(error) or told in str(error))), repr(error))
    if last:
        error = error_of(lambda: MAKERS[op](comm))
        verdict(isinstance(error, hc.CollectiveTimeoutError) and told in str(error), repr(error))
    else:
        verdict(True)


def test_members_of_a_group_that_do_not_come_are_not_waited_for(make):
    if WORLD.size == 1:
        return
    comm = make("none", timeout=0.5)
    group = WORLD.Get_group()
    error = None if last else error_of(lambda: comm.Create_group(group, 7))
    words = "create_group on axis 'dp', rank"
    verdict(last or (isinstance(error, hc.CollectiveTimeoutError) and words in str(error)), repr(error))
    if last:
        MPI.Intracomm(comm).Create_group(group, 7)
    verdict(ended())


def test_versions_that_differ_are_an_error_on_every_rank(monkeypatch):
    if WORLD.size == 1:
        return
    if last:
        monkeypatch.setattr("hybridcomp.version.__version__", "0.0.1+of.another.host")
    monkeypatch.setattr(making, "duplicate", broken)  # MPI has made nothing yet that would be lost
    error = error_of(lambda: hc.Communicator(WORLD, "none", "dp", timeout=60.0))
    words = ("different versions of hybridcomp", "0.0.1+of.another.host", f"on rank {0 if last else LAST}")
    verdict(isinstance(error, hc.MismatchError) and all(word in str(error) for word in words), repr(error))


@pytest.mark.parametrize("forgetful", [False, True])
def test_ranks_that_know_each_other_do_not_ask_again(monkeypatch, forgetful):
    """Have all ask again where one of them has forgotten."""
    first = communicator("int8")
    if forgetful:
        if last:
            earlier.forget()
    else:
        for name in ("discover", "connect_engine", "gathered", "same_text"):
            monkeypatch.setattr(making, name, broken)
    half = WORLD.Split(WORLD.rank % 2)
    made = [communicator("int8"), hc.Communicator(half, "int8", "dp", timeout=60.0)]
    half.Free()
    for comm in made:
        x = np.full(20_000, comm.rank + 1, np.float32)
        comm.Allreduce(MPI.IN_PLACE, x)
        verdict(abs(float(x[-1]) - comm.size * (comm.size + 1) / 2) < 0.1, str(x[-1]))
        shared = comm.size > 1 and shares_memory()
        verdict(comm.hosts == 1 and (comm.stats()[0].shared_bytes > 0) == shared)
    for comm in (first, *made):
        comm.Free()


def test_settings_that_rank_0_has_changed_are_told_again(monkeypatch):
    communicator("int8").Free()
    for algorithm in ("ring", "direct"):
        if WORLD.rank == 0:
            monkeypatch.setenv("HYBRIDCOMP_ALGORITHM", f"all_reduce={algorithm}")
        comm = communicator("int8")
        verdict(
            comm.session._chooser._forced == {"all_reduce": algorithm}, str(comm.session._chooser._forced)
        )
        comm.Free()


def test_a_mismatch_is_found_before_mpi_makes_anything(monkeypatch):
    if WORLD.size == 1:
        return
    monkeypatch.setattr(making, "duplicate", broken)
    error = error_of(lambda: hc.Communicator(WORLD, "int4" if last else "int8", "dp", timeout=60.0))
    verdict(isinstance(error, hc.MismatchError), repr(error))


@pytest.mark.parametrize("timeout", [float("nan"), float("inf"), -1, "30", None, True])
def test_a_timeout_that_is_none_is_refused(make, timeout):
    error = error_of(lambda: hc.Communicator(WORLD, "none", "dp", timeout=timeout if last else 10.0))
    wanted = "timeout must be a finite number of seconds from 0 up, not "
    verdict(
        isinstance(error, hc.ConfigError if last else hc.RemoteError) and wanted in str(error), repr(error)
    )
    comm = make("none")
    with pytest.raises(hc.ConfigError, match=wanted):
        comm.timeout = timeout
    verdict(comm.timeout > 0)
    request = comm.Iallreduce(MPI.IN_PLACE, np.ones(10, np.float32))
    if timeout is not None:  # the communicator's
        with pytest.raises(hc.ConfigError, match=wanted):
            request.wait(timeout)
    request.wait()
    verdict(True)


def test_to_free_a_communicator_again_has_no_effect():
    comm = hc.Communicator(WORLD, "none", "dp", timeout=60.0)
    comm.Free()
    comm.Free()
    verdict(error_of(lambda: hc.Communicator(WORLD, "none", "dp", timeout=60.0)) is None)


def test_too_low_a_level_of_threads_is_refused(monkeypatch):
    monkeypatch.setattr(making.MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    with pytest.raises(
        hc.ConfigError, match=r"MPI_THREAD_SERIALIZED.*initialise it with MPI_THREAD_MULTIPLE"
    ):
        hc.Communicator(WORLD, "none")
    verdict(True)


def test_a_forked_process_does_not_enter_mpi(make):
    """Nor does it wait for locks that threads of its parent had, or tell other ranks of its errors."""
    comm = make("none")
    x, y = np.ones(10, np.float32), np.ones(1 << 16, np.float32)
    comm.Allreduce(MPI.IN_PLACE, x)  # the quick way has learnt of it
    following = (WORLD.rank + 1) % WORLD.size
    own = [comm.Irecv(x.copy(), WORLD.rank, 9), comm.Iallreduce(MPI.IN_PLACE, y)]
    calls: list[Callable[[], Any]] = [
        lambda: comm.Allreduce(MPI.IN_PLACE, x),
        lambda: comm.Send(x, following, 3),
        comm.Barrier,
        lambda: comm.Bcast(MPI.BOTTOM, 0),
        lambda: comm.Gather(x, None, root=99),
        comm.Iprobe,
        lambda: hc.Communicator(WORLD, "none"),
    ]
    progress = engine()
    with progress.lock:
        child = os.fork()
    if not child:
        wrong = 99
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)  # a hang ends by a signal
            errors = [error_of(call) for call in calls]
            wrong = sum(not isinstance(e, hc.ConfigError) or "forked" not in str(e) for e in errors)
            own.clear()
            gc.collect()
        finally:
            os._exit(wrong)
    _, status = os.waitpid(child, 0)
    verdict(os.waitstatus_to_exitcode(status) == 0, str(status))
    comm.Send(x, WORLD.rank, 9)
    for request in own:
        request.Wait()
    verdict(bool((y == WORLD.size).all()))


def test_what_failed_on_one_rank_is_freed_on_none_however_late_its_notices_are(make, monkeypatch):
    """Keep its context, which MPI would give to the next communicator with what the rank posted."""
    if WORLD.size == 1:
        return
    comm = communicator(timeout=0.3)
    monkeypatch.setattr(Notices, "_send", lambda *_: None)  # as if they were on their way for long
    error = error_of(lambda: comm.Barrier() or MPI.COMM_NULL) if WORLD.rank == 0 else None
    verdict(WORLD.rank != 0 or isinstance(error, hc.CollectiveTimeoutError), repr(error))
    comm.Free()
    collect()
    verdict(bool(comm.mpi))  # null where it was freed
    other = hc.Communicator(WORLD, "none", "dp", timeout=60.0)
    other.Barrier()
    mpi = other.mpi
    other.Free()
    deadline = time.monotonic() + 10
    while mpi and time.monotonic() < deadline:
        collect()
    verdict(not mpi)


def test_who_frees_a_communicator_alone_does_not_wait(make):
    comm = hc.Communicator(WORLD, "none", "dp", timeout=60.0)
    if last:
        passed(WORLD)
    began = time.monotonic()
    comm.Free()
    took = time.monotonic() - began
    kept = bool(comm.mpi)
    if not last:
        passed(WORLD)
    collect()
    verdict(took < 1 and (WORLD.size == 1 or last or kept), f"{took} {kept}")

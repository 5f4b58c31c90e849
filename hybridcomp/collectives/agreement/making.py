"""Make communicators, every step within the timeout; report an error on one rank to all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from mpi4py import MPI

from hybridcomp.collectives.agreement.agreement import (
    Agreement,
    Preparation,
    agree,
    pack_preparation,
    same_text,
)
from hybridcomp.collectives.algorithms.selection import Chooser, chooser
from hybridcomp.collectives.engine.groups import join
from hybridcomp.collectives.execution.progress import engine
from hybridcomp.collectives.execution.steps import Pending, Steps
from hybridcomp.collectives.failure.blocked import StandbyThread, start_thread
from hybridcomp.collectives.failure.contexts import contexts
from hybridcomp.collectives.failure.notices import Notices, absentees
from hybridcomp.collectives.failure.release import collect
from hybridcomp.collectives.failure.watchdog import watched
from hybridcomp.collectives.transport.shared_memory import SharedMemoryPeers, connect_peers
from hybridcomp.collectives.transport.topology import discover
from hybridcomp.errors import CollectiveTimeoutError, ConfigError, RemoteError
from hybridcomp.launcher import check_world
from hybridcomp.schedules.topology import Topology

T = TypeVar("T")
_POLL_SECONDS = 0.02  # seconds between polls of notices; a communicator is made in a few milliseconds
# The least time that MPI gets once all ranks are there: a timeout says how long to wait for others, and not how long
# MPI takes on hosts where ranks share cores.
LEAST_SECONDS = 30.0
# Time for ranks that have met to answer each other, beside the other work of their cores.
_EXCHANGE_SECONDS = 10.0
_LOOK_SECONDS = 1e-3  # seconds between looks of a rank that has no engine
_ANSWER_SECONDS = 1.0  # time for other ranks to say whether they are there
_THREAD = "hybridcomp-making"
_MAKING = 0  # number of the making in notices: operations are numbered from 1 on
_LEVELS = {
    MPI.THREAD_SINGLE: "MPI_THREAD_SINGLE",
    MPI.THREAD_FUNNELED: "MPI_THREAD_FUNNELED",
    MPI.THREAD_SERIALIZED: "MPI_THREAD_SERIALIZED",
}


class Parts(NamedTuple):
    """Components of a communicator.

    Attributes:
        own: settings that this rank brought.
        agreed: facts on which all ranks have agreed.
        mpi: MPI communicator for collectives and their messages.
        p2p: MPI communicator for sends and receives.
        comparison: MPI communicator for comparing operations; None if they are not compared.
        topology: which rank is on which host.
        shm_peers: ranks that share memory with this one; None where memory is not shared.
        group: group of the compiled engine; None where the engine is not used.
        chooser: chooser of algorithms.
        notices: notices between the ranks; None for one rank alone.
    """

    own: Preparation
    agreed: Agreement
    mpi: MPI.Intracomm
    p2p: MPI.Intracomm
    comparison: MPI.Intracomm | None
    topology: Topology
    shm_peers: SharedMemoryPeers | None
    group: Any
    chooser: Chooser
    notices: Notices | None

    def give_up(self, error: BaseException) -> None:
        """Tell the other ranks, which have their communicator by now, that this one cannot begin with its own."""
        if self.notices is not None:
            self.notices.tell(_MAKING, error)


def check_threads() -> None:
    """Check that MPI may be called from several threads at a time.

    Raises:
        ConfigError: MPI has a lower level of thread support.
    """
    level = MPI.Query_thread()
    if level < MPI.THREAD_MULTIPLE:
        raise ConfigError(
            f"MPI was initialised with {_LEVELS.get(level, level)}, and hybridcomp calls it from a thread of its own: "
            "initialise it with MPI_THREAD_MULTIPLE, as mpi4py does where mpi4py.rc.threads and "
            "mpi4py.rc.thread_level are left as they are"
        )


def make(comm: MPI.Comm, axis: str, timeout: float, prepare: Callable[[], Preparation]) -> Parts:
    """Make the parts of a communicator of the ranks of ``comm``. Collective.

    Work that may fail on one rank is done first, and the ranks tell each other how that went before MPI makes anything:
    the engine is made, which loads the kernels, and then ``prepare`` called.

    Args:
        comm: communicator of the caller.
        axis: mesh axis, for error messages.
        timeout: seconds to wait for the other ranks, and then, if it is more than :data:`LEAST_SECONDS`, for MPI.
        prepare: function that returns this rank's settings, without other ranks.

    Raises:
        ConfigError: MPI has too low a level of thread support, or was started by another MPI's launcher; or this
            process was forked after MPI was initialised.
        NativeUnavailableError: this rank has no kernels, or lacks the instruction set that it is told to use.
        CollectiveTimeoutError: the other ranks have not all come, or do not go on.
        RemoteError: another rank has failed; names it.
        MismatchError: the ranks disagree; raised on every rank.
        BaseException: the error that ``prepare`` raised.
    """
    check_world(MPI.COMM_WORLD.Get_size(), MPI.Get_library_version())
    rank, size = comm.Get_rank(), comm.Get_size()
    what = f"making a communicator on axis {axis!r}, rank {rank} of {size}"
    try:
        check_threads()
        progress = engine()
    except Exception as error:
        _tell_all(comm, error, timeout)
        raise
    progress.check_process(what)
    own: Preparation | BaseException
    standby: StandbyThread | None = None
    try:
        collect()
        contexts.announce()  # here, so that where warnings are errors, the other ranks are told
        own = prepare()
        standby = StandbyThread(_THREAD, what)  # or others would wait for a rank without a thread inside MPI
    except BaseException as error:
        own = error
    try:
        with watched(what, timeout + max(timeout, _EXCHANGE_SECONDS) + max(timeout, LEAST_SECONDS)):
            return _make(comm, what, own, timeout, standby)
    finally:
        if standby is not None:
            standby.dismiss()


def _tell_all(comm: MPI.Comm, error: Exception, timeout: float) -> None:
    """Tell the other ranks that this one cannot make the communicator, without the engine, which it lacks."""
    record = pack_preparation(error)
    records = record.repeat(comm.Get_size())
    for post in (comm.Ibarrier, lambda: comm.Iallgather([record, MPI.BYTE], [records, MPI.BYTE])):
        request, deadline = post(), time.monotonic() + timeout
        while not request.Test():
            if time.monotonic() > deadline:
                _untold.append((request, record, records))
                return
            time.sleep(_LOOK_SECONDS)


_untold: list[Any] = []  # what MPI may still read, and write to


def _make(
    comm: MPI.Comm, what: str, own: Preparation | BaseException, timeout: float, standby: StandbyThread | None
) -> Parts:
    size = comm.Get_size()
    record = pack_preparation(own)
    records = record.repeat(size)

    def run(post: Callable[[], MPI.Request], name: str, seconds: float) -> None:
        def steps() -> Steps:
            yield Pending([post()], [-1])

        engine().start(steps(), f"{what}: {name}", seconds).wait()

    try:
        # Not an Idup: an unmatched Idup confuses Open MPI when it makes the next communicator.
        run(comm.Ibarrier, "the meeting of all ranks", timeout)
        # A rank that has waited too long takes no part: then this ends on no rank, and none goes on to where MPI waits.
        run(
            lambda: comm.Iallgather([record, MPI.BYTE], [records, MPI.BYTE]),
            "the exchange of what they bring",
            max(timeout, _EXCHANGE_SECONDS),
        )
    except CollectiveTimeoutError:
        if isinstance(own, BaseException):
            raise own from None
        raise
    if isinstance(own, BaseException):
        raise own
    parts = _Assembly(comm, what, own, agree(records, own, what)).run(timeout, standby)
    contexts.add()
    return parts


class _Assembly:
    """Steps of making a communicator that wait for other ranks in MPI, run in a thread that can be left behind."""

    def __init__(self, comm: MPI.Comm, what: str, own: Preparation, agreed: Agreement) -> None:
        self._comm, self._what, self._own, self._agreed = comm, what, own, agreed
        self._step = "duplicating it"
        self._notices: Notices | None = None

    def run(self, timeout: float, standby: StandbyThread | None) -> Parts:
        limit = max(timeout, LEAST_SECONDS)
        try:
            parts = bounded(self._assemble, lambda: f"{self._what}: {self._step}", limit, self._poll, standby)
        except CollectiveTimeoutError as late:
            raise CollectiveTimeoutError(f"{late}{self._absent()}") from None
        except RemoteError:
            raise
        except BaseException as error:
            if self._notices is not None:
                self._notices.tell(_MAKING, error)
            raise
        if self._notices is not None:
            self._notices.end(_MAKING, well=True)
        return parts

    def _assemble(self) -> Parts:
        comm, own, agreed = self._comm, self._own, self._agreed
        if comm.Get_size() > 1:
            notices = Notices(comm.Dup(), agreed.key)
            notices.begin(_MAKING)
            self._notices = notices
        mpi, p2p = MPI.Intracomm(comm.Dup()), MPI.Intracomm(comm.Dup())
        comparison = MPI.Intracomm(mpi.Dup()) if own.detail else None
        self._step = "finding out who is on which host"
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        topology = discover(mpi, node)
        self._step = "sharing memory"
        # Where MPI takes device pointers, it takes them between the ranks of a host, too.
        shm_peers = None if agreed.awareness.messages else connect_peers(mpi, node)
        group = join(mpi, node) if comm.Get_size() > 1 and agreed.on_host else None
        node.Free()
        self._step = "telling rank 0's settings"
        chosen = chooser(topology, same_text(mpi, own.settings))
        return Parts(own, agreed, mpi, p2p, comparison, topology, shm_peers, group, chosen, self._notices)

    def _poll(self) -> None:
        notices = self._notices
        if notices is None:
            return
        notices.poll()
        failure = notices.failures.get(_MAKING)
        if failure is not None:
            raise RemoteError(f"{self._what}: rank {failure.rank} failed: {failure.text}")

    def _absent(self) -> str:
        """Name the silent ranks, in words; ranks that wait as well answer."""
        notices = self._notices
        if notices is None:
            return ""
        notices.ask(_MAKING)
        deadline = time.monotonic() + _ANSWER_SECONDS
        while len(notices.replies(_MAKING)) < notices.size - 1 and time.monotonic() < deadline:
            notices.poll()
            time.sleep(_POLL_SECONDS)
        return f"; {absentees(notices.replies(_MAKING), notices.rank, notices.size)}"


def bounded(
    work: Callable[[], T],
    what: Callable[[], str],
    timeout: float,
    poll: Callable[[], None] | None = None,
    standby: StandbyThread | None = None,
) -> T:
    """Run a function that waits for other ranks inside MPI, for a limited time.

    Args:
        work: function to run, in a thread that is left behind where it does not come back.
        what: function that returns the name of the work and the step it has reached.
        timeout: seconds that the work may take.
        poll: function called now and then; an error that it raises ends the waiting.
        standby: thread to use; None to start one.

    Raises:
        CollectiveTimeoutError: the work did not end in time.
        BaseException: the error that ``work`` raised.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    deadline = time.monotonic() + timeout
    thread = start_thread(_THREAD, what(), run) if standby is None else standby.do(what(), run)
    while True:
        thread.join(_POLL_SECONDS)
        if not thread.is_alive():
            break
        if poll is not None:
            poll()
        if time.monotonic() > deadline:
            raise CollectiveTimeoutError(
                f"{what()} did not end within the timeout of {round(timeout, 2):g} s; still waiting for other ranks"
            )
    if errors:
        raise errors[0]
    return results[0]

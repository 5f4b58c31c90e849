"""Make communicators, every step within the timeout; report an error on one rank to all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from mpi4py import MPI

from hybridcomp.collectives.agreement.agreement import (
    Agreement,
    Preparation,
    agree,
    gathered,
    lacking,
    pack_preparation,
    same_text,
)
from hybridcomp.collectives.agreement.earlier import (
    NONE,
    Surroundings,
    bases,
    known_to_mpi,
    propose,
    remember,
    told,
)
from hybridcomp.collectives.algorithms.selection import Chooser, chooser
from hybridcomp.collectives.engine.groups import connect_engine, join, open_group
from hybridcomp.collectives.execution.observing import world_ranks
from hybridcomp.collectives.execution.progress import engine
from hybridcomp.collectives.execution.steps import Pending, Steps
from hybridcomp.collectives.failure.blocked import StandbyThread, start_thread
from hybridcomp.collectives.failure.contexts import contexts
from hybridcomp.collectives.failure.notices import Notices, absentees
from hybridcomp.collectives.failure.release import collect
from hybridcomp.collectives.failure.watchdog import watched
from hybridcomp.collectives.transport.arena import shares_memory
from hybridcomp.collectives.transport.topology import discover, hosts_of
from hybridcomp.errors import CollectiveTimeoutError, ConfigError, HybridcompError, PolicyError, RemoteError
from hybridcomp.launcher import check_world
from hybridcomp.schedules.topology import Topology

T = TypeVar("T")
_POLL_SECONDS = 0.02  # seconds between polls of notices; a communicator is made in a few milliseconds
# The least time that MPI gets once all ranks are there: a timeout says how long to wait for others, and not how long
# MPI takes on hosts where ranks share cores.
LEAST_SECONDS = 30.0
# Time for ranks that have met to answer each other, beside the other work of their cores.
_EXCHANGE_SECONDS = 10.0
_LEAST_PAUSE, _MOST_PAUSE = 2e-5, 2e-4  # seconds between looks at a request
_ANSWER_SECONDS = 1.0  # time for other ranks to say whether they are there
_THREAD = "hybridcomp-making"
_MAKING = 0  # number of the making in notices: operations are numbered from 1 on
_LEVELS = {
    MPI.THREAD_SINGLE: "MPI_THREAD_SINGLE",
    MPI.THREAD_FUNNELED: "MPI_THREAD_FUNNELED",
    MPI.THREAD_SERIALIZED: "MPI_THREAD_SERIALIZED",
}


class Components(NamedTuple):
    """Components of a communicator.

    Attributes:
        own: settings that this rank brought.
        agreed: facts on which all ranks have agreed.
        mpi: MPI communicator for collectives and their messages.
        p2p: MPI communicator for sends and receives.
        comparison: MPI communicator for comparing operations; None if they are not compared.
        topology: which rank is on which host.
        group: group of the compiled engine; None for one rank alone.
        chooser: chooser of algorithms.
        notices: notices between the ranks; None for one rank alone.
    """

    own: Preparation
    agreed: Agreement
    mpi: MPI.Intracomm
    p2p: MPI.Intracomm
    comparison: MPI.Intracomm | None
    topology: Topology
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


class Founding(NamedTuple):
    """Communicator that MPI makes of ranks of ``MPI.COMM_WORLD`` once they have met in another way.

    Attributes:
        rank: number of this rank in it.
        ranks: ranks in ``MPI.COMM_WORLD`` of its ranks.
        meet: function that waits until all ranks are there, and raises CollectiveTimeoutError where one does not come.
        create: function that makes it, in all ranks; it may wait for them inside MPI.
    """

    rank: int
    ranks: Sequence[int]
    meet: Callable[[], None]
    create: Callable[[], MPI.Intracomm]

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)


def make(
    comm: MPI.Comm | Founding, axis: str, timeout: float, prepare: Callable[[], Preparation]
) -> Components:
    """Make the parts of a communicator of the ranks of ``comm``. Collective.

    Work that may fail on one rank is done first, and the ranks tell each other how that went before MPI makes anything:
    the engine is made, which loads the kernels, and then ``prepare`` called.

    Args:
        comm: communicator of the caller, or what it is made of.
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
    rank, size = comm.rank, comm.size
    what = f"making a communicator on axis {axis!r}, rank {rank} of {size}"
    try:
        check_threads()
        progress = engine()
    except Exception as error:
        if not isinstance(comm, Founding):  # its ranks have a store to be told in
            _tell_all(comm, error, timeout)
        raise
    progress.check_process(what)
    own: Preparation | BaseException
    standby: StandbyThread | None = None
    try:
        standby = StandbyThread(_THREAD, what)  # or others would wait for a rank without a thread inside MPI
        collect()
        contexts.announce()  # here, so that where warnings are errors, the other ranks are told
        own = prepare()
    except BaseException as error:
        own = error
    try:
        assembly = _Assembly(what, own, rank, size)
        with watched(what, timeout + max(timeout, _EXCHANGE_SECONDS) + max(timeout, LEAST_SECONDS)):
            if isinstance(comm, Founding):
                parts = assembly.found(comm, timeout, standby)
            else:
                parts = assembly.join(comm, timeout, standby)
    finally:
        if standby is not None:
            standby.dismiss()
    contexts.add()
    return parts


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
            time.sleep(_MOST_PAUSE)


_untold: list[Any] = []  # what MPI may still read, and write to


class _Assembly:
    """Steps of making a communicator; those that wait inside MPI run in a thread that can be left behind."""

    def __init__(self, what: str, own: Preparation | BaseException, rank: int, size: int) -> None:
        self._what, self._own, self._rank, self._size = what, own, rank, size
        self._ranks: Sequence[int] = ()
        self._earlier = NONE
        self._group: Any = None
        self._step = "exchanging what they bring"
        self._notices: Notices | None = None
        self._together = False  # whether all ranks have taken the same steps on a base

    def found(self, founding: Founding, timeout: float, standby: StandbyThread | None) -> Components:
        """Have the ranks meet, and make their communicator."""
        ranks = founding.ranks
        try:
            founding.meet()
            if standby is None and isinstance(self._own, BaseException):
                raise self._own
            return self._run(lambda: self._found(ranks, founding.create), timeout, standby)
        except BaseException:
            if not self._together:
                bases.drop(ranks)
            raise

    def _found(self, ranks: Sequence[int], create: Callable[[], MPI.Intracomm]) -> Components:
        self._step = "making it in MPI"
        base = bases.find(ranks)
        comm = create() if base is None else base
        record = self._pack(ranks, keeps=bases.wanted(ranks))
        records = record.repeat(self._size)
        self._step = "exchanging what they bring"
        exchange = comm.Iallgather([record, MPI.BYTE], [records, MPI.BYTE])
        mpi = duplicate(comm)  # at the same time
        awaited(exchange)
        self._together = True
        try:
            agreed = self._agree(records)
        except BaseException as error:
            if error is self._own or isinstance(error, HybridcompError):  # then no rank goes on
                mpi.Free()
                if base is None:
                    comm.Free()
            raise
        if base is not None:
            return self._assemble(agreed, mpi, None, base)
        if agreed.keeps:
            bases.keep(ranks, comm)
            return self._assemble(agreed, mpi, None, comm)
        return self._assemble(agreed, mpi, comm)

    def join(self, comm: MPI.Comm, timeout: float, standby: StandbyThread | None) -> Components:
        """Have the ranks of a communicator meet on it, and make another one."""

        def run(post: Callable[[], MPI.Request], name: str, seconds: float) -> None:
            def steps() -> Steps:
                yield Pending([post()], [-1])

            engine().start(steps(), f"{self._what}: {name}", seconds).wait()

        try:
            # Not an Idup: an unmatched Idup confuses Open MPI when it makes the next communicator.
            run(comm.Ibarrier, "the meeting of all ranks", timeout)
            ranks = world_ranks(comm)
            record = self._pack(ranks if known_to_mpi(comm, ranks) else ())
            records = record.repeat(self._size)
            # A rank that has waited too long takes no part: then this ends on no rank, and none goes on to where MPI
            # waits.
            run(
                lambda: comm.Iallgather([record, MPI.BYTE], [records, MPI.BYTE]),
                "the exchange of what they bring",
                max(timeout, _EXCHANGE_SECONDS),
            )
        except CollectiveTimeoutError:
            if isinstance(self._own, BaseException):
                raise self._own from None
            raise
        agreed = self._agree(records)
        return self._run(lambda: self._assemble(agreed, duplicate(comm), None, comm), timeout, standby)

    def _pack(self, ranks: Sequence[int], *, keeps: bool = False) -> Any:
        """Pack this rank's record, with the rings from which it will read if all ranks are acquainted.

        Args:
            ranks: ranks in the job of the communicator's ranks; empty where they do not take over what they know.
            keeps: whether this rank would keep a base.
        """
        self._ranks = ranks
        rings = -1
        try:
            if ranks and isinstance(self._own, Preparation):
                self._earlier = propose(ranks)
                if self._earlier.key and self._size > 1:
                    neighbours = len(self._earlier.of(ranks).neighbours)
                    self._group, rings = open_group(self._rank, self._size, neighbours)
        except BaseException as error:
            self._own = error
        return pack_preparation(self._own, self._earlier, rings, keeps=keeps)

    def _agree(self, records: Any) -> Agreement:
        """Check the records of all ranks; give the rings back where no rank goes on."""
        try:
            if isinstance(self._own, PolicyError) and (there := lacking(records)):
                raise PolicyError(f"rank {self._rank}: {self._own}{there}") from self._own
            if isinstance(self._own, BaseException):
                raise self._own
            return agree(records, self._own, self._what)
        except BaseException as error:
            if error is self._own or isinstance(error, HybridcompError):
                self._give_rings()
            raise

    def _give_rings(self) -> None:
        """Give back the rings that this rank has offered, where no rank will use them."""
        if self._group is not None:
            self._group.give_rings()
            self._group = None

    def _run(
        self, work: Callable[[], Components], timeout: float, standby: StandbyThread | None
    ) -> Components:
        limit = max(timeout, LEAST_SECONDS)
        try:
            parts = bounded(work, lambda: f"{self._what}: {self._step}", limit, self._poll, standby)
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

    def _assemble(
        self, agreed: Agreement, mpi: MPI.Intracomm, p2p: MPI.Intracomm | None, of: MPI.Comm | None = None
    ) -> Components:
        """Make the parts of a communicator.

        Args:
            agreed: facts on which all ranks have agreed.
            mpi: MPI communicator for collectives.
            p2p: MPI communicator for sends and receives; None to make it of the caller's.
            of: the caller's communicator, if there is one.
        """
        own, size = self._own, self._size
        assert isinstance(own, Preparation)
        if size > 1:
            self._notices = Notices(mpi, agreed.key)
            self._notices.begin(_MAKING)
        self._step = "duplicating it"
        comm = mpi if of is None else of
        if p2p is None:
            self._together = False
            p2p = duplicate(comm)
            self._together = True
        comparison = duplicate(mpi) if own.detail else None
        known, rings = agreed.acquainted, agreed.rings
        known_around = self._earlier.of(self._ranks) if known else None
        around = known_around or self._look_around(comm, mpi, agreed.key)
        if not known:
            self._give_rings()
        if size > 1:
            if not known:
                self._step = "telling where the rings are"
                self._group, own_rings = open_group(self._rank, size, len(around.neighbours))
                rings = gathered(mpi, own_rings)
            join(self._group, mpi, around.topology.away(self._rank), around.neighbours, rings)
        settings = self._earlier.settings if known and agreed.informed else None
        if settings is None:
            self._step = "telling rank 0's settings"
            settings = same_text(mpi, own.settings)
            told(self._earlier, settings)
        chosen = chooser(around.topology, settings)
        return Components(
            own, agreed, mpi, p2p, comparison, around.topology, self._group, chosen, self._notices
        )

    def _look_around(self, comm: MPI.Comm, mpi: MPI.Intracomm, key: int) -> Surroundings:
        """Find out which ranks share a host and memory, and remember it for the next communicators. Collective."""
        self._step = "finding out who is on which host"
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        topology = discover(mpi, node)
        ranks = self._ranks or world_ranks(comm)
        said = hosts_of(MPI.COMM_WORLD.Get_size(), ranks, topology.hosts)
        if said != topology:
            whole, topology = node, said
            node = whole.Split(said.hosts[self._rank], self._rank)
            whole.Free()
        self._step = "sharing memory"
        neighbours = connect_engine(mpi, node) if self._size > 1 else {}
        node.Free()
        around = Surroundings(topology, neighbours or {})
        # Where a rank cannot see another's arena, those of another communicator may all see each other's.
        seen = not shares_memory() or neighbours is not None
        self._earlier = remember(key, self._ranks, around) if self._ranks and seen else NONE
        return around

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


def duplicate(comm: MPI.Comm) -> MPI.Intracomm:
    """Duplicate a communicator whose ranks are all about to do so. Collective."""
    made, request = comm.Idup()
    awaited(request)
    return MPI.Intracomm(made)


def awaited(request: MPI.Request) -> None:
    """Wait for a request asleep: in MPI's own calls ranks that share a core wait for each other's turns."""
    pause = _LEAST_PAUSE
    while not request.Test():
        time.sleep(pause)
        pause = min(2 * pause, _MOST_PAUSE)


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

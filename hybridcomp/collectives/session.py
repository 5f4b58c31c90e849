"""Hold a communicator's state; choose the codec and algorithm of an operation, and count it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Self

from mpi4py import MPI

from hybridcomp import trace, variables
from hybridcomp.arrays import Flat
from hybridcomp.codecs import ErrorFeedback
from hybridcomp.collectives.agreement.agreement import Preparation
from hybridcomp.collectives.agreement.consistency import Comparison, described, in_detail
from hybridcomp.collectives.agreement.making import LEAST_SECONDS, Components, Founding, make
from hybridcomp.collectives.algorithms.schedules import Schedules
from hybridcomp.collectives.algorithms.selection import own_settings
from hybridcomp.collectives.automatic import Automatic
from hybridcomp.collectives.choices import Choices, CodecLike, explicit_choice
from hybridcomp.collectives.data_path.coding import NONE, Array
from hybridcomp.collectives.device.cuda_aware import awareness
from hybridcomp.collectives.engine.groups import join_for_messages
from hybridcomp.collectives.engine.messages import MessagePrograms
from hybridcomp.collectives.engine.programs import Programs
from hybridcomp.collectives.execution.observing import in_flight, world_ranks
from hybridcomp.collectives.execution.progress import Request, engine
from hybridcomp.collectives.execution.steps import Steps
from hybridcomp.collectives.execution.timeouts import check_timeout, is_timeout
from hybridcomp.collectives.failure.release import release
from hybridcomp.collectives.failure.watchdog import in_words, watched
from hybridcomp.collectives.requests import copy_handle
from hybridcomp.collectives.stats import Call, Stats, StatTable, leaving
from hybridcomp.collectives.transport.mpi import MpiTransport
from hybridcomp.collectives.transport.topology import said_hosts
from hybridcomp.policy import Choice, Policy, default_policy, load_policy
from hybridcomp.policy.auto.cost import Place
from hybridcomp.policy.auto.decider import Decider
from hybridcomp.steps import between, clock
from hybridcomp.top.publish import Activity

Op = MPI.Op | str
MANY = 1 << 40  # elements: more than any min_bytes
NEVER = 1 << 62  # operations


class Session(MPI.Intracomm):
    """State that a communicator's operations share.

    It is a communicator of MPI's, too: the one that sends and receives run on. Whatever MPI itself does with it
    (attributes, windows, files, pickled objects) does not meet the collectives of operations, which run on :attr:`mpi`.

    Attributes:
        policy: policy that chooses codecs; the same on all ranks.
        axis: mesh axis that this communicator spans.
        step: training step, for policies with a warm-up; the caller advances it.
        feedback: error-feedback memory of named messages.
        warm: arrays that linear codecs keep of named messages: PowerSGD's Q.
        key: random number that tells it from other communicators; the same on all ranks.
        mpi: duplicate of the caller's communicator, which collectives run on.
        transport: transport of collectives.
        message_transport: transport of sends and receives.
        message_programs: programs of single messages in the compiled engine; None where it is not in use.
        world_ranks: number of each rank in the world.
        cuda_aware: whether every rank's MPI takes device pointers.
        spoilt: whether messages that no rank will take may be on their way: then the communicator is never freed.
        decider: decider of choices that the policy leaves to ``auto``; None where it leaves none.
        on_start: function called with each operation's statistics, in the thread that starts the operation, before any
            data moves; not for blocking operations on plain arrays that MPI does in one call.
    """

    step: int
    feedback: ErrorFeedback

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        """Make MPI's null communicator, of which ``__init__`` makes this one."""
        return MPI.Intracomm.__new__(cls)

    def __init__(
        self, comm: MPI.Comm | Founding, policy: Any, axis: str, timeout: float, detail: bool | None = None
    ) -> None:
        if isinstance(comm, Session):
            comm = comm._p2p
        self._axis = axis
        self._freed = False
        self.step = 0
        self.feedback = ErrorFeedback(form=None)
        self.warm: dict[str, Array] = {}
        self.on_start: Callable[[Call], None] | None = None
        self.decider: Decider | None = None

        def prepare() -> Preparation:
            variables.check(MPI.COMM_WORLD.Get_rank())
            said_hosts(MPI.COMM_WORLD.Get_size())
            trace.joined(MPI.COMM_WORLD.Get_rank())
            settings = own_settings() if comm.rank == 0 else ""
            self._timeout = check_timeout(timeout)
            in_full = in_detail() if detail is None else detail
            chosen = default_policy() if policy is None else load_policy(policy)
            return Preparation(chosen, awareness(), in_full, settings)

        parts = make(comm, axis, timeout if is_timeout(timeout) else LEAST_SECONDS, prepare)
        try:
            self._take(parts)
        except BaseException as error:
            parts.give_up(error)
            raise

    def _take(self, parts: Components) -> None:
        """Begin with the parts that all ranks have made."""
        self._policy: Policy = parts.agreed.policy
        self._engine = engine()
        self.key = parts.agreed.key
        self.mpi, self._p2p = parts.mpi, parts.p2p
        self._rank, self._size = self.mpi.Get_rank(), self.mpi.Get_size()
        copy_handle(self._p2p, self)
        self._table = StatTable()
        self._steps_before = clock.totals
        self.cuda_aware = parts.agreed.awareness
        direct = self.cuda_aware.messages
        self._topology = parts.topology
        self._away = parts.topology.away(self._rank)
        self._choices = Choices(self._topology.count)
        self._chooser = parts.chooser
        self._profile = parts.chooser.profile
        place = Place(self._size, self._topology.count, self._topology.largest, parts.group is not None)
        self._automatic = Automatic(self, place, weakref.WeakMethod(self._choose_anew))
        self._review_at = NEVER
        self._schedules: Schedules = Schedules(self._topology, self.rank, self._chooser)
        self._group = parts.group
        self._programs: Programs | None = None
        self.message_programs: MessagePrograms | None = None
        if parts.group is not None:
            self._programs = Programs(parts.group, self._schedules)
            self.message_programs = MessagePrograms(join_for_messages(self._p2p, self._away))
        self.transport: MpiTransport = MpiTransport(
            self.mpi, self._topology, direct=direct, group=parts.group
        )
        self.message_transport: MpiTransport = MpiTransport(self._p2p, self._topology, direct=direct)
        self.message_transport.post_queue.common = False
        self.spoilt = False
        self._started = 0  # collectives so far: the same number on all ranks
        self._messages = 0  # sends and receives so far
        self._comparison = None if parts.comparison is None else Comparison(parts.comparison)
        self._notices = parts.notices
        if self._notices is not None:
            engine().listen(self._notices)
        self.world_ranks = world_ranks(self.mpi)
        self._decide()
        if trace.recorder is not None:
            trace.recorder.group(self.key, self.world_ranks)

    __hash__ = object.__hash__  # it has state of its own, by which sets and dictionaries tell it from others

    @property
    def rank(self) -> int:  # type: ignore[override]
        """Return the number of this rank."""
        return self._rank

    @property
    def size(self) -> int:  # type: ignore[override]
        """Return the number of ranks."""
        return self._size

    def Free(self) -> None:
        """Release MPI's resources, once all ranks have called this and no operation is in flight. Collective.

        It waits for no operation: those in flight end as if it had not been called, and a new one raises
        ``MPI.Exception``. A communicator on which an operation has failed, here or on another rank, is only silenced
        (:mod:`~hybridcomp.collectives.failure.release`). Freeing it again has no effect.
        """
        if self._freed:
            return
        self._freed = True
        # No collective of an operation's has run on the first one.
        comms: list[MPI.Comm] = [self._p2p, self.mpi]
        self._p2p = MPI.Intracomm()
        copy_handle(self._p2p, self)
        self._reconsider()
        with watched(f"Free on axis {self._axis!r}, rank {self.rank} of {self.size}", self._timeout):
            self._release(comms)

    def Disconnect(self) -> None:
        """Wait until the operations in flight here have ended, well or not; then do as :meth:`Free`. Collective."""
        if not self._freed:
            for operation in self._engine.unfinished(self.key):
                self._engine.foreground.wait(operation, None)
        self.Free()

    def free(self) -> None:
        """Release MPI's resources as :meth:`Free` does, if that has not been done."""
        self.Free()

    @property
    def failed(self) -> bool:
        """Tell whether an operation is known to have failed, here or on another rank: MPI may still be at work."""
        told = self._notices is not None and self._notices.troubled
        return self.spoilt or self.transport.failed or self.message_transport.failed or told

    def _release(self, comms: list[MPI.Comm]) -> None:
        if self._comparison is not None:
            comms.append(self._comparison.comm)
        under_way = self._engine.unfinished(self.key)

        def spoilt() -> bool:
            if self._notices is not None:
                self._engine.silence(self._notices)
            return self.failed or any(operation.exception is not None for operation in under_way)

        release(comms, spoilt=spoilt, drain=self._drain, freed=self._give_back, under_way=under_way)

    def _drain(self) -> None:
        """Take the notices that ranks have sent each other while they waited for the last operations."""
        if self._notices is not None:
            self._notices.drain()

    def _give_back(self) -> None:
        """Give back the engine's rings that the communicator holds: no rank uses them any more."""
        if self._group is not None:
            self._group.give_rings()

    @property
    def timeout(self) -> float:
        """Return the seconds that any operation may take; may be set, for operations that start from then on."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        before, self._timeout = self._timeout, check_timeout(seconds)
        if self._timeout != before:
            self._reconsider()

    @property
    def policy(self) -> Policy:
        """Return the policy that chooses codecs; the same on all ranks."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy = policy
        self._decide()
        self._reconsider()

    def decide_together(self, larger: Session) -> None:
        """Decide by the figures of all ranks of a larger communicator, alike in all the groups that it is made of.

        Ranks that hold copies of the same values in groups of their own, such as the dp groups of the ranks of a tp
        group, keep their copies alike where a policy decides as training goes on: ``auto`` and rules with ``adapt``.
        All groups must start the same operations, in the same order. Decisions begin anew. Collective over ``larger``,
        which must not be freed before this communicator.

        Args:
            larger: communicator that has all ranks of this one, and of the other groups.

        Raises:
            ValueError: on all ranks; ``larger`` lacks a rank, or its groups have unlike numbers of ranks.
            MismatchError: on all ranks; the groups have unlike policies.
        """
        self._automatic.join(larger)
        self._profile = larger._profile
        self._decide()
        self._reconsider()

    @property
    def deciding(self) -> int:
        """Return the number of ranks that decide together."""
        larger = self._automatic.together
        return self.size if larger is None else larger.size

    def _decide(self) -> None:
        """Have a new decider choose where the policy leaves choices to ``auto``, with nothing decided yet."""
        self.decider = self._automatic.begin(self._policy, self._chooser, self._profile)
        self._review_at = (
            NEVER if self.decider is None else self._started + self._automatic.review(self._started)
        )

    def review(self) -> None:
        """Review the decisions of ``auto``, if that is due; called before an operation whose choice is asked for."""
        if self._started < self._review_at:
            return
        self._review_at = NEVER  # the review starts an operation, too
        following = self._automatic.review(self._started)
        self._review_at = self._started + following

    @property
    def axis(self) -> str:
        """Return the mesh axis that this communicator spans."""
        return self._axis

    @axis.setter
    def axis(self, axis: str) -> None:
        self._axis = axis
        self._reconsider()

    def _choose_anew(self) -> None:
        """Forget what was chosen before the automatic policy has decided otherwise."""
        self._choices.forget()
        self._reconsider()

    def _reconsider(self) -> None:
        """Do nothing; a subclass drops here the results it has cached under an earlier policy, axis or timeout."""

    @property
    def hosts(self) -> int:
        """Return the number of hosts that the ranks are on."""
        return self._topology.count

    @property
    def busy(self) -> bool:
        """Tell whether operations in which all ranks take part are in flight here."""
        return self._notices is not None and engine().in_flight(self._notices)

    def stats(self) -> Stats:
        """Return totals per operation and codec since the communicator was made, on this rank, and means of a step."""
        return Stats(self._table.rows(), between(self._steps_before, clock.totals))

    def activity(self) -> Activity:
        """Return the activity of the communicator that ``hybridcomp top`` shows; may be called by any thread."""
        flying = in_flight(engine().operations(self.key), self.world_ranks)
        return Activity(self.key, self._axis, self.size, self._started, self._table.rows(), flying)

    # -- the policy ----------------------------------------------------------------------------------

    def choose(
        self,
        op: str,
        data: Flat,
        name: str | None,
        phase: str | None,
        codec: CodecLike,
        elements: int | None = None,
        *,
        ahead: bool = False,
    ) -> Choice:
        """Choose the codec of an operation: the call's own, or the policy's.

        Args:
            op: the policy's word for the operation.
            data: array that the operation carries.
            name, phase, codec: what the call says: see :mod:`.communicator`.
            elements: number of elements that the policy is asked about; None for the array's shape.
            ahead: as in :meth:`.Choices.choose`.

        Raises:
            CodecMismatchError: the call's codec cannot carry the array.
        """
        if self.size == 1:
            return Choice(NONE, None, "one rank")
        if op != "send":  # not all ranks take part in a send
            self.review()
        if codec is not None:
            return explicit_choice(codec, op, data)
        shape = data.shape if elements is None else (elements,)
        asked = self.decider or self.policy
        return self._choices.choose(
            asked, self.axis, op, data.dtype, shape, name, phase, self.step, ahead=ahead
        )

    # -- starting ------------------------------------------------------------------------------------

    def new_call(self, op: str, choice: Choice, raw: int, plain: int, **about: Any) -> Call:
        """Make the statistics of the operation that starts next: see :meth:`.OperationStarter.new_call`."""
        if self._comparison is not None and op not in ("send", "recv"):
            # Ranks that have started different operations before have taken different numbers of tags.
            self.transport.begin(self._started + 1)
        return Call(self._axis, op, choice.counted_as, choice.reason, raw, plain, about)

    def new_plain_call(self, op: str, raw: int, plain: int, **about: Any) -> Call:
        """Make the statistics of an operation that no policy compresses."""
        reason = "never compressed" if op != "recv" else "as sent"
        return Call(self.axis, op, NONE.spec, reason, raw, plain, about)

    def start_steps(
        self,
        steps: Steps,
        call: Call,
        *,
        exact: bool = False,
        status: MPI.Status | None = None,
        common: bool = True,
        counted: bool = True,
        run: object = None,
    ) -> Request:
        """Start an operation.

        Args:
            steps, status, run: see :meth:`.Engine.start`.
            call: statistics of the operation.
            exact: whether it sends the bytes of an uncompressed operation; otherwise it counts its bytes itself.
            common: whether all ranks take part in it.
            counted: whether statistics count it here.
        """
        if self._freed:
            raise self._gone(call.op)
        if common and self._notices is not None and self._notices.undecided is not None:
            self._await_refusals(call.op)
        if exact:
            call.wire_bytes = call.plain_bytes
            call.between_bytes = leaving(call.plain_bytes, self._away, call.about.get("peer"))
        if common:
            self._started += 1
        else:
            self._messages += 1
        number = self._started if common else self._messages
        what = (call.op, number, self._axis, self._rank, self._size)
        if trace.recorder is not None and call.traced:
            self._place(call, number)
        if self.on_start is not None:
            self.on_start(call)
        if counted:
            steps = self._counted(steps, call, status)
        if self._comparison is not None and common:
            steps = self._comparison.before(steps, number, in_words(what), described(call), call.exchanged)
        if self._notices is not None and call.memory == "device":
            self._notices.on_device(number)
        return self._engine.start(
            steps,
            what,
            self._timeout,
            status,
            priority=call.raw_bytes.bit_length(),
            notices=self._notices if common else None,
            number=number,
            communicator=self.key,
            run=run,
        )

    def _await_refusals(self, op: str) -> None:
        """Wait until what this rank has refused is known to have begun nowhere: the next operation would meet it.

        Raises:
            MismatchError, CollectiveTimeoutError: see :meth:`.Engine.await_refusals`; the other ranks are told.
        """
        notices = self._notices
        if notices is None or notices.undecided is None:
            return
        what = f"{op} on axis {self._axis!r}, rank {self.rank} of {self.size}"
        try:
            engine().await_refusals(notices, what, self._timeout)
        except Exception as error:
            self._refuse(error)
            raise

    def _refuse(self, error: Exception) -> None:
        """Tell the other ranks of a collective that fails here before anything has begun."""
        if self._freed:
            return
        self._started += 1
        if self._notices is not None:
            engine().refuse(self._notices, self._started, error)

    def _counted(self, steps: Steps, call: Call, status: MPI.Status | None) -> Steps:
        yield from steps
        if call.place is not None and status is not None:  # a receive knows its message only now
            source = status.Get_source()
            if 0 <= source < self.size:
                call.place |= {"peer": self.world_ranks[source], "tag": status.Get_tag()}
        self._table.add(call)

    def _place(self, call: Call, number: int) -> None:
        """Note the place of an operation among those of its communicator, for the trace."""
        if trace.recorder is not None:
            trace.recorder.group(self.key, self.world_ranks)
        call.place = {"comm": f"{self.key:x}", "n": number, **(call.place or {})}

    def _gone(self, op: str) -> MPI.Exception:
        """Return MPI's error for an operation on a communicator that was freed."""
        error = MPI.Exception(MPI.ERR_COMM)
        error.add_note(f"{op} on axis {self._axis!r}, rank {self.rank} of {self.size}: it was freed")
        return error

    def check_rank(self, rank: int, what: str) -> None:
        """Raise MPI's error for a number that is no rank's; ``what`` is ``"root"`` or another word for the rank."""
        if not 0 <= rank < self.size:
            error = MPI.Exception(MPI.ERR_ROOT if what == "root" else MPI.ERR_RANK)
            error.add_note(f"{what} is {rank}; this communicator has ranks 0 to {self.size - 1}")
            raise error

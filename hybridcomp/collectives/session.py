"""Hold what a communicator's operations share; choose their codecs, start them, and count them.

An operation is started as a program of the compiled engine, as a schedule in Python, or as MPI's own.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mpi4py import MPI

from hybridcomp import trace, variables
from hybridcomp.arrays import Flat
from hybridcomp.codecs import Codec, ErrorFeedback, get_codec
from hybridcomp.collectives.agreement.agreement import Preparation
from hybridcomp.collectives.agreement.consistency import Comparison, described, in_detail
from hybridcomp.collectives.agreement.making import LEAST_SECONDS, Components, Founding, make
from hybridcomp.collectives.algorithms.schedules import OperationKey, Schedules
from hybridcomp.collectives.algorithms.selection import own_settings
from hybridcomp.collectives.automatic import Automatic
from hybridcomp.collectives.choices import Choices, CodecLike, OperationOptions, explicit_choice
from hybridcomp.collectives.data_path.carrier import Carrier
from hybridcomp.collectives.data_path.coding import NONE, Array
from hybridcomp.collectives.data_path.unexpected import Unexpected
from hybridcomp.collectives.device.cuda_aware import awareness
from hybridcomp.collectives.device.streams import callers_events
from hybridcomp.collectives.device.through_host import through_host
from hybridcomp.collectives.engine.groups import join_for_messages
from hybridcomp.collectives.engine.messages import MessagePrograms
from hybridcomp.collectives.engine.programs import Programs, running
from hybridcomp.collectives.execution.mpi_collectives import native
from hybridcomp.collectives.execution.observing import in_flight, world_ranks
from hybridcomp.collectives.execution.post_queue import PostTicket
from hybridcomp.collectives.execution.progress import Request, engine
from hybridcomp.collectives.execution.steps import Pending, Ready, Steps, sender
from hybridcomp.collectives.execution.timeouts import check_timeout, is_timeout
from hybridcomp.collectives.failure.release import release
from hybridcomp.collectives.failure.watchdog import in_words, watched
from hybridcomp.collectives.fast_path_cache import Learnt, library
from hybridcomp.collectives.figures import Figures
from hybridcomp.collectives.gathering import gather
from hybridcomp.collectives.starting import Operands, OperationStarter
from hybridcomp.collectives.stats import Call, Stats, StatTable, leaving
from hybridcomp.collectives.transport.mpi import MpiTransport
from hybridcomp.collectives.transport.topology import said_hosts
from hybridcomp.errors import CodecMismatchError, MismatchError
from hybridcomp.policy import Choice, Policy, default_policy, load_policy
from hybridcomp.policy.auto.cost import Place
from hybridcomp.policy.auto.decider import Decider
from hybridcomp.steps import between, clock
from hybridcomp.top.publish import Activity, hide, show

Op = MPI.Op | str
MANY = 1 << 40  # elements: more than any min_bytes
NEVER = 1 << 62  # operations

# One of MPI's own operations, called with its send and receive buffers, its ticket, and the conditions to wait for
# before it is posted.
Native = Callable[[Any, Any, PostTicket, Sequence[Ready]], Steps]


class Session(OperationStarter[Request]):
    """State that a communicator's operations share, and the ways in which they start.

    Args:
        comm: an mpi4py intracommunicator.
        policy, axis, timeout, detail: as in :class:`~hybridcomp.collectives.communicator.Communicator`.

    Attributes:
        rank, size: number of this rank, and of the ranks.
        policy: policy that chooses codecs; the same on all ranks.
        axis: mesh axis that this communicator spans.
        step: training step, for policies with a warm-up; the caller advances it.
        feedback: error-feedback memory of named messages.
        warm: arrays that linear codecs keep of named messages: PowerSGD's Q.
        key: random number that tells it from other communicators; the same on all ranks.
        mpi: duplicate of the caller's communicator, which collectives run on.
        p2p: duplicate that sends and receives run on, and whatever MPI itself does with a communicator of this package
            (attributes, windows, files, pickled objects); the null communicator once it is freed.
        transport: transport of collectives.
        message_transport: transport of sends and receives.
        message_programs: programs of single messages in the compiled engine; None where it is not in use.
        programs: the same of collectives.
        unexpected: messages that a probe has drawn from MPI; None until one has looked into an encoded message.
        compressed_from: bytes from which the policy compresses sends; None where it compresses none.
        learnt: operations that the fast path knows, and totals that it has not counted yet.
        table: statistics.
        topology: hosts of the ranks.
        away: for each rank, whether it is on another host.
        comparison: comparison of the ranks' operations before they run; None where there is none.
        notices: notices of failures on other ranks; None where there are none.
        started: number of collectives so far, the same on all ranks.
        messages: number of sends and receives so far.
        review_at: number of the collective before which ``auto`` reviews its decisions.
        freed: whether the communicator has been freed.
        world_ranks: number of each rank in the world.
        cuda_aware: whether every rank's MPI takes device pointers.
        spoilt: whether messages that no rank will take may be on their way: then the communicator is never freed.
        decider: decider of choices that the policy leaves to ``auto``; None where it leaves none.
        on_start: function called with each operation's statistics, in the thread that starts the operation, before any
            data moves; not for blocking operations on plain arrays that MPI does in one call.
    """

    rank = size = 0  # until the ranks have met
    transport: MpiTransport

    def __init__(
        self, comm: MPI.Comm | Founding, policy: Any, axis: str, timeout: float, detail: bool | None = None
    ) -> None:
        self._axis = axis
        self.freed = False
        self.step = 0
        self._feedback = ErrorFeedback(form=None)
        self.warm: dict[str, Array] = {}
        self.on_start: Callable[[Call], None] | None = None
        self.decider: Decider | None = None
        self.unexpected: Unexpected | None = None
        self._settle = library().settle
        self._changed: weakref.WeakMethod[Callable[[], None]] | None = None

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
        world = MPI.COMM_WORLD
        self._shown = show(self, self.table.rows, world.Get_rank(), world.Get_size())

    def _take(self, parts: Components) -> None:
        """Begin with the parts that all ranks have made."""
        self._policy: Policy = parts.agreed.policy
        self._engine = engine()
        self.key = parts.agreed.key
        self.mpi, self.p2p = parts.mpi, parts.p2p
        self.rank, self.size = self.mpi.Get_rank(), self.mpi.Get_size()
        self.table = StatTable()
        self._steps_before = clock.totals
        self.cuda_aware = parts.agreed.awareness
        direct = self.cuda_aware.messages
        self.topology = parts.topology
        self.away = parts.topology.away(self.rank)
        self._choices = Choices(self.topology.count)
        self._chooser = parts.chooser
        self._profile = parts.chooser.profile
        place = Place(self.size, self.topology.count, self.topology.largest, parts.group is not None)
        self._automatic = Automatic(self, place, weakref.WeakMethod(self._choose_anew))
        self.review_at = NEVER
        self._schedules: Schedules = Schedules(self.topology, self.rank, self._chooser)
        self._group = parts.group
        self.programs: Programs | None = None
        self.message_programs: MessagePrograms | None = None
        if parts.group is not None:
            self.programs = Programs(parts.group, self._schedules)
            self.message_programs = MessagePrograms(join_for_messages(self.p2p, self.away))
        self.transport = MpiTransport(self.mpi, self.topology, direct=direct, group=parts.group)
        self.message_transport: MpiTransport = MpiTransport(self.p2p, self.topology, direct=direct)
        self.message_transport.post_queue.common = False
        self.spoilt = False
        self.started = self.messages = 0
        self.comparison = None if parts.comparison is None else Comparison(parts.comparison)
        self.learnt = Learnt(self.rank, self.table, self.away)
        self.compressed_from: int | None = None
        self.notices = parts.notices
        if self.notices is not None:
            engine().listen(self.notices)
        self.world_ranks = world_ranks(self.mpi)
        self._decide()
        self.reconsider()
        if trace.recorder is not None:
            trace.recorder.group(self.key, self.world_ranks)

    def free(self) -> None:
        """Release MPI's resources: see :meth:`.Communicator.Free`."""
        if self.freed:
            return
        hide(self._shown)
        self.freed = True
        # No collective of an operation's has run on the first one.
        comms: list[MPI.Comm] = [self.p2p, self.mpi]
        self.p2p = MPI.Intracomm()
        self.reconsider()
        with watched(f"Free on axis {self._axis!r}, rank {self.rank} of {self.size}", self._timeout):
            self._release(comms)

    def finish(self) -> None:
        """Wait until the operations in flight here have ended, well or not."""
        if not self.freed:
            for operation in self._engine.unfinished(self.key):
                self._engine.foreground.wait(operation, None)

    @property
    def failed(self) -> bool:
        """Tell whether an operation is known to have failed, here or on another rank: MPI may still be at work."""
        told = self.notices is not None and self.notices.troubled
        return self.spoilt or self.transport.failed or self.message_transport.failed or told

    def _release(self, comms: list[MPI.Comm]) -> None:
        if self.comparison is not None:
            comms.append(self.comparison.comm)
        under_way = self._engine.unfinished(self.key)

        def spoilt() -> bool:
            if self.notices is not None:
                self._engine.silence(self.notices)
            return self.failed or any(operation.exception is not None for operation in under_way)

        release(comms, spoilt=spoilt, drain=self._drain, freed=self._give_back, under_way=under_way)

    def _drain(self) -> None:
        """Take the notices that ranks have sent each other while they waited for the last operations."""
        if self.notices is not None:
            self.notices.drain()

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
            self.reconsider()

    @property
    def policy(self) -> Policy:
        """Return the policy that chooses codecs; the same on all ranks."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy = policy
        self._decide()
        self.reconsider()

    @property
    def feedback(self) -> ErrorFeedback:
        """Return the error-feedback memory of named messages; may be set between operations."""
        return self._feedback

    @feedback.setter
    def feedback(self, feedback: ErrorFeedback) -> None:
        self._feedback = feedback
        self.learnt.forget()  # whose operations have the memories of the one before

    def decide_together(self, larger: Session) -> None:
        """Decide together with a larger communicator: see :meth:`.Communicator.decide_together`."""
        self._automatic.join(larger)
        self._profile = larger._profile
        self._decide()
        self.reconsider()

    @property
    def deciding(self) -> int:
        """Return the number of ranks that decide together."""
        larger = self._automatic.together
        return self.size if larger is None else larger.size

    def _decide(self) -> None:
        """Have a new decider choose where the policy leaves choices to ``auto``, with nothing decided yet."""
        self.decider = self._automatic.begin(self._policy, self._chooser, self._profile)
        self.review_at = (
            NEVER if self.decider is None else self.started + self._automatic.review(self.started)
        )

    def review(self) -> None:
        """Review the decisions of ``auto``, if that is due; called before an operation whose choice is asked for."""
        if self.started < self.review_at:
            return
        self.review_at = NEVER  # the review starts an operation, too
        following = self._automatic.review(self.started)
        self.review_at = self.started + following

    @property
    def axis(self) -> str:
        """Return the mesh axis that this communicator spans."""
        return self._axis

    @axis.setter
    def axis(self, axis: str) -> None:
        self._axis = axis
        self.reconsider()

    def _choose_anew(self) -> None:
        """Forget what was chosen before the automatic policy has decided otherwise."""
        self._choices.forget()
        self.reconsider()

    def listen(self, changed: Callable[[], None]) -> None:
        """Have a method called, while its object lives, once policy, axis or timeout are others, and at the end."""
        self._changed = weakref.WeakMethod(changed)

    def reconsider(self) -> None:
        """Drop what is cached under an earlier policy, axis or timeout."""
        self.learnt.forget()
        self.learnt.where = f"on axis {self._axis!r}, rank {self.rank} of {self.size}"
        self.learnt.timeout = self._timeout
        self.learnt.settled_from = self._policy.last_change
        self.compressed_from = self._policy.least_bytes(self._axis, "send")
        changed = None if self._changed is None else self._changed()
        if changed is not None:
            changed()

    @property
    def hosts(self) -> int:
        """Return the number of hosts that the ranks are on."""
        return self.topology.count

    @property
    def busy(self) -> bool:
        """Tell whether operations in which all ranks take part are in flight here."""
        return self.notices is not None and engine().in_flight(self.notices)

    def stats(self) -> Stats:
        """Return totals per operation and codec since the communicator was made, on this rank, and means of a step."""
        self.learnt.settle()
        return Stats(self.table.rows(), between(self._steps_before, clock.totals))

    def activity(self) -> Activity:
        """Return the activity of the communicator that ``hybridcomp top`` shows; may be called by any thread."""
        self.learnt.settle()
        flying = in_flight(engine().operations(self.key), self.world_ranks)
        return Activity(self.key, self._axis, self.size, self.started, self.table.rows(), flying)

    # -- the policy ----------------------------------------------------------------------------------

    def choose(
        self,
        op: str,
        data: Flat,
        options: OperationOptions,
        elements: int | None = None,
        *,
        ahead: bool = False,
    ) -> Choice:
        """Choose the codec of an operation: the call's own, or the policy's.

        Args:
            op: the policy's word for the operation.
            data: array that the operation carries.
            options: what the call says.
            elements: number of elements that the policy is asked about; None for the array's shape.
            ahead: as in :meth:`.Choices.choose`.

        Raises:
            CodecMismatchError: the call's codec cannot carry the array.
        """
        if self.size == 1:
            return Choice(NONE, None, "one rank")
        if op != "send":  # not all ranks take part in a send
            self.review()
        if options.codec is not None:
            return explicit_choice(options.codec, op, data)
        shape = data.shape if elements is None else (elements,)
        asked = self.decider or self.policy
        return self._choices.choose(
            asked, self.axis, op, data.dtype, shape, options.name, options.phase, self.step, ahead=ahead
        )

    # -- starting ------------------------------------------------------------------------------------

    def new_call(self, op: str, choice: Choice, raw: int, plain: int, **about: Any) -> Call:
        """Make the statistics of the operation that starts next: see :meth:`.OperationStarter.new_call`."""
        if self.comparison is not None and op not in ("send", "recv"):
            # Ranks that have started different operations before have taken different numbers of tags.
            self.transport.begin(self.started + 1)
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
        if self.freed:
            raise self.gone(call.op)
        if common and self.notices is not None and self.notices.undecided is not None:
            self.await_refusals(call.op)
        if exact:
            call.wire_bytes = call.plain_bytes
            call.between_bytes = leaving(call.plain_bytes, self.away, call.about.get("peer"))
        if common:
            self.started += 1
        else:
            self.messages += 1
        number = self.started if common else self.messages
        what = (call.op, number, self._axis, self.rank, self.size)
        if trace.recorder is not None and call.traced:
            self._place(call, number)
        if self.on_start is not None:
            self.on_start(call)
        if counted:
            steps = self._counted(steps, call, status)
        if self.comparison is not None and common:
            steps = self.comparison.before(steps, number, in_words(what), described(call), call.exchanged)
        if self.notices is not None and call.memory == "device":
            self.notices.on_device(number)
        return self._engine.start(
            steps,
            what,
            self._timeout,
            status,
            priority=call.raw_bytes.bit_length(),
            notices=self.notices if common else None,
            number=number,
            communicator=self.key,
            run=run,
        )

    def await_refusals(self, op: str) -> None:
        """Wait until what this rank has refused is known to have begun nowhere: the next operation would meet it.

        Raises:
            MismatchError, CollectiveTimeoutError: see :meth:`.Engine.await_refusals`; the other ranks are told.
        """
        notices = self.notices
        if notices is None or notices.undecided is None:
            return
        what = f"{op} on axis {self._axis!r}, rank {self.rank} of {self.size}"
        try:
            engine().await_refusals(notices, what, self._timeout)
        except Exception as error:
            self.refuse(error)
            raise

    def refuse(self, error: Exception) -> None:
        """Tell the other ranks of a collective that fails here before anything has begun."""
        if self.freed:
            return
        self.started += 1
        if self.notices is not None:
            engine().refuse(self.notices, self.started, error)

    def _counted(self, steps: Steps, call: Call, status: MPI.Status | None) -> Steps:
        yield from steps
        if call.place is not None and status is not None:  # a receive knows its message only now
            source = status.Get_source()
            if 0 <= source < self.size:
                call.place |= {"peer": self.world_ranks[source], "tag": status.Get_tag()}
        self.table.add(call)

    def _place(self, call: Call, number: int) -> None:
        """Note the place of an operation among those of its communicator, for the trace."""
        if trace.recorder is not None:
            trace.recorder.group(self.key, self.world_ranks)
        call.place = {"comm": f"{self.key:x}", "n": number, **(call.place or {})}

    def gone(self, op: str) -> MPI.Exception:
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

    # -- the ways in which operations start -----------------------------------------------------------

    def find_compiled(self, key: OperationKey, algorithm: str | None) -> Callable[..., Request] | None:
        """Find an operation's program: see :meth:`.OperationStarter.find_compiled`."""
        program = None if self.programs is None else self.programs.find(key, algorithm)
        if program is None:
            return None
        assert self.programs is not None
        return functools.partial(self._execute, program, self.programs.codec(key, algorithm))

    def find_joined(
        self, key: OperationKey, extents: Sequence[tuple[int, int]]
    ) -> Callable[..., Request] | None:
        """Find the program of an operation on parts of an array: see :meth:`.OperationStarter.find_joined`."""
        program = None if self.programs is None else self.programs.find_joined(key, tuple(extents))
        if program is None:
            return None
        assert self.programs is not None
        codec = self.programs.codec(key._replace(counts=key.counts[:1]))  # that of every part
        return functools.partial(self._execute, program, codec)

    def start_sparing(self, key: OperationKey, call: Call, operands: Operands) -> Request | None:
        """Start an uncompressed operation in two levels, by the engine; None where it is MPI's.

        Args:
            key: key of the operation, whose counts are the same on all ranks.
            call: statistics of the operation.
            operands: buffers of the operation.
        """
        if self.programs is None or (operands.device and self.cuda_aware.collectives):
            return None
        program = self.programs.sparing(key)
        return None if program is None else self._execute(program, key.codec, call, operands)

    def gather_figures(self, values: Figures) -> Callable[[], Figures]:
        """Start to gather the deciding ranks' values: see :meth:`.OperationStarter.gather_figures`."""
        larger = self._automatic.together
        return gather(self, values) if larger is None else gather(larger, values, compare=True)

    def _tags(self) -> list[int]:
        return self.transport.tags()

    def reserve(self) -> Any:
        """Reserve the tags or numbers for the messages of one sum, in program order."""
        return super().reserve() if self.programs is None else self.programs.reserve()

    def sum_array(
        self, carrier: Carrier, flat: Flat, key: OperationKey, algorithm: str | None, reserved: Any
    ) -> Steps:
        """Sum an array over the ranks: see :meth:`.OperationStarter.sum_array`."""
        if self.programs is None:
            return super().sum_array(carrier, flat, key, algorithm, reserved)
        if not flat.size:
            return (Pending([], []) for _ in ())
        # Messages are framed, by the codec ``none``, where an algorithm is asked for.
        key = key._replace(compresses=algorithm is not None and not key.fold)
        return running(self.programs.find(key, algorithm), reserved, carrier, flat, flat)

    def _execute(
        self,
        program: Any,
        codec: Codec,
        call: Call,
        operands: Operands,
        *,
        feedback: Callable[[Carrier], Any] | None = None,
    ) -> Request:
        """Start a compiled program; the arguments are those of :meth:`start_scheduled`, with the program's codec."""
        self._engine.check_process(
            call.op
        )  # a thread of the parent process may have held the lock taken below
        assert self.programs is not None
        first = self.programs.reserve()
        call.memory = "host"
        return self.start_carried(
            functools.partial(running, program, first, codec=codec),
            codec,
            call,
            operands,
            on_host=True,
            feedback=feedback,
        )

    def start_native(
        self,
        run: Native,
        call: Call,
        operands: Operands,
        *,
        direct: bool | None = None,
        transport: MpiTransport | None = None,
        exact: bool = True,
        status: MPI.Status | None = None,
    ) -> Request:
        """Start one of MPI's own operations, or another that MPI matches in the order of posting.

        Args:
            run: operation to start.
            call: statistics of the operation.
            operands: buffers of the operation.
            direct: whether to hand MPI the device's pointers; None to do so where MPI takes them in collectives.
            transport: transport whose queue the operation posts by; None for that of collectives.
            exact: whether it sends the bytes of an uncompressed operation; otherwise it counts its bytes itself.
            status: status of a receive.
        """
        send, recv, device, loads, written = operands
        t = transport or self.transport
        if direct is None:
            direct = self.cuda_aware.collectives

        def steps() -> Steps:
            with t.post_queue.take().held() as ticket:
                if direct or not device:
                    yield from run(send, recv, ticket, callers_events(device))
                else:
                    yield from through_host(
                        t,
                        device,
                        send,
                        recv,
                        lambda s, r: run(s, r, ticket, ()),
                        loads=loads,
                        written=written,
                    )

        return self.start_posted(steps(), call, exact=exact, status=status, common=transport is None)

    def start_posted(self, steps: Steps, call: Call, **how: Any) -> Request:
        """Start an operation that MPI may refuse in the call; raise the refusal here, as MPI does."""
        request = self.start_steps(steps, call, **how)
        request.raise_refusal()
        return request

    def start_foreign(
        self,
        op: str,
        post: Callable[[], MPI.Request],
        codec: CodecLike = None,
        *,
        transport: MpiTransport | None = None,
        peer: int = -1,
        status: MPI.Status | None = None,
        call: Call | None = None,
    ) -> Request:
        """Start one of MPI's own operations on the caller's buffers as they are.

        Args:
            op: operation, for error messages.
            post: function that starts it.
            codec: codec that the call asks for.
            transport, status: as in :meth:`start_native`.
            peer: rank at the other end; -1 for all ranks.
            call: statistics of the operation; None for buffers that only MPI understands, whose size is not in them.

        Raises:
            CodecMismatchError: the call asks for a codec.
        """
        fixed = codec.codec if isinstance(codec, Choice) else codec
        if fixed is not None and get_codec(fixed).name != "none":
            raise CodecMismatchError(f"{op}: a codec cannot carry a buffer that only MPI understands")
        t = transport or self.transport
        engine().check_process(op)
        if self.freed:
            raise self.gone(op)
        if transport is None:
            self.await_refusals(op)
        if t.post_queue.empty and self.comparison is None:
            # Post at once: where MPI refuses wrong arguments, this call raises, and no operation has begun.
            post = _begun(post())

        if call is None:
            call = Call(self.axis, op, NONE.spec, "a buffer that only MPI understands", 0, 0)
        return self.start_native(
            lambda _s, _r, ticket, events: native(post, ticket, events, peer, status),
            call,
            Operands(),
            transport=transport,
            status=status,
        )

    # -- operations that MPI has, of which the engine knows nothing yet ------------------------------

    def take_over(
        self, request: MPI.Request, op: str, peer: int | None, number: int, status: MPI.Status | None
    ) -> Request:
        """Have the engine go on with an operation that MPI has: see :class:`~hybridcomp.collectives.requests.Begun`."""
        if peer is not None and not number:
            self.messages = number = self.messages + 1
        peers = [-1 if peer is None else peer]
        sends = peer is not None and op != "recv"

        def steps() -> Steps:
            yield Pending([request], peers, None if status is None else [status], sends=sends)

        return self._engine.start(
            steps(),
            (op, number, self._axis, self.rank, self.size),
            self._timeout,
            status,
            notices=self.notices if peer is None and not self.freed else None,
            number=number,
            communicator=self.key,
        )

    def waited(self, request: MPI.Request, status: MPI.Status | None, peer: int | None) -> bool:
        """Poll an operation that MPI has for a moment; return whether it has ended."""
        try:
            at = 0 if status is None else MPI._addressof(status)
            return bool(self._settle(MPI._addressof(request), at))
        except MPI.Exception as error:
            raise self.explained(error, peer) from None

    def explained(self, error: MPI.Exception, peer: int | None) -> Exception:
        """Return the error to raise for one of MPI's: a message that is too long is a mismatch."""
        if peer is None or error.Get_error_class() != MPI.ERR_TRUNCATE:
            return error
        return self.too_large(peer, str(error))

    def too_large(self, peer: int, why: str) -> MismatchError:
        """Return the error of a message that is longer than the buffer of its receive."""
        what = f"recv on axis {self._axis!r}, rank {self.rank} of {self.size}"
        return MismatchError(f"{what}: {sender(peer)} sent more than this rank has room for ({why})")


def _begun(request: MPI.Request) -> Callable[[], MPI.Request]:
    """Return a function that "starts" an operation that MPI has already begun, by returning its request."""
    return lambda: request


class HasSession(Protocol):
    """Communicator, or a part of one, that has a session."""

    @property
    def session(self) -> Session:
        """Return what its operations share."""

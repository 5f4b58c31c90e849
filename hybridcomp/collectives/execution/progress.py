"""Make operations progress: generators that yield the MPI requests and device events that they wait for.

An operation's code runs in steps. The first step runs in the thread that starts it, so that operations get
their tags and post their MPI collectives in program order; every later step runs as soon as the requests and
events it yielded have completed, in the thread that polls: the foreground while some thread waits, otherwise one
background thread. Both sleep between polls. A blocking MPI call would spin, and take the core that training
computes on; no step waits for a device either.

Urgent operations step first, small before large: a bulk transfer gives way as soon as its steps have taken a fraction
of a millisecond. An operation that fails on one rank ends on all (:mod:`~.failure.notices`).
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter

from mpi4py import MPI

from hybridcomp import trace
from hybridcomp.collectives.execution.background import Background
from hybridcomp.collectives.execution.foreground import LISTEN, SLEEP_MIN, Foreground
from hybridcomp.collectives.execution.observing import world_ranks
from hybridcomp.collectives.execution.request import Request
from hybridcomp.collectives.execution.steps import Steps
from hybridcomp.collectives.execution.traced_waits import say_waited
from hybridcomp.collectives.execution.wait import PollingLock
from hybridcomp.collectives.failure.blocked import await_threads
from hybridcomp.collectives.failure.notices import Leaving, Notices
from hybridcomp.collectives.failure.release import collect, keep
from hybridcomp.collectives.failure.signals import deferral
from hybridcomp.collectives.failure.supervision import OF_ANY_MESSAGE, close, distrusted, forsake, heed, unmix
from hybridcomp.collectives.failure.watchdog import Name, in_words, watch_process, watched
from hybridcomp.errors import CollectiveTimeoutError, ConfigError, MismatchError
from hybridcomp.pmi import ending, lifeline

__all__ = ["Engine", "Request", "engine"]

_URGENT = 0.3e-3  # seconds of steps, before more urgent operations are polled again
_ROUND = 3e-3  # seconds of steps in one poll, before other threads may have the lock
_LISTEN_IDLE = 0.1  # seconds between polls of notices while no operation is in flight
_ANSWER_SECONDS = 1.0  # time for other ranks to say how far they are
_EXIT_SECONDS = 5.0  # time that an exiting process gives its operations in flight
_urgency = attrgetter("priority")
_LEAVE_SECONDS = 1.0  # time that it gives its last notices
_LEAVE_PAUSE = 0.5e-3  # seconds between its looks for answers to them


class Engine:
    """Progress engine of this process (:func:`engine`), with all its operations in flight.

    Attributes:
        foreground: threads that wait for operations.
        attending: thread that waits for the operations it starts now, so that the background thread can sleep on: it
            polls a tenth of a second later even so, if no thread waits. None if no thread does.
        lock: lock of whoever polls operations or adds to them.
        active: operations in flight, the most urgent first, of equals the oldest; changed with the lock held.
        begun: operations that compiled code has posted and that no thread has polled yet; compiled code adds to it.
        thrown: error of a signal's handler that could not be deferred, thrown into a step; raised once no lock is held.
    """

    def __init__(self) -> None:
        self.begun: deque[Request] = deque()
        self.lock = PollingLock()
        self.active: list[Request] = []
        self._abandoned: list[Request] = []  # ended early: MPI may still write to their buffers
        self._listening: list[Notices] = []
        self._gone: dict[int, str] = {}  # ranks of the job whose processes have ended without a word
        self._listened = 0.0
        self._listened_to_all = 0.0
        self.attending: int | None = None
        self._moved = time.monotonic()  # when a step last ran
        self.foreground = Foreground(self)
        self._background = Background(self)
        self._pid = os.getpid()
        self.thrown: BaseException | None = None
        ending.hold()
        watch_process(f"rank {MPI.COMM_WORLD.Get_rank()} of {MPI.COMM_WORLD.Get_size()}")

    def start(
        self,
        steps: Steps,
        what: str | Name,
        timeout: float,
        status: MPI.Status | None = None,
        *,
        priority: int = 0,
        notices: Notices | None = None,
        number: int = 0,
        communicator: int = 0,
        run: object = None,
    ) -> Request:
        """Run the first step of an operation here; the other steps follow in the background or in ``wait``.

        Args:
            steps: steps of the operation.
            what: name of the operation, for error messages.
            timeout: seconds that the operation may take.
            status: status of a receive.
            priority: operations of a smaller number step first; of equals, the one that was started first.
            notices: notices by which the ranks learn of its failure; None where not all ranks take part in it.
            number: sequence number of the operation, the same on all ranks.
            communicator: key of the operation's communicator, if it has one.
            run: run of the compiled engine, if that has begun the operation: no step needs to run here then.
        """
        if os.getpid() != self._pid:
            self.check_process(what)
        request = Request(
            self,
            steps,
            what,
            timeout,
            status=status,
            priority=priority,
            notices=notices,
            number=number,
            communicator=communicator,
        )
        if run is not None:
            request.run = run
            self.begun.append(request)
            self.poll_soon()
            return request
        recorder = trace.recorder
        began = 0.0 if recorder is None else time.perf_counter()
        with deferral:
            lock = self.lock
            if not lock.acquire(blocking=False):
                lock.await_holder()
            try:
                self.begun.append(request)
                ended = self._take_in()
            finally:
                lock.release()
            if recorder is not None:  # the first steps may have encoded messages
                say_waited(recorder, request, began)
            if ended or self.thrown is not None:
                self._announce(ended)
            if not request.ended:
                self.poll_soon()
        return request

    def poll_soon(self) -> None:
        """Make a thread poll started operations: one that waits, this one if it waits next, or the background."""
        run = self.foreground.run
        if run is not None:  # a thread that waits in compiled code must look at the new ones, too
            run.recall()
        if self.attending != threading.get_ident():
            self._background.wake()

    def _take_in(self) -> list[Request]:
        """Run the first steps of operations that have been begun; return the operations that have ended by that."""
        ended: list[Request] = []
        while self.begun:
            request = self.begun.popleft()
            notices, number = request.notices, request.number
            if notices is not None:
                notices.begin(number)
            while request.step() and not request.ended:
                pass
            self._moved = time.monotonic()
            if request.ended:
                close(request)
                ended.append(request)
            else:
                insort(self.active, request, key=_urgency)
            # Its first step has run even so: MPI must find operations that it matches by order posted on all ranks.
            if notices is not None and (
                notices.news or notices.belated or number in notices.failures or notices.left
            ):
                ended += self._apply(notices)
        return ended

    def refuse(self, notices: Notices, number: int, error: Exception) -> None:
        """Notify the other ranks of an operation whose arguments this rank has refused, before it began anything."""
        if os.getpid() != self._pid:
            return  # a forked process is no rank, and a thread of its parent may have held the lock
        with self.lock:
            notices.begin(number, refused=True)
            notices.tell(number, error, refused=True)
            notices.end(number, well=False)
        self._background.wake()

    def await_refusals(self, notices: Notices, what: str, timeout: float) -> None:
        """Wait until all ranks have refused the operations that this one has refused, before it starts another.

        Raises:
            MismatchError: a rank has begun one of them.
            CollectiveTimeoutError: nobody has, but not all have refused it in time.
        """
        deadline = time.monotonic() + timeout

        def decided() -> bool:
            with self.lock:
                notices.poll()
            return notices.undecided is None or notices.begun_by is not None or time.monotonic() > deadline

        self.attend(decided)
        number = notices.undecided
        if number is None:
            return
        refused = f"{what}: number {number} was refused here"
        if notices.begun_by is None:
            raise CollectiveTimeoutError(f"{refused}, and not by all other ranks within {timeout:g} s")
        raise MismatchError(f"{refused}, and rank {notices.begun_by} has begun it: make a new communicator")

    def check_process(self, what: str | Name) -> None:
        """Raise ConfigError in a process forked after the engine's start; ``what`` names an operation of MPI."""
        if os.getpid() != self._pid:
            raise ConfigError(
                f"{in_words(what)}: MPI cannot be used in a process forked after it was initialised"
            )

    def listen(self, notices: Notices) -> None:
        """Poll a communicator's notices from now on."""
        with self.lock:
            self._listening.append(notices)
            self._lose(notices, self._gone)
        self._background.wake()

    def silence(self, notices: Notices) -> None:
        """Poll a communicator's notices no more."""
        with self.lock:
            self._listening.remove(notices)
            notices.close()

    def in_flight(self, notices: Notices) -> bool:
        """Tell whether operations of a communicator are in flight."""
        with self.lock:
            return any(request.notices is notices for request in [*self.active, *self.begun])

    def operations(self, communicator: int) -> list[Request]:
        """Return the operations in flight of the communicator with that key; takes no lock."""
        return [one for one in [*self.active, *self.begun] if one.communicator == communicator]

    def unfinished(self, communicator: int) -> list[Request]:
        """Return the operations of a communicator that have not ended; each one's callbacks run after this."""
        with self.lock:
            return self.operations(communicator)

    def hand_over(self) -> None:
        """Let the background thread go on with the operations in flight, since the calling thread polls no longer."""
        self._background.wake()

    def cancel(self, request: Request) -> bool:
        """Cancel a receive: see :meth:`Request.cancel`."""
        with deferral:
            with self.lock:
                ended = self._take_in()
                cancelled = request.try_cancel()
            self._announce(ended)
        return cancelled

    def poll(self) -> bool:
        """Advance every operation that can step; return whether any ended. Gives way if another thread polls."""
        with deferral:
            if not self.lock.acquire(blocking=False):
                return False
            try:
                ended = self._advance()
            finally:
                self.lock.release()
            if ended or self.thrown is not None:
                self._announce(ended)
        return bool(ended)

    def _announce(self, ended: Iterable[Request]) -> None:
        """Run the callbacks of ended operations; no lock is held. Then raise the error that was thrown into a step."""
        for request in ended:
            try:
                request.run_callbacks()
            except BaseException as error:
                self.thrown = error
        thrown, self.thrown = self.thrown, None
        if thrown is not None:
            raise thrown

    def _advance(self) -> Sequence[Request]:
        """Run the steps that can run, until an operation has ended; return the operations that have ended."""
        if self.begun and (ended := self._take_in()):
            return ended
        active = self.active
        began = polled = time.monotonic()
        moved = False
        at = 0
        while at < len(active):
            request = active[at]
            if request.step():
                moved = True
                if request.ended:
                    break
                now = time.monotonic()
                if now - began > _ROUND:
                    break
                if now - polled > _URGENT:
                    at, polled = 0, now
                continue
            if began > request.deadline:
                self._late(request)
                if request.ended:
                    break
            at += 1
        if moved:
            self._moved = time.monotonic()
        if at < len(active) and active[at].ended:
            request = active.pop(at)
            close(request)
            error = request.exception
            if isinstance(error, MPI.Exception) and error.Get_error_class() in OF_ANY_MESSAGE:
                return (request, *self._distrust(error))
            return (request,)
        if not moved and self._listening and began - self._listened > LISTEN:
            self._listened = began
            return self._hear()
        return ()

    def _late(self, request: Request) -> None:
        """End an operation whose time is over, once the other ranks have answered how far they are."""
        notices = request.notices
        if notices is not None and not request.asking:
            request.asking = True
            request.deadline = time.monotonic() + _ANSWER_SECONDS
            notices.ask(request.number)
            return
        request.abandon(request.late())
        self._abandoned.append(request)

    def _hear(self) -> list[Request]:
        """Poll the notices of communicators with waiting operations, sometimes of all; return the operations ended."""
        ended: list[Request] = []
        self._look_for_gone()
        heard: Iterable[Notices] = {r.notices: None for r in self.active if r.notices is not None}
        if self._listened - self._listened_to_all > _LISTEN_IDLE:
            self._listened_to_all = self._listened
            heard = self._listening
        for notices in heard:
            notices.poll()
            if notices.news or notices.left:
                ended += self._apply(notices)
            ended += self._removed(unmix(notices, [r for r in self.active if r.notices is notices]))
        return ended

    def _look_for_gone(self) -> None:
        """Learn which processes of the job have ended without a word, if anybody knows."""
        gone = lifeline.gone()
        if gone:
            self._gone |= gone
            ending.leave_mpi()  # its end would wait for them
            for notices in self._listening:
                self._lose(notices, gone)

    def _lose(self, notices: Notices, gone: Mapping[int, str]) -> None:
        for rank, world_rank in enumerate(world_ranks(notices.comm) if gone else ()):
            if world_rank in gone:
                notices.lose(rank, gone[world_rank])

    def _apply(self, notices: Notices) -> list[Request]:
        """Apply notices; return the operations that they have ended."""
        if notices.broken is not None:
            broken, notices.broken = notices.broken, None
            notices.news = False
            return self._distrust(broken)
        ended = heed(notices, [r for r in self.active if r.notices is notices])
        if notices.left:
            if any(left.how == Leaving.CRASHED for left in notices.left.values()):
                ending.leave_mpi()  # its end would wait for them
            ended += forsake(notices, self.active)
        return self._removed(ended)

    def _removed(self, ended: list[Request]) -> list[Request]:
        """Take operations that have ended early out of those in flight; MPI may still write to their buffers."""
        for request in ended:
            self.active.remove(request)
            self._abandoned.append(request)
        return ended

    def _distrust(self, broken: MPI.Exception) -> list[Request]:
        """End all operations in flight for an error of MPI's that may concern any of them; return them."""
        ended = list(self.active)
        self.active.clear()
        for request in ended:
            request.abandon(distrusted(request, broken))
            close(request)
            self._abandoned.append(request)
        return ended

    def attend(self, until: Callable[[], bool], *, aside: bool = False) -> None:
        """Poll in this thread until a condition holds; see :meth:`Foreground.attend`."""
        self.foreground.attend(until, aside=aside)

    # -- the background's side -----------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Tell whether nothing is in flight."""
        return not (self.active or self.begun)

    @property
    def listens(self) -> bool:
        """Tell whether there are communicators whose notices are polled."""
        return bool(self._listening)

    def quiet(self) -> float:
        """Return the seconds for which nothing has moved."""
        return time.monotonic() - self._moved

    def listen_idle(self) -> None:
        """Poll all notices while nothing is in flight."""
        with self.lock:
            if not MPI.Is_finalized():
                self._look_for_gone()
                # An operation that starts meanwhile finds the news; one that has begun to wait is polled next.
                for notices in self._listening:
                    notices.poll()
                    if self.idle:
                        notices.broken = None  # the error concerns no operation in flight

    def stop(self) -> None:
        """End the operations in flight at exit: MPI_Finalize comes after the interpreter has freed all buffers."""
        if os.getpid() != self._pid:
            return  # a forked process ends: these are its parent's operations
        with watched("the exit of the process", _EXIT_SECONDS):
            self._end()

    def _end(self) -> None:
        self._background.stop()
        deadline = time.monotonic() + (0.0 if _crash() else _EXIT_SECONDS)
        try:
            while not self.idle and time.monotonic() < deadline:
                if not self.poll() and not self.foreground.wait_natively():
                    time.sleep(self.foreground.pause(SLEEP_MIN))
            if not _crash():  # of what MPI has not ended MPICH tells, as of users of a communicator
                self._abandoned = [request for request in self._abandoned if not request.settled()]
        finally:
            # MPI_Finalize makes progress, too: messages that a peer sends even now must not be written to freed memory.
            for request in [*self.active, *self.begun, *self._abandoned]:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(request))
            if not MPI.Is_finalized():
                collect()
            keep()

    def leave(self) -> None:
        """Tell the ranks of all communicators that this process ends; after everything else that runs at its exit."""
        if os.getpid() != self._pid or MPI.Is_finalized() or not self.lock.acquire(blocking=False):
            return
        crash = _crash()
        try:
            with watched("the exit of the process", _EXIT_SECONDS):
                self._say_farewell(crash)
        finally:
            self.lock.release()
        if not await_threads(_LEAVE_SECONDS):
            ending.leave_mpi()

    def _say_farewell(self, crash: str) -> None:
        """Tell the other ranks that this process ends, and wait until they have ended what has ended here.

        Until then they may ask for its progress. MPI's end waits for them within a host, and not over TCP.
        """
        how = Leaving.CRASHED if crash else Leaving.WELL if self.idle else Leaving.BUSY
        waits = []
        for notices in self._listening:
            notices.poll()
            # Where something has failed, a rank may be gone that nobody knows of.
            waiting = how is Leaving.WELL and not notices.failed
            notices.leave(crash or "its process has ended", Leaving.WAITING if waiting else how)
            if waiting:
                waits.append(notices)
        began = time.monotonic()
        while waits:
            waits = [notices for notices in waits if notices.waits_on(time.monotonic() - began)]
            time.sleep(_LEAVE_PAUSE)


def _crash() -> str:
    """Return the exception by which this program ends, in words; '' if it ends by none."""
    error = getattr(sys, "last_value", None)  # set once the traceback has been printed
    return "" if error is None else f"{type(error).__name__}: {error}"


_engine: Engine | None = None
_engine_lock = threading.Lock()


def leave() -> None:
    """Tell the ranks of all communicators that this process ends, if it has any."""
    if _engine is not None:
        _engine.leave()


def engine() -> Engine:
    """Return the process's engine."""
    global _engine  # noqa: PLW0603  (one per process by nature)
    with _engine_lock:
        if _engine is None:
            _engine = Engine()
        return _engine

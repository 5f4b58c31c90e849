"""Exchange notices between a communicator's ranks: of failed operations, of each rank's progress, and of its end.

Where an operation waits for long, the ranks ask each other whether its arrays lie on a device: arrays in host memory
take another way, on which ranks would wait for each other for ever.

Notices of 256 bytes each travel on the communicator of collectives, with a tag above those of operations' messages.
Nothing is posted for them: the engine probes every few milliseconds while an operation waits, and ten times a second
while none is in flight. So they cost nothing while messages flow, and a communicator that is freed leaves nothing
behind.

::

    magic  kind  detail  length of text  key of the communicator  operation  latest operation here  text
    4      1     1       2               8                        8          8                      up to 224
"""

from __future__ import annotations

import struct
import time
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from hybridcomp.arrays import ByteArray
from hybridcomp.collectives.failure.posting import Outbox
from hybridcomp.collectives.failure.watchdog import inside_mpi
from hybridcomp.errors import CollectiveTimeoutError

_FORM = struct.Struct("<4sBBHQQQ")
_MAGIC = b"HCN1"
_BYTES = 256
_ROOM = _BYTES - _FORM.size
TAG = 32_000  # above those of operations' messages (transport/mpi.py, kernels/engine/group.hpp), below MPI's 32767
_KEPT = 256  # failures of operations that have not started here: more than a program has in flight
_REMEMBERED = 4096  # ended operations: more than other ranks are behind
_PATIENCE = 0.25  # seconds of an operation before ranks ask each other where its arrays lie
_MOST_PATIENCE = 10.0  # seconds until a rank need not have started it to say that others differ
_LISTED = 8  # ranks that an error lists
_SILENCE_SECONDS = (
    5.0  # of a rank that leaves, after which it gives up those without an answer: they may be gone
)
_MOST_SECONDS = 300.0  # for those that have answered that they are behind
_LAST_POLLS = 4  # before a communicator is freed


class _NoticeType(IntEnum):
    FAILED = 1
    ASK = 2
    ANSWER = 3
    LEFT = 4
    BEGUN = 5  # an operation that the receiver has refused
    ASK_WHERE = 6
    ANSWER_WHERE = 7


class _Detail(IntEnum):
    """Ways in which an operation has failed."""

    ERROR = 0
    LATE = 1
    CAUSED = 2  # by an earlier operation's failure, whose number stands in place of the latest operation's
    REFUSED = 3  # its arguments were refused, and nothing was begun
    MIXED = 4  # some ranks have its arrays on a device, others in host memory


class Leaving(IntEnum):
    """Ways in which a rank leaves."""

    WELL = 0
    BUSY = 1  # it has messages in flight, which may still arrive
    CRASHED = 2  # by an exception: it takes no part in MPI's end
    WAITING = 3  # well, once the others have ended what it has ended, too


class State(IntEnum):
    """States of an operation on a rank."""

    NOT_STARTED = 0
    IN_FLIGHT = 1
    ENDED = 2


class Where(IntEnum):
    """Kinds of memory in which a rank has the arrays of an operation."""

    UNKNOWN = 0  # it has not started the operation
    HOST = 1
    DEVICE = 2


class Failure(NamedTuple):
    """Failure of an operation on another rank.

    Attributes:
        rank: rank on which the operation failed.
        late: whether the operation ran out of time there.
        text: text of its error.
        cause: number of the earlier operation whose failure ended it there; None if it failed by itself.
        mixed: whether it is the error of all ranks that their arrays lie in different kinds of memory.
    """

    rank: int
    late: bool
    text: str
    cause: int | None = None
    mixed: bool = False


class Left(NamedTuple):
    """Rank whose process ends, or has ended.

    Attributes:
        text: cause of its end.
        since: time at which that became known here, by :func:`time.monotonic`.
        latest: number of the latest operation up to which all have ended there; None where it has told nobody.
        how: its way of leaving.
    """

    text: str
    since: float
    latest: int | None
    how: Leaving


class Reply(NamedTuple):
    """Progress of a rank, as it answers.

    Attributes:
        state: state of the operation that was asked for.
        latest: number of the latest operation that the rank has started.
    """

    state: State
    latest: int


class _Inquiry(NamedTuple):
    """Question where the ranks have the arrays of an operation.

    Attributes:
        asked: time at which it was asked, by :func:`time.monotonic`.
        pause: seconds until it is asked again.
        answers: answers so far, by rank.
    """

    asked: float
    pause: float
    answers: dict[int, Where]


class Notices:
    """Notices of one communicator.

    The engine uses them, and holds its lock in every call.

    Attributes:
        rank: number of this rank.
        size: number of ranks.
        comm: MPI communicator of the notices.
        key: key of the communicator that they are about.
        latest: number of the latest operation started here; the same operation has the same number on all ranks.
        failures: failures, by number, of operations that have failed elsewhere and not ended here.
        belated: number and failure of an operation that had ended well here; the next operation reports it.
        news: whether notices have come that the engine has not acted on.
        ordered: whether operations start here in the order of their numbers.
        broken: error of MPI's in a look for notices, which may concern any operation in flight; None if none.
        left: ranks that have left, by rank; the engine ends the operations that need them.
        troubled: whether any operation has failed, here or elsewhere, or is about to: messages of it may be on their
            way. A rank that runs out of time asks before it gives up, so the ranks that have answered know. An
            operation that every rank has refused by itself leaves nothing behind: then nobody is in trouble.
        failed: whether an operation has failed that was not refused, or a rank has ended without a word: a rank that
            does not answer may be gone.
        undecided: number of an operation that was refused here, and perhaps begun elsewhere; None if there is none.
            Until all ranks have refused it, too, what starts here would meet it on those that have begun it.
        begun_by: rank that is known to have begun it.
    """

    def __init__(self, comm: MPI.Comm, key: int) -> None:
        """Exchange notices on ``comm``, where nothing else uses :data:`TAG`.

        ``key``, the same on all ranks, tells the communicator from freed ones.
        """
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.latest = 0
        self.troubled = False
        self.failed = False
        self._left_at: int | None = None  # the latest operation when this rank left
        self._awaiting: dict[int, int] = {}  # operations that ranks wait for before they leave, by rank
        self._sound = True  # whether nothing but refused operations has gone wrong
        self._refusals: dict[int, set[int]] = {}  # ranks that have refused an operation, by its number
        self.undecided: int | None = None
        self.begun_by: int | None = None
        self.failures: dict[int, Failure] = {}
        self.belated: tuple[int, Failure] | None = None
        self.left: dict[int, Left] = {}
        self.news = False
        self.broken: MPI.Exception | None = None
        self.ordered = True
        self.comm = comm
        self.key = key
        self._open: set[int] = set()
        self._ended: dict[int, bool] = {}  # for the latest ended operations, whether they ended well
        self._replies: dict[int, dict[int, Reply]] = {}
        self._devices: dict[int, None] = {}  # the latest operations whose arrays lie on a device
        self._inquiries: dict[int, _Inquiry] = {}
        self._buffer: ByteArray = np.empty(_BYTES, np.uint8)
        self._status = MPI.Status()
        self._incoming: MPI.Request | None = None
        self._outbox = Outbox(comm)
        self._closed = False

    def on_device(self, number: int) -> None:
        """Record that an operation that starts next has its arrays on a device, where it takes another way for that."""
        self._devices[number] = None
        if len(self._devices) > _REMEMBERED:
            del self._devices[next(iter(self._devices))]

    def is_on_device(self, number: int) -> bool:
        """Tell whether :meth:`on_device` was told of an operation."""
        return number in self._devices

    def begin(self, number: int, *, refused: bool = False) -> None:
        """Record that an operation starts here, or is refused."""
        self.latest = max(self.latest, number)
        self._open.add(number)
        if self.failures and self.ordered:
            self._pass_by(number)
        if self._refusals and not refused:
            self._say_begun(number)

    def _pass_by(self, number: int) -> None:
        """Record that operations before one have ended here that compiled code ran while notices of them came."""
        for earlier in sorted(n for n in self.failures if n < number and n not in self._open):
            failure = self.failures.pop(earlier)
            if failure.cause is None and self.belated is None:
                self.belated = (earlier, failure)
            self._say_begun(earlier)

    def _say_begun(self, number: int) -> None:
        """Notify the ranks that have refused an operation that it has begun here."""
        ranks = sorted(self._refusals.get(number, ()))
        if ranks and self.rank not in ranks:
            self._send(_NoticeType.BEGUN, 0, number, ranks)

    def end(self, number: int, *, well: bool) -> None:
        """Record that an operation has ended here."""
        self._open.discard(number)
        self._ended[number] = well
        if len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]
        self.failures.pop(number, None)
        self._replies.pop(number, None)
        self._inquiries.pop(number, None)

    def tell(
        self, number: int, error: BaseException, *, cause: int | None = None, refused: bool = False
    ) -> None:
        """Notify every other rank that an operation has failed here.

        Args:
            number: number of the operation.
            error: error that it ended with.
            cause: number of the earlier operation for whose failure it was ended, which all ranks have been told of.
            refused: whether its arguments were refused here, and nothing was begun.
        """
        if refused:
            self._refused(number, self.rank)
        else:
            self._fail()
        late = isinstance(error, CollectiveTimeoutError)
        text = str(error) if late else f"{type(error).__name__}: {error}"
        if cause is not None:
            self._send(_NoticeType.FAILED, _Detail.CAUSED, number, self._others(), text, cause)
        else:
            detail = _Detail.REFUSED if refused else _Detail.LATE if late else _Detail.ERROR
            self._send(_NoticeType.FAILED, detail, number, self._others(), text)

    def tell_mixed(self, number: int, text: str) -> None:
        """Notify every other rank of what :meth:`mixed` has found, which is the error of all."""
        self._fail()
        self._send(_NoticeType.FAILED, _Detail.MIXED, number, self._others(), text)

    def _fail(self) -> None:
        """Record that an operation has failed, or will."""
        self.failed = True
        self._worry()

    def _worry(self) -> None:
        """Record that messages of a failed operation may be on their way."""
        self.troubled, self._sound = True, False

    def _refused(self, number: int, rank: int) -> None:
        """Record that a rank has refused an operation before anything began."""
        ranks = self._refusals.setdefault(number, set())
        ranks.add(rank)
        if len(ranks) == self.size:
            del self._refusals[number]
        self.troubled = bool(self._refusals) or not self._sound
        if self.begun_by is None:
            self.undecided = min((n for n, who in self._refusals.items() if self.rank in who), default=None)

    def leave(self, text: str, how: Leaving) -> None:
        """Notify every other rank that this one leaves: it starts no further operation.

        Args:
            text: cause.
            how: way of leaving; after :attr:`Leaving.WAITING` :meth:`waits_on` tells for how long.
        """
        number = min(self._open, default=self.latest + 1) - 1
        self._left_at = number
        self._replies.setdefault(number, {})
        # Those that wait for this one at their ends have been told, or will be, that it is behind.
        self._send(_NoticeType.LEFT, how, number, [*self._others(), *self._awaiting], text)

    def waits_on(self, waited: float) -> bool:
        """Poll; tell whether this rank, which leaves, must wait on for others in operations that have ended here.

        It may have its result while they still wait for messages on a slow link. They ask it for its progress, and
        MPICH lets none of their messages move while it tries to connect to a process that has ended. For the same
        reason nothing is sent twice: a rank that is behind says so, and once more when it no longer is.

        Args:
            waited: seconds since it has left.
        """
        assert self._left_at is not None
        self.poll()
        replies = self._replies[self._left_at]
        silent = [rank for rank in self._others() if rank not in replies]
        behind = any(
            reply.state is not State.ENDED for rank, reply in replies.items() if rank not in self.left
        )
        if waited < _SILENCE_SECONDS:
            return bool(silent) or behind or self._outbox.unsent
        return behind and waited < _MOST_SECONDS

    def lose(self, rank: int, text: str) -> None:
        """Record that a rank's process has ended, though the rank has not told so."""
        self.left.setdefault(rank, Left(text, time.monotonic(), None, Leaving.CRASHED))
        self._fail()
        self.news = True

    def known(self, number: int) -> None:
        """Record that an operation's failure has been reported here: later notices of it are no news."""
        self._ended[number] = False
        if self.belated is not None and self.belated[0] == number:
            self.belated = None

    def ask(self, number: int) -> None:
        """Ask every other rank for its progress."""
        self._replies[number] = {}
        self._send(_NoticeType.ASK, 0, number, self._others())

    def replies(self, number: int) -> dict[int, Reply]:
        """Return the answers so far, by rank."""
        return self._replies.get(number, {})

    def mixed(self, number: int, waited: float) -> str | None:
        """Ask every other rank, from time to time, where it has the arrays of an operation in flight.

        Args:
            number: number of the operation, which goes another way on a device than in host memory.
            waited: seconds for which it has been in flight.

        Returns:
            The kinds of memory and their ranks, in words, once the ranks are known to differ; else None.
        """
        now, inquiry = time.monotonic(), self._inquiries.get(number)
        if inquiry is None:
            if waited > _PATIENCE:
                self._inquire(number, now, _PATIENCE)
            return None
        where = {self.rank: self._where(number), **inquiry.answers}
        ranks = {kind: sorted(rank for rank, one in where.items() if one is kind) for kind in Where}
        known = len(ranks[Where.HOST]) + len(ranks[Where.DEVICE]) == self.size
        if ranks[Where.HOST] and ranks[Where.DEVICE] and (known or waited > _MOST_PATIENCE):
            return (
                f"the arrays lie on a device on rank {_listed(ranks[Where.DEVICE])} and in host memory on rank "
                f"{_listed(ranks[Where.HOST])}; all ranks of a call must have them in one kind of memory"
            )
        if now - inquiry.asked > inquiry.pause:
            self._inquire(number, now, 2 * inquiry.pause)
        return None

    def _inquire(self, number: int, now: float, pause: float) -> None:
        self._inquiries[number] = _Inquiry(now, pause, {})
        self._send(_NoticeType.ASK_WHERE, 0, number, self._others())

    def poll(self) -> bool:
        """Receive the notices that have come and answer them; return whether there were any.

        Does not wait.

        The caller need not act on them: :attr:`news` stays set until the engine does.
        """
        came = False
        if not self.comm:  # the communicator was freed while an operation was in flight that will never end
            return came
        try:
            with inside_mpi():
                while self._receive():
                    came = True
        except MPI.Exception as error:
            self._distrust(error)
        if self._awaiting:
            self._release()
        unsent = self._outbox.poll()
        if unsent is not None:
            self._distrust(unsent)
        self.news = self.news or came
        return came

    def _release(self) -> None:
        """Tell the ranks that wait for this one at their ends that it has ended what they have ended."""
        for rank, number in list(self._awaiting.items()):
            if self._state(number) is State.ENDED:
                del self._awaiting[rank]
                self._send(_NoticeType.ANSWER, State.ENDED, number, [rank])

    def _distrust(self, error: MPI.Exception) -> None:
        """Record an error that may concern any message of this process.

        MPI moves all messages in any call. It reports a message that it cannot move once, in the call at hand, and
        MPICH then calls that message's request done and well, though its data are not there.
        """
        self.broken = error
        self._fail()
        self.news = True

    def close(self) -> None:
        """Answer the notices that have come; none is sent from then on."""
        self.drain()
        self._closed = True
        if not self._outbox.leave():
            self._worry()

    def drain(self) -> None:
        """Receive the notices that have come: MPI may need a poll to fetch one, and one to show it."""
        for _ in range(_LAST_POLLS):
            self.poll()

    def _others(self) -> list[int]:
        """Return the other ranks that have not left.

        MPICH would try without end to connect to a process that has ended, and let no other call of MPI run.
        """
        return [rank for rank in range(self.size) if rank != self.rank and rank not in self.left]

    def _send(
        self,
        kind: _NoticeType,
        detail: int,
        number: int,
        to: list[int],
        text: str = "",
        cause: int | None = None,
    ) -> None:
        words = text.encode()[:_ROOM]
        latest = self.latest if cause is None else cause
        head = _FORM.pack(_MAGIC, kind, detail, len(words), self.key, number, latest)
        raw = (head + words).ljust(_BYTES, b"\0")
        if self.comm and not self._closed:
            self._outbox.post(raw, to, TAG)

    def _receive(self) -> bool:
        if self._incoming is None:
            message = self.comm.Improbe(MPI.ANY_SOURCE, TAG)
            if message is None:
                return False
            self._incoming = message.Irecv([self._buffer, MPI.BYTE])
        try:
            if not self._incoming.Test(self._status):
                return False
        except MPI.Exception as error:
            self._incoming = None
            if error.Get_error_class() != MPI.ERR_TRUNCATE:  # longer than any notice: not ours
                raise
            return True
        self._incoming = None
        self._take(self._status.Get_source(), bytes(self._buffer[: self._status.Get_count(MPI.BYTE)]))
        return True

    def _take(self, rank: int, raw: bytes) -> None:
        """Apply a notice; ignore bytes that are not one."""
        if len(raw) != _BYTES:
            return
        magic, kind, detail, length, key, number, latest = _FORM.unpack_from(raw)
        if magic != _MAGIC or key != self.key or length > _ROOM:
            return
        words = _printable(raw[_FORM.size : _FORM.size + length].decode(errors="replace"))
        if kind == _NoticeType.FAILED and detail <= max(_Detail):
            self._take_failure(rank, _Detail(detail), number, latest, words)
        elif kind == _NoticeType.LEFT and detail <= max(Leaving):
            self._worry()
            self.left[rank] = Left(words, time.monotonic(), number, Leaving(detail))
            # To who leaves as well, its own leaving says enough, and it may be gone.
            if detail == Leaving.WAITING and self._left_at is None:
                self._awaiting[rank] = number
                if self._state(number) is not State.ENDED:
                    self._send(_NoticeType.ANSWER, self._state(number), number, [rank])
        elif kind == _NoticeType.ASK:
            self._worry()
            self._send(_NoticeType.ANSWER, self._state(number), number, [rank])
        elif kind == _NoticeType.BEGUN and self.rank in self._refusals.get(number, ()):
            self._worry()
            self.undecided, self.begun_by = number, rank
        elif kind == _NoticeType.ANSWER and number in self._replies and detail <= max(State):
            self._replies[number][rank] = Reply(State(detail), latest)
        elif kind == _NoticeType.ASK_WHERE:
            self._send(_NoticeType.ANSWER_WHERE, self._where(number), number, [rank])
        elif kind == _NoticeType.ANSWER_WHERE and number in self._inquiries and detail <= max(Where):
            self._inquiries[number].answers[rank] = Where(detail)

    def _where(self, number: int) -> Where:
        if self.is_on_device(number):
            return Where.DEVICE
        return Where.UNKNOWN if self._state(number) is State.NOT_STARTED else Where.HOST

    def _take_failure(self, rank: int, detail: _Detail, number: int, latest: int, words: str) -> None:
        """Apply the notice of a failed operation."""
        state = self._state(number)
        if detail == _Detail.REFUSED:
            self._refused(number, rank)
            if state is not State.NOT_STARTED:
                self._say_begun(number)
        else:
            self._fail()
        cause = latest if detail == _Detail.CAUSED else None
        failure = Failure(rank, detail is _Detail.LATE, words, cause, detail is _Detail.MIXED)
        if state is not State.ENDED:
            if number not in self.failures and len(self.failures) < _KEPT:
                self.failures[number] = failure
        elif self._ended.get(number, True) and self.belated is None and cause is None:
            self.belated = (number, failure)

    def _state(self, number: int) -> State:
        if number in self._open:
            return State.IN_FLIGHT
        ended = number in self._ended or (self.ordered and number <= self.latest)
        return State.ENDED if ended else State.NOT_STARTED


def absentees(replies: dict[int, Reply], rank: int, size: int) -> str:
    """Name the ranks that have not arrived, in words.

    Args:
        replies: answers of the other ranks, by rank.
        rank: number of this rank.
        size: number of ranks.
    """
    words = []
    for other in range(size):
        reply = replies.get(other)
        if other != rank and reply is None:
            words.append(f"rank {other} (silent)")
        elif reply is not None and reply.state is State.NOT_STARTED:
            words.append(f"rank {other} (at number {reply.latest})")
    return f"not arrived: {', '.join(words)}" if words else "all ranks have arrived"


def _listed(ranks: list[int]) -> str:
    """Return ranks in words, which fit a notice."""
    more = len(ranks) - _LISTED
    return ", ".join(map(str, ranks[:_LISTED])) + (f" and {more} more" if more > 0 else "")


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)

"""Exchange notices between a communicator's ranks: of failed operations, of each rank's progress, and of its end.

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
_LAST_POLLS = 4  # before a communicator is freed: MPI may need one to fetch a notice, and one to show it


class _Kind(IntEnum):
    FAILED = 1
    ASK = 2
    ANSWER = 3
    LEFT = 4


class _Detail(IntEnum):
    """Ways in which an operation has failed."""

    ERROR = 0
    LATE = 1
    CAUSED = 2  # by an earlier operation's failure, whose number stands in place of the latest operation's


class Leaving(IntEnum):
    """Ways in which a rank leaves."""

    WELL = 0
    BUSY = 1  # it has messages in flight, which may still arrive
    CRASHED = 2  # by an exception: it takes no part in MPI's end


class State(IntEnum):
    """States of an operation on a rank."""

    NOT_STARTED = 0
    IN_FLIGHT = 1
    ENDED = 2


class Failure(NamedTuple):
    """Failure of an operation on another rank.

    Attributes:
        rank: rank on which the operation failed.
        late: whether the operation ran out of time there.
        text: text of its error.
        cause: number of the earlier operation whose failure ended it there; None if it failed by itself.
    """

    rank: int
    late: bool
    text: str
    cause: int | None = None


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
            way. A rank that runs out of time asks before it gives up, so the ranks that have answered know.
    """

    def __init__(self, comm: MPI.Comm, key: int) -> None:
        """Exchange notices on ``comm``, where nothing else uses :data:`TAG`.

        ``key``, the same on all ranks, tells the communicator from freed ones.
        """
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.latest = 0
        self.troubled = False
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
        self._buffer: ByteArray = np.empty(_BYTES, np.uint8)
        self._status = MPI.Status()
        self._incoming: MPI.Request | None = None
        self._outbox = Outbox(comm)

    def begin(self, number: int) -> None:
        """Record that an operation starts here."""
        self.latest = max(self.latest, number)
        self._open.add(number)

    def end(self, number: int, *, well: bool) -> None:
        """Record that an operation has ended here."""
        self._open.discard(number)
        self._ended[number] = well
        if len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]
        self.failures.pop(number, None)
        self._replies.pop(number, None)

    def tell(self, number: int, error: BaseException, *, cause: int | None = None) -> None:
        """Notify every other rank that an operation has failed here.

        Args:
            number: number of the operation.
            error: error that it ended with.
            cause: number of the earlier operation for whose failure it was ended, which all ranks have been told of.
        """
        self.troubled = True
        late = isinstance(error, CollectiveTimeoutError)
        text = str(error) if late else f"{type(error).__name__}: {error}"
        if cause is not None:
            self._send(_Kind.FAILED, _Detail.CAUSED, number, self._others(), text, cause)
        else:
            self._send(_Kind.FAILED, _Detail.LATE if late else _Detail.ERROR, number, self._others(), text)

    def leave(self, text: str, how: Leaving) -> None:
        """Notify every other rank that this one leaves: it starts no further operation.

        Args:
            text: cause.
            how: way of leaving.
        """
        to = [rank for rank in self._others() if rank not in self.left]
        self._send(_Kind.LEFT, how, min(self._open, default=self.latest + 1) - 1, to, text)

    def lose(self, rank: int, text: str) -> None:
        """Record that a rank's process has ended, though the rank has not told so."""
        self.left.setdefault(rank, Left(text, time.monotonic(), None, Leaving.CRASHED))
        self.troubled = self.news = True

    def known(self, number: int) -> None:
        """Record that an operation's failure has been reported here: later notices of it are no news."""
        self._ended[number] = False
        if self.belated is not None and self.belated[0] == number:
            self.belated = None

    def ask(self, number: int) -> None:
        """Ask every other rank for its progress."""
        self._replies[number] = {}
        self._send(_Kind.ASK, 0, number, self._others())

    def replies(self, number: int) -> dict[int, Reply]:
        """Return the answers so far, by rank."""
        return self._replies.get(number, {})

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
        unsent = self._outbox.poll()
        if unsent is not None:
            self._distrust(unsent)
        self.news = self.news or came
        return came

    def _distrust(self, error: MPI.Exception) -> None:
        """Record an error that may concern any message of this process.

        MPI moves all messages in any call. It reports a message that it cannot move once, in the call at hand, and
        MPICH then calls that message's request done and well, though its data are not there.
        """
        self.broken = error
        self.troubled = self.news = True

    def close(self) -> None:
        """Receive notices for the last time; no more are sent."""
        for _ in range(_LAST_POLLS):
            self.poll()
        self.troubled = not self._outbox.leave() or self.troubled

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _send(
        self, kind: _Kind, detail: int, number: int, to: list[int], text: str = "", cause: int | None = None
    ) -> None:
        words = text.encode()[:_ROOM]
        latest = self.latest if cause is None else cause
        head = _FORM.pack(_MAGIC, kind, detail, len(words), self.key, number, latest)
        raw = (head + words).ljust(_BYTES, b"\0")
        if self.comm:
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
        if kind == _Kind.FAILED and detail <= max(_Detail):
            self.troubled = True
            words = raw[_FORM.size : _FORM.size + length].decode(errors="replace")
            cause = latest if detail == _Detail.CAUSED else None
            failure = Failure(rank, detail == _Detail.LATE, _printable(words), cause)
            if self._state(number) is not State.ENDED:
                if number not in self.failures and len(self.failures) < _KEPT:
                    self.failures[number] = failure
            elif self._ended.get(number, True) and self.belated is None and cause is None:
                self.belated = (number, failure)
        elif kind == _Kind.LEFT and detail <= max(Leaving):
            self.troubled = True
            words = _printable(raw[_FORM.size : _FORM.size + length].decode(errors="replace"))
            self.left[rank] = Left(words, time.monotonic(), number, Leaving(detail))
        elif kind == _Kind.ASK:
            self.troubled = True
            self._send(_Kind.ANSWER, self._state(number), number, [rank])
        elif kind == _Kind.ANSWER and number in self._replies and detail <= max(State):
            self._replies[number][rank] = Reply(State(detail), latest)

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


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)

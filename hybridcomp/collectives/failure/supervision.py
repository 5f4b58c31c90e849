"""Act on the ranks' notices for the operations in flight; the engine holds its lock in every call."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from mpi4py import MPI

from hybridcomp.collectives.failure.notices import Failure, Leaving, Notices
from hybridcomp.errors import CollectiveTimeoutError, HybridcompError, MismatchError, RemoteError

# Seconds for the last messages of a rank that has left, and for its launcher to learn of it, which may end all ranks:
# their errors would hide the one that counts.
_LAST_WORDS = 1.0
# Classes of errors that MPI reports in any call where it cannot move some message; other errors concern the call's own
# request.
OF_ANY_MESSAGE = (MPI.ERR_OTHER, MPI.ERR_INTERN, MPI.ERR_UNKNOWN)


class Supervised(Protocol):
    """Operation in flight: see :class:`~hybridcomp.collectives.execution.request.Request`."""

    notices: Notices | None
    number: int
    communicator: int
    exception: BaseException | None
    began: float
    deadline: float
    asking: bool
    ended: bool
    pending: Any

    @property
    def what(self) -> str:
        """Return operation, axis, rank and sequence number, for error messages."""

    def abandon(self, error: BaseException) -> None:
        """End the operation with ``error`` while messages of it may be on their way."""

    def awaits(self) -> set[int]:
        """Return the ranks whose messages the operation waits for, if they can be told."""


_Supervised = TypeVar("_Supervised", bound=Supervised)


def close(request: Supervised) -> None:
    """Notify the other ranks how an operation has ended, if they need to know; their notices may still make it fail.

    A rank that has failed in an operation says so before it starts the next. Its notice is here before any message of
    that next operation, so a rank that ends an operation well polls for notices.
    """
    notices = request.notices
    if notices is None:
        return
    if request.exception is None:
        notices.poll()
        failure = notices.failures.get(request.number)
        notices.end(request.number, well=failure is None)
        if failure is not None:
            request.exception = _failed(request, failure, notices)
        elif (
            notices.belated is not None
        ):  # no rank waits for this one in this operation: the others need not be told
            request.exception = _blame(request, notices)
        elif notices.broken is not None:
            request.exception = distrusted(request, notices.broken)
        return
    error = request.exception
    if not (isinstance(error, MismatchError) and error.everywhere):
        notices.tell(request.number, error)
    notices.end(request.number, well=False)


def distrusted(request: Supervised, broken: MPI.Exception) -> MPI.Exception:
    """Return an operation's own error for a message that MPI could not move, which may be another operation's."""
    error = MPI.Exception(broken.Get_error_code())
    error.add_note(
        f"in {request.what}, or another operation in flight: MPI does not say whose message it could not move"
    )
    return error


def heed(notices: Notices, active: Sequence[_Supervised]) -> list[_Supervised]:
    """Apply the notices that have come.

    Args:
        notices: notices of a communicator.
        active: operations of it in flight.

    Returns:
        The operations that this has ended, on this rank alone, so that MPI may still write to their buffers.
    """
    notices.news = False
    ended = []
    for request in active:
        failure = notices.failures.get(request.number)
        if failure is not None and not request.asking:
            request.abandon(_failed(request, failure, notices))
            notices.end(request.number, well=False)
            ended.append(request)
        elif request.asking and len(notices.replies(request.number)) == notices.size - 1:
            request.deadline = 0.0
    left = [request for request in active if not (request.ended or request.asking)]
    if notices.belated is not None and left:
        first = min(left, key=lambda request: request.number)
        cause = notices.belated[0]
        error = _blame(first, notices)
        first.abandon(error)
        notices.tell(first.number, error, cause=cause)
        notices.end(first.number, well=False)
        ended.append(first)
    return ended


def unmix(notices: Notices, active: Sequence[_Supervised]) -> list[_Supervised]:
    """End the operations whose arrays lie on a device on some ranks and in host memory on others.

    They take ways on which these ranks wait for each other; the ranks ask each other once that has taken a while.

    Args:
        notices: notices of a communicator.
        active: operations of it in flight.

    Returns:
        The operations that this has ended, so that MPI may still write to their buffers.
    """
    now, ended = time.monotonic(), []
    for request in active:
        if request.pending.run is None and not notices.is_on_device(request.number):
            continue
        text = None if request.ended or request.asking else notices.mixed(request.number, now - request.began)
        if text is not None:
            request.abandon(_mixed(request, text))
            notices.tell_mixed(request.number, text)
            notices.end(request.number, well=False)
            ended.append(request)
    return ended


def forsake(notices: Notices, active: Sequence[_Supervised]) -> list[_Supervised]:
    """End the operations that wait for ranks that have left.

    What a rank has ended before it left is whole, though its last messages may be on their way; a rank that has told
    nobody may have ended nothing.

    Args:
        notices: notices of a communicator.
        active: operations in flight.

    Returns:
        The operations that this has ended, so that MPI may still write to their buffers.
    """
    now, ended = time.monotonic(), []
    for request in active:
        if request.ended or request.communicator != notices.key:
            continue
        for rank, left in notices.left.items():
            if now - left.since < _LAST_WORDS:
                continue
            waited = now - max(left.since, request.began) > _LAST_WORDS
            if request.notices is None:  # a send or a receive
                needs = left.how != Leaving.BUSY and waited and _needs(request, rank, notices)
            else:
                needs = waited if left.latest is None else request.number > left.latest
            if needs:
                request.abandon(RemoteError(f"{request.what}: rank {rank} has left: {left.text}"))
                if request.notices is not None:
                    notices.end(request.number, well=False)
                ended.append(request)
                break
    return ended


def _needs(request: Supervised, rank: int, notices: Notices) -> bool:
    """Tell whether a send or a receive waits for a rank, or for any where all have left."""
    awaited = request.awaits()
    return rank in awaited or (-1 in awaited and len(notices.left) == notices.size - 1)


def _failed(request: Supervised, failure: Failure, notices: Notices) -> HybridcompError:
    if failure.cause is not None:
        notices.known(failure.cause)
    if failure.mixed:
        return _mixed(request, failure.text)
    kind = CollectiveTimeoutError if failure.late else RemoteError
    verb = "gave up" if failure.late else "failed"
    return kind(f"{request.what}: rank {failure.rank} {verb}: {failure.text}")


def _mixed(request: Supervised, text: str) -> MismatchError:
    return MismatchError(f"{request.what}: {text}")


def _blame(request: Supervised, notices: Notices) -> RemoteError:
    """Make the error of an operation that ends for another that had ended well here and failed elsewhere."""
    assert notices.belated is not None
    number, failure = notices.belated
    notices.known(number)
    verb = "gave up" if failure.late else "failed"
    return RemoteError(
        f"{request.what} was ended for an earlier one: rank {failure.rank} {verb} in number {number}, "
        f"which had ended well on rank {notices.rank}: {failure.text}"
    )

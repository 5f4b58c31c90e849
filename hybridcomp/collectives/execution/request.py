"""Define the request of an operation in flight, which the caller holds and the engine steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from hybridcomp.collectives.execution.completion import Completion, Name
from hybridcomp.collectives.execution.steps import Forsaken, Pending, Steps, sender
from hybridcomp.collectives.failure.notices import Notices, absentees
from hybridcomp.collectives.failure.watchdog import inside_mpi, watched
from hybridcomp.errors import CollectiveTimeoutError, HybridcompError, MismatchError

if TYPE_CHECKING:
    from hybridcomp.collectives.execution.progress import Engine


_NOTHING = Pending([], [])

_MOST_NOTES = 16  # steps noted in an error


class Request(Completion):
    """Request of a started operation.

    Attributes:
        status: status of a receive, valid once it is done: source and tag, or that it was cancelled.
        number: sequence number of the operation in the ranks' notices.
        run: run of the compiled engine, if the engine has begun the operation, until it has ended.
        priority: operations of a smaller number step first.
        communicator: key of the operation's communicator; 0 for none.
        began: start of the operation, by :func:`time.monotonic`.
    """

    def __init__(
        self,
        engine: Engine,
        steps: Steps,
        what: str | Name,
        timeout: float,
        *,
        status: MPI.Status | None = None,
        priority: int = 0,
        notices: Notices | None = None,
        number: int = 0,
        communicator: int = 0,
    ) -> None:
        super().__init__(what)
        self.status = status
        self.number = number
        self.run: Any = None
        self.priority = priority
        self.communicator = communicator
        self._engine = engine
        self._steps = steps
        self._notices = notices
        self._pending = _NOTHING
        self._arrived = 0  # pending requests that have completed, from the first on
        self._cancelled = False
        self._timeout = timeout
        self.began = time.monotonic()
        self._deadline = self.began + timeout
        self._watched: object = watched(what, timeout)
        self._asking = False
        self._ended = False

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the operation has ended.

        Args:
            timeout: seconds; None for the communicator's timeout, counted from the operation's start.

        Raises:
            CollectiveTimeoutError: the operation did not end in time; it may still end later if ``timeout`` was
                shorter than the communicator's.
            WireError, MismatchError: the operation failed here.
            RemoteError: the operation failed on another rank.
        """
        self._engine.wait(self, timeout)
        if self.exception is not None:
            raise self.exception

    def raise_refusal(self) -> None:
        """Raise the error with which MPI has refused the operation, in the call that starts it, as MPI does."""
        error = self.exception
        # Errors of other ranks, or of their messages, are raised by ``wait``.
        if self.done and error is not None and not isinstance(error, HybridcompError):
            raise error

    def test(self) -> bool:
        """Make progress once; return whether the operation has ended. Raises its error."""
        if not self.done:
            self._engine.poll()
        if self.done and self.exception is not None:
            raise self.exception
        return self.done

    def cancel(self) -> bool:
        """Cancel a receive that no message has reached; return whether it was cancelled.

        As in MPI, a cancelled receive completes: ``wait`` returns, and ``status.Is_cancelled()`` says so. Nothing else
        can be cancelled, since other ranks take part in it: then this returns False and has no other effect.
        """
        return self._engine.cancel(self)

    # -- the engine's side ---------------------------------------------------------------------------

    def _step(self) -> bool:
        """Run the next step, if its conditions are met; return whether it ran.

        With the engine's lock held.
        """
        pending = self._pending
        moved = False
        try:
            if pending.poll is not None:
                moved = pending.poll()
            if self._here(pending):
                moved = True
                self._pending = next(self._steps)
                self._arrived = 0
        except StopIteration:
            self._finish(None)
        except MPI.Exception as error:
            self._finish(self._explain(error))
        except Exception as error:
            self._finish(error)
        except BaseException as error:
            # After an error was raised in it, the generator would end well at the next poll.
            stopped = HybridcompError(f"{self.what} was stopped by {error!r}")
            stopped.__cause__ = error
            self._finish(stopped)
            self._engine.thrown = error
        return moved or self._ended

    def _here(self, pending: Pending) -> bool:
        # A poll tests one request, not all of them: the step waits for the first that is not there.
        requests = pending.requests
        while self._arrived < len(requests):
            at = self._arrived
            status = None if pending.statuses is None else pending.statuses[at]
            with inside_mpi():
                if not requests[at].Test(status):
                    return False
            self._arrived += 1
            if status is not None and status.Is_cancelled() and not self._cancelled:
                raise HybridcompError(
                    f"{self.what}: MPI has given up the receive from {sender(pending.peers[at])}, which nobody has "
                    "cancelled, as MPICH does where a link has been silent for seconds"
                )
        return not pending.events or all(event.done() for event in pending.events)

    def _cancel(self) -> bool:
        pending = self._pending
        if self._ended:
            return False
        if pending.run is not None:
            return bool(pending.run.cancel())
        if pending.statuses is None or len(pending.requests) != 1 or self._arrived:
            return False
        self._cancelled = True
        pending.requests[0].Cancel()
        if not pending.requests[0].Test(pending.statuses[0]):
            return False  # its message is on its way
        self._arrived = 1
        if not pending.statuses[0].Is_cancelled():
            return False
        pending.statuses[0].Set_elements(MPI.BYTE, 0)
        return True

    def _explain(self, error: MPI.Exception) -> BaseException:
        if error.Get_error_class() not in (MPI.ERR_TRUNCATE, MPI.ERR_IN_STATUS):
            return error
        peer = self._pending.peers[self._arrived]
        return MismatchError(f"{self.what}: {sender(peer)} sent more than this rank has room for ({error})")

    def _abandon(self, error: BaseException) -> None:
        """End the operation with ``error`` while messages of it may be on their way."""
        given = [] if self._pending.sends else zip(self._pending.peers, self._pending.requests, strict=True)
        for peer, request in given:
            if peer != -1 and request != MPI.REQUEST_NULL:  # MPI cannot cancel collectives: Open MPI hangs
                with suppress(MPI.Exception):
                    request.Cancel()
        for event in self._pending.events:
            if isinstance(event, Forsaken):
                event.forsake(error)
        self._finish(error)

    def _finish(self, error: BaseException | None) -> None:
        if error is not None and self._pending.run is not None:  # the run may not have ended
            self._pending.run.abandon()
        if error is None:  # its buffers are needed no longer
            self._pending, self.run = _NOTHING, None
        elif self.what not in str(error):  # a decoder's error, or MPI's
            error.add_note(f"in {self.what}")
        self.exception = error
        self._ended = True
        self._watched = None

    def late(self, timeout: float | None = None) -> CollectiveTimeoutError:
        """Return the error of an operation whose time is over; its notes list the steps that wait.

        Args:
            timeout: seconds that the operation had; None for its own timeout.
        """
        steps = [] if self._pending.run is None else self._pending.run.unfinished()
        error = CollectiveTimeoutError(
            self._late_message(self._timeout if timeout is None else timeout, steps)
        )
        for step, _, peer, channel, reason in steps[:_MOST_NOTES]:
            error.add_note(f"step {step} (rank {peer}, channel {channel}) waits: {reason}")
        if len(steps) > _MOST_NOTES:
            error.add_note(f"and {len(steps) - _MOST_NOTES} steps more")
        return error

    def _late_message(self, timeout: float, steps: Sequence[tuple[Any, ...]]) -> str:
        waiting: set[int] = set()
        for peer, request in zip(self._pending.peers, self._pending.requests, strict=True):
            with suppress(MPI.Exception):
                if request != MPI.REQUEST_NULL and not request.Get_status():
                    waiting.add(peer)
        if self._pending.run is not None:
            waiting |= _peers(steps) or {-1}
        if not waiting and self._pending.events:
            who = self._pending.source
        elif -1 in waiting or not waiting:
            who = "all ranks"
        else:
            who = f"rank {', '.join(map(str, sorted(waiting)))}"
        text = (
            f"{self.what} did not end within the timeout of {round(timeout, 2):g} s; still waiting for {who}"
        )
        if self._notices is None or not self._asking:
            return text
        return (
            f"{text}; {absentees(self._notices.replies(self.number), self._notices.rank, self._notices.size)}"
        )

    def awaits(self) -> set[int]:
        """Return the ranks whose messages the operation waits for, if they can be told; call no MPI."""
        pending = self._pending
        if pending.run is not None:
            return _peers(pending.run.unfinished())
        return set(pending.peers[self._arrived :])


def _peers(steps: Sequence[tuple[Any, ...]]) -> set[int]:
    """Return the ranks that a compiled run waits for: the senders, if it receives, else all peers."""
    return {peer for _, receives, peer, *_ in steps if receives} or {peer for _, _, peer, *_ in steps}

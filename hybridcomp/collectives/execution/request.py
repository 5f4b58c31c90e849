"""Define the request of an operation in flight, which the caller holds and the engine steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from mpi4py import MPI

from hybridcomp.collectives.execution.completion import Completion
from hybridcomp.collectives.execution.steps import Forsaken, Pending, Steps, sender
from hybridcomp.collectives.failure.notices import Notices, absentees
from hybridcomp.collectives.failure.watchdog import Name, inside_mpi
from hybridcomp.errors import CollectiveTimeoutError, HybridcompError, MismatchError
from hybridcomp.native import kernels


class Waits(Protocol):
    """Threads that wait for operations: see :class:`.Foreground`."""

    def wait(self, request: Request, timeout: float | None) -> None:
        """Poll until an operation has ended."""

    def finish(self, request: Request) -> bool:
        """Wait for a run that no thread has polled; return whether that has ended it well."""


class Steers(Protocol):
    """Engine of the operations, which makes them progress: see :class:`.Engine`."""

    thrown: BaseException | None

    @property
    def foreground(self) -> Waits:
        """Return what waits for operations."""

    def poll(self) -> bool:
        """Advance every operation that can step."""

    def cancel(self, request: Request) -> bool:
        """Cancel a receive."""


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
        deadline: end of its time, by the same clock.
        notices: notices by which the ranks learn of its failure; None where not all ranks take part in it.
        pending: what the next step waits for.
        arrived: number of its MPI requests that have completed, from the first on.
        asking: whether the other ranks have been asked how far they are, since its time is over.
        ended: whether no step is left to be run; it is done once its callbacks may run.
    """

    run: Any = None
    pending = _NOTHING
    arrived = 0
    asking = False
    ended = False
    _cancelled = False

    def __init__(
        self,
        engine: Steers,
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
        self._what = what
        self.followers = []
        self.status = status
        self.number = number
        self.priority = priority
        self.communicator = communicator
        self._engine = engine
        self._steps = steps
        self.notices = notices
        self._timeout = timeout
        self.began = time.monotonic()
        self.deadline = self.began + timeout
        self._watched: object = kernels().WatchedOperation(self.deadline, what)

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
        if self.run is None or timeout is not None or not self._engine.foreground.finish(self):
            self._engine.foreground.wait(self, timeout)
        if self.exception is not None:
            raise self.exception

    def land(self) -> None:
        """End the operation, whose run has ended well before any thread polled it."""
        for _ in self._steps:  # they count it
            raise AssertionError("a run that has ended is waited for")
        self.ended = self.done = True
        self._watched = self.run = None
        notices = self.notices
        if notices is not None:
            if notices.latest < self.number:
                notices.latest = self.number
            else:  # they may know that it has begun
                notices.end(self.number, well=True)
        if self.general is not None:
            self.general.complete()

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

    def step(self) -> bool:
        """Run the next step, if its conditions are met; return whether it ran.

        With the engine's lock held.
        """
        pending = self.pending
        moved = False
        try:
            if pending.poll is not None:
                moved = pending.poll()
            run = pending.run
            # Before the first step there is nothing to wait for.
            if pending is _NOTHING or (self._here(pending) if run is None else run.done()):
                moved = True
                self.pending = next(self._steps)
                self.arrived = 0
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
        return moved or self.ended

    def _here(self, pending: Pending) -> bool:
        # A poll tests one request, not all of them: the step waits for the first that is not there.
        requests = pending.requests
        while self.arrived < len(requests):
            at = self.arrived
            status = None if pending.statuses is None else pending.statuses[at]
            with inside_mpi():
                if not requests[at].Test(status):
                    return False
            self.arrived += 1
            if status is not None and status.Is_cancelled() and not self._cancelled:
                raise HybridcompError(
                    f"{self.what}: MPI has given up the receive from {sender(pending.peers[at])}, which nobody has "
                    "cancelled, as MPICH does where a link has been silent for seconds"
                )
        return not pending.events or all(event.done() for event in pending.events)

    def try_cancel(self) -> bool:
        """Ask MPI to cancel the receive; return whether it has. With the engine's lock held."""
        pending = self.pending
        if self.ended:
            return False
        if pending.run is not None:
            return bool(pending.run.cancel())
        if pending.statuses is None or len(pending.requests) != 1 or self.arrived:
            return False
        self._cancelled = True
        pending.requests[0].Cancel()
        if not pending.requests[0].Test(pending.statuses[0]):
            return False  # its message is on its way
        self.arrived = 1
        if not pending.statuses[0].Is_cancelled():
            return False
        pending.statuses[0].Set_elements(MPI.BYTE, 0)
        return True

    def _explain(self, error: MPI.Exception) -> BaseException:
        if error.Get_error_class() not in (MPI.ERR_TRUNCATE, MPI.ERR_IN_STATUS):
            return error
        peer = self.pending.peers[self.arrived]
        return MismatchError(f"{self.what}: {sender(peer)} sent more than this rank has room for ({error})")

    def abandon(self, error: BaseException) -> None:
        """End the operation with ``error`` while messages of it may be on their way."""
        given = [] if self.pending.sends else zip(self.pending.peers, self.pending.requests, strict=True)
        for peer, request in given:
            if peer != -1 and request != MPI.REQUEST_NULL:  # MPI cannot cancel collectives: Open MPI hangs
                with suppress(MPI.Exception):
                    request.Cancel()
        for event in self.pending.events:
            if isinstance(event, Forsaken):
                event.forsake(error)
        self._finish(error)

    def settled(self) -> bool:
        """Tell whether MPI has ended, since, what was under way when the operation ended early."""
        ended = [False]
        if self.pending.run is None:
            with suppress(MPI.Exception):
                ended = [request.Test() for request in self.pending.requests]
        return all(ended)

    def _finish(self, error: BaseException | None) -> None:
        if error is not None and self.pending.run is not None:  # the run may not have ended
            self.pending.run.abandon()
        if error is None:  # its buffers are needed no longer
            self.pending, self.run = _NOTHING, None
        elif self.what not in str(error):  # a decoder's error, or MPI's
            error.add_note(f"in {self.what}")
        self.exception = error
        self.ended = True
        self._watched = None

    def late(self, timeout: float | None = None) -> CollectiveTimeoutError:
        """Return the error of an operation whose time is over; its notes list the steps that wait.

        Args:
            timeout: seconds that the operation had; None for its own timeout.
        """
        steps = [] if self.pending.run is None else self.pending.run.unfinished()
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
        for peer, request in zip(self.pending.peers, self.pending.requests, strict=True):
            with suppress(MPI.Exception):
                if request != MPI.REQUEST_NULL and not request.Get_status():
                    waiting.add(peer)
        if self.pending.run is not None:
            waiting |= _peers(steps) or {-1}
        if not waiting and self.pending.events:
            who = self.pending.source
        elif -1 in waiting or not waiting:
            who = "all ranks"
        else:
            who = f"rank {', '.join(map(str, sorted(waiting)))}"
        text = (
            f"{self.what} did not end within the timeout of {round(timeout, 2):g} s; still waiting for {who}"
        )
        if self.notices is None or not self.asking:
            return text
        return f"{text}; {absentees(self.notices.replies(self.number), self.notices.rank, self.notices.size)}"

    def awaits(self) -> set[int]:
        """Return the ranks whose messages the operation waits for, if they can be told; call no MPI."""
        pending = self.pending
        if pending.run is not None:
            return _peers(pending.run.unfinished())
        return set(pending.peers[self.arrived :])


def _peers(steps: Sequence[tuple[Any, ...]]) -> set[int]:
    """Return the ranks that a compiled run waits for: the senders, if it receives, else all peers."""
    return {peer for _, receives, peer, *_ in steps if receives} or {peer for _, _, peer, *_ in steps}

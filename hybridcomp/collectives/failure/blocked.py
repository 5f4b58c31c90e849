"""Start threads to which MPI may not return, and leave MPI as it is at exit where one is still inside.

``MPI_Comm_dup`` and others wait for other ranks without a limit. The threads that call them are left behind where the
ranks do not come. ``MPI_Finalize`` frees memory that such a thread works with, and MPICH 5 crashes: the process would
end by a segmentation fault some time after the error that gives the cause.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import time
from collections.abc import Callable

from mpi4py import MPI

from hybridcomp import style
from hybridcomp.launcher import abort
from hybridcomp.pmi import ending

_START_LOOKS, _LOOK_SECONDS = 300, 0.1  # looks at whether a new thread runs, and seconds of each
_EXIT_SECONDS = 5.0  # time for threads to come back once the process exits
_CODE = 1

_threads: dict[threading.Thread, str] = {}


class _Begun(threading.Event):
    """Event that a thread runs, for which its starter does not wait for ever."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the thread runs.

        Raises:
            RuntimeError: it does not run after :data:`_START_LOOKS` looks.
        """
        if timeout is not None:
            return super().wait(timeout)
        # Looks are counted, not seconds: in a process that was stopped for long, or had no core, the thread runs next.
        for _ in range(_START_LOOKS):
            if super().wait(_LOOK_SECONDS):
                return True
        raise RuntimeError(
            f"can't start new thread: it does not run after {_START_LOOKS * _LOOK_SECONDS:g} s"
        )


class Thread(threading.Thread):
    """Daemon thread whose start ends.

    Python's own start waits for ever for a thread that finds no memory for its first steps.
    """

    def __init__(self, name: str, target: Callable[[], None]) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self._started = _Begun()
        self._given_up = False

    def start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: the thread cannot start; then it never runs.
        """
        try:
            super().start()
        except RuntimeError:
            self._given_up = True
            raise

    def run(self) -> None:
        """Run the target, unless the thread comes too late."""
        if not self._given_up:
            super().run()


def start_thread(name: str, what: str, target: Callable[[], None]) -> threading.Thread:
    """Start a thread that calls MPI and may be left behind there: the job is aborted if it is alive at exit.

    Args:
        name: name of the thread.
        what: name of its work, for the message.
        target: function to run; must not raise.
    """
    _at_exit()
    for ended in [thread for thread in list(_threads) if not thread.is_alive()]:
        _threads.pop(ended, None)
    thread = Thread(name, target)
    thread.start()
    _threads[thread] = what
    return thread


class StandbyThread:
    """Thread that is started before it is needed, so that a lack of threads is known in time."""

    def __init__(self, name: str, what: str) -> None:
        """Start the thread, as :func:`start_thread` does.

        Raises:
            RuntimeError: the thread cannot be started.
        """
        self._target: Callable[[], None] | None = None
        self._told = threading.Event()
        self._thread = start_thread(name, what, self._run)

    def do(self, what: str, target: Callable[[], None]) -> threading.Thread:
        """Run ``target`` in the thread; return the thread, which ends afterwards."""
        _threads[self._thread] = what
        self._target = target
        self._told.set()
        return self._thread

    def dismiss(self) -> None:
        """End the thread if it has nothing to do."""
        self._told.set()

    def _run(self) -> None:
        self._told.wait()
        if self._target is not None:
            self._target()


def await_threads(seconds: float) -> bool:
    """Wait for the threads that may be inside MPI; return whether none is."""
    deadline = time.monotonic() + seconds
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in list(_threads))


@functools.cache
def _at_exit() -> None:
    atexit.register(_end, os.getpid())


def _end(pid: int) -> None:
    """Wait for the threads for some seconds; where one does not come back, the process ends without MPI's end."""
    if os.getpid() != pid or MPI.Is_finalized():
        return
    await_threads(_EXIT_SECONDS)
    for thread, what in list(_threads.items()):
        if thread.is_alive():
            why = (
                f"hybridcomp: rank {MPI.COMM_WORLD.Get_rank()} is still in MPI at its exit ({what}), where "
                f"MPI_Finalize would crash; it ends here"
            )
            if not ending.hold():
                style.say(why, sys.stderr)
                abort(MPI.COMM_WORLD, _CODE)
            ending.leave_mpi(why + "\n")
            return

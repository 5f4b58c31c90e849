"""Stop when asked by SIGUSR1: a batch system's warning before a time limit or a preemption."""

from __future__ import annotations

import atexit
import signal
import time

SIGNAL = signal.SIGUSR1
INTERRUPTED = 75
"""Exit code of a run that was asked to stop, and wrote a checkpoint: EX_TEMPFAIL of sysexits.h."""

_OTHERS_LEAVE_SECONDS = 2.0


class StopRequest:
    """Request to stop: it listens to the signal from its making to the end of the process.

    There is one in a process, in its main thread.

    It is made before MPI and torch are loaded, which takes seconds: until then the signal ends the process.
    """

    def __init__(self) -> None:
        self._heard = False
        self._finalizes = False
        self._waits = 0.0
        atexit.register(self._end)
        signal.signal(SIGNAL, self._hear)

    def stop_requested(self) -> bool:
        """Tell whether the signal has come to this rank; other ranks may have got it earlier, or not yet."""
        return self._heard

    def exit_code(self, rank: int) -> int:
        """Return this rank's exit code for a run that has stopped: :data:`INTERRUPTED` on rank 0, which ends last.

        A launcher ends the remaining ranks when one fails, and would report that instead: the others exit with 0.
        """
        self._finalizes = True
        if rank:
            return 0
        self._waits = _OTHERS_LEAVE_SECONDS
        return INTERRUPTED

    def _hear(self, *_: object) -> None:
        self._heard = True

    def _end(self) -> None:
        """Finalize MPI after the exit functions that others have registered later, which may use MPI."""
        # Python restores its handlers at its end, and the signal would kill; an ignored signal stays ignored.
        signal.signal(SIGNAL, signal.SIG_IGN)
        if self._finalizes:
            from mpi4py import MPI  # noqa: PLC0415  (loaded by now)

            MPI.Finalize()  # waits for all ranks
            time.sleep(self._waits)

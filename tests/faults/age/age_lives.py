"""Lives of communicators, from being made to their end: a fault, and what must hold after it."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.collectives.engine.groups import native_engine

WORLD = MPI.COMM_WORLD
LAST = WORLD.size - 1
SECONDS = 30.0
PATIENCE = 0.2  # timeout in seconds of an operation that a rank does not come to
N = 4_000


class Life:
    """A communicator and its fault.

    Attributes:
        operations: number of operations that were started.
        outcomes: how operations with a fault have ended, on this rank.
        keeps: whether MPI does not get its contexts back.
    """

    def __init__(self, fault: str, seed: int) -> None:
        self._fault = FAULTS[fault]
        self._seed = seed
        self.operations = 0
        self.outcomes: Counter[str] = Counter()
        self.keeps = False

    def run(self) -> str:
        """Live; return what is wrong on this rank, if anything."""
        return self._fault(self)

    def made(self) -> hc.Communicator:
        """Make a communicator of all ranks."""
        return hc.Communicator(WORLD, "none", "dp", timeout=SECONDS)

    def summed(self, comm: hc.Communicator, codec: str = "int8") -> str:
        """Sum what one rank after another adds; return what is wrong."""
        x = np.full(N, comm.rank + 1, np.float32)
        comm.Allreduce(MPI.IN_PLACE, x, codec=codec, algorithm="direct" if codec != "none" else None)
        self.operations += 1
        want = comm.size * (comm.size + 1) / 2
        wrong = float(np.abs(x - want).max())
        self.outcomes["right"] += 1
        return f"a sum is off by {wrong}" if wrong > 0.02 * want else ""

    def fails(self, work: Callable[[], Any], *kinds: type[BaseException], says: str) -> str:
        """Have an operation fail; return what is wrong with its error."""
        self.operations += 1
        began = time.monotonic()
        try:
            work()
        except Exception as error:
            self.outcomes[type(error).__name__] += 1
            said = "\n".join([str(error), *getattr(error, "__notes__", [])])
            if not isinstance(error, kinds) or says not in said:
                return f"an error of another kind, or that says no {says!r}: {error!r} {said}"
            took = time.monotonic() - began
            return f"it took {took:.1f} s: {error!r}" if took > 10 else ""
        return "no error"

    def goes_on(self, comm: hc.Communicator) -> str:
        """Use a communicator after a failure: it works, or says that it does not, on all ranks alike."""
        comm.timeout = 5.0
        WORLD.Barrier()
        wrong, raised = "", None
        try:
            wrong = self.summed(comm)
        except hc.HybridcompError as error:
            raised = error
            self.outcomes[f"afterwards {type(error).__name__}"] += 1
        if len(set(WORLD.allgather(raised is None))) > 1:
            return f"afterwards it works on some ranks: {raised!r}"
        return wrong

    # -- faults --------------------------------------------------------------------------------------

    def none(self) -> str:
        comm = self.made()
        wrong = _first(self.summed(comm), self.summed(comm, "none"))
        comm.Free()
        return wrong

    def late(self) -> str:
        """Let one rank come when the others have given up."""
        comm = self.made()
        wrong = self.summed(comm)
        comm.timeout = PATIENCE
        last = comm.rank == LAST
        kind = hc.CollectiveTimeoutError  # on the late rank, too, which is told that the others gave up
        if last:
            WORLD.Barrier()
        wrong = _first(
            wrong, self.fails(lambda: self.summed(comm), kind, says="all_reduce number 2 on axis 'dp'")
        )
        if not last:
            WORLD.Barrier()
        wrong = _first(wrong, self.goes_on(comm))
        comm.Free()
        self.keeps = True
        return wrong

    def damaged(self) -> str:
        """Turn a bit of a message."""
        comm = self.made()
        wrong = self.summed(comm)
        if comm.rank == 0:
            native_engine().engine_damage(1, 1024)
        WORLD.Barrier()
        kinds = [hc.WireError] if comm.rank == 1 else [hc.RemoteError]
        error = self.fails(lambda: self.summed(comm), *kinds, says="all_reduce number 2 on axis 'dp'")
        wrong = _first(wrong, error, self.goes_on(comm))
        comm.Free()
        self.keeps = True
        return wrong

    def codecs_differ(self) -> str:
        """Let ranks compress an operation in two ways."""
        comm = self.made()
        codec = "int8:block=64" if comm.rank == 0 else "int8:block=128"
        errors = hc.MismatchError, hc.RemoteError
        error = self.fails(lambda: self.summed(comm, codec), *errors, says="all_reduce number 1 on axis 'dp'")
        wrong = _first(error, self.goes_on(comm))
        comm.Free()
        self.keeps = True
        return wrong

    def policies_differ(self) -> str:
        """Let ranks disagree when they make a communicator."""
        policy = "int8" if WORLD.rank else "none"
        return self.fails(
            lambda: hc.Communicator(WORLD, policy, "dp", timeout=SECONDS), hc.MismatchError, says="policies"
        )

    def cancelled(self) -> str:
        """Cancel a receive that nobody sends to."""
        comm = self.made()
        request = comm.Irecv(np.zeros(N, np.float32), (comm.rank - 1) % comm.size, 5, codec="int8")
        cancelled = request.cancel()
        request.wait()
        self.operations += 1
        self.outcomes["cancelled"] += 1
        wrong = self.summed(comm)
        comm.Free()
        return wrong or ("" if cancelled else "cancel() says that it did not cancel")

    def raising(self) -> str:
        """Let a callback raise; the one after it runs, and so do operations."""
        comm = self.made()
        seen: list[str] = []
        hook, sys.unraisablehook = sys.unraisablehook, lambda args: seen.append(repr(args.exc_value))
        try:
            request = comm.Iallreduce(MPI.IN_PLACE, np.ones(N, np.float32), codec="int8")
            request.add_done_callback(lambda _: 1 / 0)
            request.add_done_callback(lambda _: seen.append("after"))
            request.wait()
            deadline = time.monotonic() + 10
            while len(seen) < 2 and time.monotonic() < deadline:
                time.sleep(0.001)
        finally:
            sys.unraisablehook = hook
        self.operations += 1
        wrong = self.summed(comm)
        comm.Free()
        return wrong or ("" if len(seen) == 2 and "ZeroDivision" in seen[0] else f"callbacks: {seen}")

    def forked(self) -> str:
        """Fork the process while it has an operation in flight; the child computes, and ends."""
        comm = self.made()
        x = np.full(N, comm.rank + 1, np.float32)
        request = comm.Iallreduce(MPI.IN_PLACE, x, codec="int8", algorithm="direct")
        child = os.fork()
        if not child:
            code = 99
            try:
                a = np.arange(10_000, dtype=np.float64)
                code = int(a.sum() != 49_995_000 or not np.allclose(np.sort(a[::-1]), a))
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        request.wait()
        self.operations += 1
        want = comm.size * (comm.size + 1) / 2
        wrong = "" if np.abs(x - want).max() < 0.02 * want else "the sum in flight is wrong"
        wrong = _first(wrong, self.summed(comm))
        comm.Free()
        return wrong or ("" if status == 0 else f"the child has ended with {status}")

    def dropped(self) -> str:
        """Drop a communicator that nobody frees."""
        comm = self.made()
        wrong = self.summed(comm)
        del comm
        gc.collect()
        self.keeps = True
        return wrong


def _first(*wrong: str) -> str:
    """Return the first thing that is wrong; later steps have been done even so, for other ranks wait in them."""
    return next(filter(None, wrong), "")


# Faults; WEIGHTS has how often each is drawn beside the others: seldom where MPI gets no contexts back.
FAULTS: dict[str, Callable[[Life], str]] = {
    "none": Life.none,
    "rank late": Life.late,
    "message damaged": Life.damaged,
    "codecs differ": Life.codecs_differ,
    "policies differ": Life.policies_differ,
    "receive cancelled": Life.cancelled,
    "callback raises": Life.raising,
    "fork": Life.forked,
    "never freed": Life.dropped,
}
WEIGHTS = {"rank late": 2, "message damaged": 3, "codecs differ": 3, "never freed": 3, "none": 30}
NEEDS_MESSAGES = {"message damaged"}  # over MPI, not in shared memory

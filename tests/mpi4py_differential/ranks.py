"""One rank: make each call that the driver sends, on plain mpi4py and on ours, and say how they compare.

``mpiexec -n 3 python -m tests.mpi4py_differential.ranks SOCKET``; ``pool.py`` starts it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from multiprocessing.connection import Client
from typing import Any

from mpi4py import MPI

import hybridcomp as hc
from tests.mpi4py_differential.calls import ROWS, Draw, Outcome, collective
from tests.mpi4py_differential.messages import EXCHANGES, exchange, messages
from tests.mpi4py_differential.verdict import POLICIES, Verdict, compare, names, of_one_error

SECONDS = 10.0  # that a call of ours may take
LIVES = 60  # seconds that a rank lives in a call, should the driver be gone
MEETING = 13.0  # seconds after which a rank does not wait for the others to end theirs


def topology(comm: Any, name: str) -> Any:
    """Return a communicator with a topology, made from one of either kind."""
    size, rank = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
    match name:
        case "ring":
            return comm.Create_cart([size], periods=[True])
        case "line":
            return comm.Create_cart([size], periods=[False])
        case "grid":
            return comm.Create_cart([2, 2] if size == 4 else [size, 1], periods=[True, False])
        case "graph":
            edges = [((r - 1) % size, (r + 1) % size) for r in range(size)]
            return comm.Create_graph([2 * (r + 1) for r in range(size)], [e for pair in edges for e in pair])
    # To the next rank, and to itself; rank 0 has one edge more.
    sources = [(rank - 1) % size, rank, *([0] if rank == size - 1 else [])]
    destinations = [(rank + 1) % size, rank, *([size - 1] if rank == 0 else [])]
    return comm.Create_dist_graph_adjacent(sources, destinations)


def meet(comm: MPI.Intracomm, limit: float) -> None:
    """Wait in MPI until all ranks are through the call, or a time has come: sent data may take the sender's help."""
    met = comm.Ibarrier()
    while not met.Test() and time.perf_counter() < limit:
        time.sleep(0.0002)


def refusal(draw: Draw, outcome: Outcome) -> tuple[str, ...]:
    """Return names of the classes of the error that mpi4py raises for what is wrong in this rank's arguments."""
    if draw["refused_side"] == "other":
        return names(TypeError()) if draw["refused"] == "operator" else (f"MPI error class {MPI.ERR_ROOT}",)
    wrong = outcome.buffers[0 if draw["refused_side"] == "send" else -1]
    memory = wrong.message
    if draw["refused"] in ("strided", "reversed", "read-only") and not draw["call"].endswith("w"):
        memory = (
            memory[0] if isinstance(memory, list | tuple) else memory
        )  # a message takes no counts for many ranks
    tried = (_error(draw, one, received=wrong.received) for one in (memory, wrong.message))
    return next(filter(None, tried), names(ValueError()))  # else counts, of which there are too many


def _error(draw: Draw, message: Any, *, received: bool) -> tuple[str, ...]:
    """Return names of the classes of the error with which mpi4py refuses a message; none if it takes it."""
    right = [bytearray(), ([0], [0]), [MPI.BYTE]]
    try:
        if draw["call"].endswith("w"):
            both = (right, message) if received else (message, right)
            MPI.COMM_SELF.Alltoallw_init(*both).Free()
        elif received:
            MPI.COMM_SELF.Recv_init(message, 0).Free()
        else:
            MPI.COMM_SELF.Send_init(message, 0).Free()
    except Exception as error:
        return names(error)
    return ()


class Rank:
    """This process's communicators, and what plain mpi4py did last."""

    def __init__(self) -> None:
        self._comms: dict[tuple[str, str], Any] = {}
        for policy in ("plain", *POLICIES):
            self._comm(policy, "")
        self._meeting = MPI.COMM_WORLD.Dup()
        self._plain = Outcome()

    def _comm(self, policy: str, name: str) -> Any:
        if (policy, "") not in self._comms:
            self._comms[policy, ""] = (
                MPI.COMM_WORLD.Dup()
                if policy == "plain"
                else hc.Communicator(MPI.COMM_WORLD, policy=policy, timeout=SECONDS)
            )
        if (policy, name) not in self._comms:
            self._comms[policy, name] = topology(self._comms[policy, ""], name)
        return self._comms[policy, name]

    def _forget(self, policy: str) -> None:
        """Drop a policy's communicators.

        After an error of one rank, others may wait on them for its part, and where plain MPI has refused a collective
        ranks may have counted it or not.
        """
        self._comms = {key: comm for key, comm in self._comms.items() if key[0] != policy}

    def _outcome(self, draw: Draw, policy: str) -> Outcome:
        if draw["call"] in ROWS:
            if not ROWS[draw["call"]].neighbours:
                return collective(draw, self._comm(policy, ""))
            degrees = self._comm("plain", draw["topology"])
            return collective(draw, self._comm(policy, draw["topology"]), degrees.indegree, degrees.outdegree)
        perform = exchange if draw["call"] in EXCHANGES else messages
        return perform(draw, self._comm(policy, ""))

    def run(self, draw: Draw, policy: str) -> Verdict:
        """Make a call under a policy, "plain" for mpi4py's own."""
        row = ROWS.get(draw["call"])
        for one in ("plain", policy):
            self._comm(one, draw["topology"] if row is not None and row.neighbours else "")
        start = time.perf_counter()
        outcome = self._outcome(draw, policy)
        seconds = time.perf_counter() - start
        meet(self._meeting, start + MEETING)
        if draw["alone"] is not None:
            self._forget(policy)
            rank = MPI.COMM_WORLD.rank
            return of_one_error(draw, rank, outcome, refusal(draw, outcome), seconds)
        if policy == "plain":
            self._plain = outcome
            if draw["refused"]:
                self._forget(policy)
            error = names(outcome.error)
            return Verdict(
                text=repr(outcome.error), error=error, buffers=tuple(b.text for b in outcome.buffers)
            )
        return compare(draw, policy, self._plain, outcome)


def main() -> None:
    """Answer the driver until it has gone."""
    driver = Client(sys.argv[1])
    faulthandler.register(signal.SIGUSR1)  # where a rank is that does not answer
    MPI.Attach_buffer(bytearray(1 << 24))
    rank = Rank()
    driver.send((MPI.COMM_WORLD.rank, os.getpid()))
    while True:
        try:
            draw, policy = driver.recv()
        except EOFError:
            break
        start = time.perf_counter()
        signal.alarm(LIVES)
        verdict = rank.run(draw, policy)
        signal.alarm(0)
        driver.send({**verdict.plain(), "seconds": time.perf_counter() - start})
    os._exit(0)  # a fault that was found may keep MPI from ending


if __name__ == "__main__":
    main()

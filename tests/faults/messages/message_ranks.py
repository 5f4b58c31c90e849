"""Ranks of :mod:`.messages`: ``mpiexec -n 3 python -m tests.faults.messages.message_ranks SEED CASES LIBRARY WHO OUT``.

Steps are done by WHO: ``engine``, the compiled one, or ``python``.

An operation runs undisturbed first, which gives the right bits and the number of messages that each rank sends. Then it
runs again on a new communicator, and one rank's k-th message has a fault. Afterwards the next operation tells those
whose part had ended well that it has failed elsewhere.
"""

from __future__ import annotations

import ctypes
import json
import math
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.collectives.algorithms.selection import refusal
from hybridcomp.collectives.engine import groups
from hybridcomp.collectives.transport.mpi import MpiTransport
from hybridcomp.collectives.transport.topology import discover
from hybridcomp.pmi.library import address
from hybridcomp.schedules.registry import ALGORITHMS, SELECTABLE
from tests.codecs.common import SPECS
from tests.faults.messages.messages import KINDS
from tests.mpi.conftest import step_by_step
from tests.mpi.hosts import Hosts

WORLD = MPI.COMM_WORLD
_PATIENCE = {"drop": 1.5}  # seconds that its operations may take
_ELSE = 20.0
_TOLD_SECONDS = 5.0  # within which all ranks learn of a failure


class Case(NamedTuple):
    """An operation with a fault."""

    op: str
    algorithm: str | None
    codec: str
    hosts: list[int]
    n: int
    kind: str
    draw: int


def drawn(random_: random.Random, ranks: int) -> Case:
    """Draw a case; the same on all ranks."""
    hosts = random_.choice([[0] * ranks, [2 * r // ranks for r in range(ranks)], list(range(ranks))])
    codec = random_.choice(SPECS)
    op = random_.choice([*SELECTABLE, "send"])
    linear = hc.get_codec(codec).linear
    if linear:
        op = "all_reduce"
    algorithm = None
    if not linear and op != "send":
        topology = discover(WORLD, Hosts(WORLD, hosts).Split_type(MPI.COMM_TYPE_SHARED))
        names = [a.name for a in ALGORITHMS[op].values() if refusal(a, topology, hc.get_codec(codec)) is None]
        algorithm = random_.choice(names)
    n = random_.choice([7, 999, 20_003, 300_007])
    return Case(op, algorithm, codec, hosts, n, random_.choice(KINDS), random_.getrandbits(48))


def run(comm: hc.Communicator, case: Case) -> bytes:
    """Do the operation; return this rank's result."""
    p, n, ours = comm.size, case.n, {"codec": case.codec, "algorithm": case.algorithm}
    values = np.random.default_rng([case.draw, comm.rank]).standard_normal(n * p).astype(np.float32)
    x = np.zeros(n, np.float32)
    if case.op == "all_reduce":
        shape = (n // 7, 7) if case.codec.startswith("powersgd") else (n,)
        size = math.prod(shape)
        comm.Allreduce(values[:size].reshape(shape), x[:size].reshape(shape), **ours)
    elif case.op == "broadcast":
        x[:] = values[:n]
        comm.Bcast(x, p - 1, **ours)
    elif case.op == "all_gather":
        x = np.zeros(n * p, np.float32)
        comm.Allgather(values[:n], x, **ours)
    elif case.op == "reduce":
        comm.Reduce(values[:n], x, root=p - 1, **ours)
    elif case.op == "reduce_scatter":
        comm.Reduce_scatter_block(values, x, **ours)
    elif comm.rank == 0:
        comm.Send(values[:n], p - 1, 5, codec=case.codec)
    elif comm.rank == p - 1:
        comm.Recv(x, 0, 5, codec=case.codec)
    return x.tobytes()


def told(comm: hc.Communicator) -> BaseException | None:
    """Return the error that this rank's next operations have, if one has within some seconds."""
    x, deadline = np.ones(4000, np.float32), time.monotonic() + _TOLD_SECONDS
    comm.timeout = _TOLD_SECONDS
    while time.monotonic() < deadline:
        try:
            comm.Allreduce(MPI.IN_PLACE, x, codec="int8", algorithm="direct")
        except hc.HybridcompError as error:
            return error
        time.sleep(0.02)
    return None


def attempt(comm: hc.Communicator, case: Case) -> tuple[bytes | None, BaseException | None]:
    """Return the result of the operation, or its error."""
    try:
        return run(comm, case), None
    except hc.HybridcompError as error:
        return None, error


def made(case: Case, who: str) -> hc.Communicator:
    """Make the communicator of a case."""
    comm = hc.Communicator(Hosts(WORLD, case.hosts), "none", "dp", timeout=_ELSE)
    return step_by_step(comm) if who == "python" else comm


def check(case: Case, library: Any, who: str) -> tuple[bool, Counter[str], str]:
    """Run a case, whose steps are done by ``who``.

    Returns:
        Whether its fault was planted; how it ended, by rank; what was wrong.
    """
    comm = made(case, who)
    library.faults_arm(0, 0, 0)
    want, error = attempt(comm, case)
    sent = WORLD.allgather(library.faults_disarm())
    comm.Free()
    errors = [said for said in WORLD.allgather("" if error is None else repr(error)) if said]
    if errors:  # a lattice for three ranks does not take five
        refused = all(said.startswith(("CodecMismatchError", "RemoteError")) for said in errors)
        return False, Counter(["refused"]), "" if refused else f"undisturbed: {errors}"
    senders = [rank for rank, count in enumerate(sent) if count]
    if not senders:
        return False, Counter(), ""
    guilty = senders[case.draw % len(senders)]
    k = (case.draw >> 8) % sent[guilty]
    comm = made(case, who)
    comm.timeout = _PATIENCE.get(case.kind, _ELSE)
    kind = 1 + KINDS.index(case.kind) if WORLD.rank == guilty else 0
    WORLD.Barrier()
    library.faults_arm(kind, k, case.draw)
    got, error = attempt(comm, case)
    WORLD.Barrier()  # all have ended
    library.faults_disarm()
    planted = WORLD.bcast(library.faults_planted(), guilty)
    failed = WORLD.allgather(error is not None)
    wrong = ""
    if got is not None and got != want:
        wrong = "the bits are wrong"
    elif case.kind == "delay" and error is not None:
        wrong = f"a message that came late is an error: {error!r}"
    elif any(failed) and case.op != "send" and error is None:
        error = told(comm)
        wrong = "" if isinstance(error, hc.RemoteError) else "it was not told that others have failed"
    comm.Free()
    said = "right" if error is None else type(error).__name__
    return (
        planted >= 0,
        Counter([said]),
        wrong and f"rank {WORLD.rank}, guilty {guilty}, k {k}: {wrong}; {error!r}",
    )


def loaded(path: str) -> Any:
    """Load the library, and have both the engine and Python send by it."""
    library = ctypes.CDLL(path)
    library.faults_arm.argtypes = [ctypes.c_int, ctypes.c_long, ctypes.c_ulong]
    library.faults_take.argtypes = [ctypes.c_void_p, ctypes.c_long]
    library.faults_cut.argtypes = [ctypes.c_long]
    for function in (library.faults_disarm, library.faults_planted, library.faults_cut):
        function.restype = ctypes.c_long
    library.faults_draw.restype = ctypes.c_ulong
    library.faults_bind(ctypes.c_void_p(address("MPI_Isend")), MPI.PROC_NULL)
    ours = ctypes.cast(library.faults_isend, ctypes.c_void_p).value
    groups.address = lambda name: ours if name == "MPI_Isend" else address(name)
    honest = MpiTransport.isend

    def isend(self: MpiTransport, data: Any, peer: int, tag: int, mode: str = "Isend") -> MPI.Request:
        raw = np.asarray(data).view(np.uint8)
        kind, draw = library.faults_take(raw.ctypes.data, raw.size), library.faults_draw()
        name = KINDS[kind - 1] if kind else ""
        if name == "delay":
            time.sleep(0.02 + draw % 300 / 1000)
        elif name == "drop":
            return self.comm.Isend([b"", MPI.BYTE], MPI.PROC_NULL, tag)
        elif name == "truncate":
            raw = raw[: library.faults_cut(raw.size)]
        elif name == "damage":
            raw = raw.copy()
            raw[draw // 8 % raw.size] ^= 1 << draw % 8
        return honest(self, raw if name else data, peer, tag, mode)

    MpiTransport.isend = isend  # type: ignore[method-assign]
    return library


def main(seed: str, cases: str, path: str, who: str, out: str) -> None:
    """Run all cases, and write what was done."""
    library = loaded(path)
    random_ = random.Random(seed)
    faults: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    for number in range(int(cases)):
        case = drawn(random_, WORLD.size)
        planted, said, wrong = check(case, library, who)
        for rank, what in enumerate(WORLD.allgather(wrong)):
            if what:
                if WORLD.rank == 0:
                    print(f"case {number}: {case}: rank {rank}: {what}", flush=True)
                WORLD.Barrier()
                sys.exit(1)
        faults[f"message {case.kind}"] += planted
        outcomes += WORLD.allreduce(said)
    if WORLD.rank == 0:
        Path(out).write_text(
            json.dumps({"operations": 2 * int(cases), "faults": faults, "outcomes": outcomes})
        )


if __name__ == "__main__":
    main(*sys.argv[1:])

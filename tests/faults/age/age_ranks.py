"""Ranks of :mod:`.age`: ``mpiexec -n 2 python -m tests.faults.age.age_ranks SEED OPERATIONS COMMUNICATORS OUT``.

First many operations on two communicators, whose tags begin shortly before they come round. Then communicators are made
one after another, each with operations, a fault or none, and an end. A process's resources are measured after a part of
both, and at the end: nothing may have grown but by what is said in :func:`allowed`.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.collectives.failure.release import collect
from tests.faults.age.age_lives import FAULTS, NEEDS_MESSAGES, WEIGHTS, Life
from tests.soak.measure import Held, everywhere, held

WORLD = MPI.COMM_WORLD
WARM_UP = 0.25  # share of the operations, and of the communicators
SECONDS = 30.0
CODECS = ["none", "int8", "int8:block=128", "bf16", "topk:ratio=0.1", "int4"]
SIZES = [1, 3, 17, 1_000, 1_000, 20_000]
# Codecs whose sums must be exact; those of others may be off by 2 %, and those of topk are not checked.
EXACT = {"none", "bf16"}
_IDLE_SECONDS = 1.2  # idle seconds after which the engine's threads for first messages end
# Operation numbers from which tags are counted: they come round after a few operations then.
SOON = {"20000": 19_950, "2**32": 2**32 - 50}


def operation(comm: hc.Communicator, draw: random.Random) -> str:
    """Do an operation by chance, the same on all ranks; return what is wrong with its result, if anything."""
    n, codec = draw.choice(SIZES), draw.choice(CODECS)
    root, kind, later = draw.randrange(comm.size), draw.randrange(6), draw.random() < 0.3
    mine = np.full(n, comm.rank + 1, np.float32)
    total = comm.size * (comm.size + 1) / 2
    if kind <= 1:
        want, out = total, mine
        request = comm.Iallreduce(MPI.IN_PLACE, mine, codec=codec)
    elif kind == 2:
        want, out = root + 1, mine
        request = comm.Ibcast(mine, root, codec=codec)
    elif kind == 3:
        want, out = comm.size, np.zeros(n * comm.size, np.float32)
        request = comm.Iallgather(mine, out, codec=codec)
        out = out[-n:]
    elif kind == 4:
        want, out = total, np.zeros(n, np.float32)
        request = comm.Ireduce_scatter_block(
            np.full(n * comm.size, comm.rank + 1, np.float32), out, codec=codec
        )
    else:
        return _exchange(comm, mine, draw)
    if later:
        comm.Barrier()
    request.wait()
    if not codec.startswith("topk"):
        wrong = np.abs(out - want).max()
        if wrong > (0 if codec in EXACT else 0.02 * want):
            return f"{kind} of {n} elements, {codec}: is off by {wrong}"
    return ""


def _exchange(comm: hc.Communicator, mine: np.ndarray, draw: random.Random) -> str:
    """Send to the next rank, and receive from the one before."""
    tag, codec, n = draw.randrange(1000), draw.choice(["none", "int8"]), mine.size
    out = np.zeros(n, np.float32)
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    request = comm.Irecv(out, before, tag, codec=codec)
    comm.Send(mine, after, tag, codec=codec)
    request.wait()
    wrong = np.abs(out - (before + 1)).max()
    return f"received what is off by {wrong}" if wrong > 0.02 * (before + 1) else ""


def agree(wrong: str) -> None:
    """End all ranks if something is wrong on one."""
    found = [f"rank {rank}: {text}" for rank, text in enumerate(WORLD.allgather(wrong)) if text]
    if found:
        if WORLD.rank == 0:
            print("\n".join(found), flush=True)
        WORLD.Barrier()
        sys.exit(1)


class Age:
    """The state of a run on one rank."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.operations = 0
        self.kept = 0  # communicators whose contexts MPI does not get back
        self.possible = [fault for fault in FAULTS if _over_mpi() or fault not in NEEDS_MESSAGES]

    def use(self, comm: hc.Communicator, count: int) -> None:
        """Do operations."""
        for _ in range(count):
            number = self.operations
            try:
                wrong = operation(comm, self.draw)
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}"
            self.operations += 1
            if wrong or number % 500 == 0:
                agree(wrong and f"operation {number}: {wrong}")
        agree("")
        self.outcomes["right"] += count

    def live(self) -> None:
        """Make a communicator, plant a fault or none, and free it or not."""
        lived = sum(self.faults[fault] for fault in self.possible)
        weights = [WEIGHTS.get(fault, 15) for fault in self.possible]
        # Each fault comes once at first, so that its first-time costs are in the warm-up.
        fault = (self.possible[lived:] or self.draw.choices(self.possible, weights))[0]
        life = Life(fault, self.draw.getrandbits(32))
        wrong = life.run()
        agree(wrong and f"{fault}: {wrong}")
        self.faults[fault] += 1
        self.outcomes += life.outcomes
        self.operations += life.operations
        self.kept += life.keeps


def _over_mpi() -> bool:
    return os.environ.get("HYBRIDCOMP_SHARED_MEMORY") == "0"


def allowed(kept: int) -> Held:
    """Return how much more a process may come to hold; each communicator that is kept has some tens of KB of MPI's."""
    return Held(
        memory_mb=12.0 + 0.1 * kept,
        shared_mb=32.0,
        heap_mb=4.0 + 0.1 * kept,
        threads=0,
        tasks=0,
        files=0,
        requests=kept,
        groups=kept,
        objects=2_000 + 60 * kept,
    )


def measured(work: Callable[[float], None]) -> Held:
    """Do a part of the work, the rest, and return what has grown between them."""
    work(WARM_UP)
    gc.collect()
    time.sleep(_IDLE_SECONDS)
    base = held()
    work(1 - WARM_UP)
    collect()
    WORLD.Barrier()
    collect()
    time.sleep(_IDLE_SECONDS)
    return everywhere(held().beyond(base))


def main(seed: str, operations: str, communicators: str, out: str) -> None:
    """Do it all, and write what was done."""
    warnings.simplefilter("error")  # also the one about too many communicators
    age = Age(int(seed))
    comms = [hc.Communicator(WORLD, "none", "dp", timeout=SECONDS) for _ in SOON]
    for comm, (name, first) in zip(comms, SOON.items(), strict=True):
        _count_from(comm, first)
        age.faults[f"tags come round at {name}"] += 1

    def uses(part: float) -> None:
        for comm in comms:
            age.use(comm, round(part * int(operations) / len(comms)))

    leaks = measured(uses).leaks(allowed(0))
    for comm in comms:
        comm.Free()

    kept = 0

    def lives(part: float) -> None:
        nonlocal kept
        kept = age.kept
        for _ in range(round(part * int(communicators))):
            age.live()

    grown = measured(lives)
    leaks += grown.leaks(allowed(age.kept - kept))
    agree("; ".join(leaks) and f"{'; '.join(leaks)} ({grown}, {age.kept - kept} kept)")
    if WORLD.rank == 0:
        done: dict[str, Any] = {"operations": age.operations, "faults": age.faults, "outcomes": age.outcomes}
        Path(out).write_text(json.dumps(done | {"kept": age.kept, "grown": vars(grown)}))


def _count_from(comm: hc.Communicator, number: int) -> None:
    """Have a communicator's operations number on from here, as if so many tags had been taken."""
    numbers, each = comm.session.transport._numbers, comm.session.transport._each
    numbers.begin(number // (64 + each))
    for _ in range(number % (64 + each) // each):
        numbers.reserve()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Operations on ranks that run short of something: threads, memory, open files, address space.

``mpiexec -n 2 python -m tests.faults.resources.short SEED FOLDER`` with ``libc.c`` preloaded; the seed decides all.
Each rank writes what became of its operations to ``FOLDER/RANK``, one JSON line each.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import random
import resource
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import hybridcomp as hc
from tests.faults.preload import Planted

SECONDS = 5.0  # timeout of an operation
_ALLOCATION = (
    1 << 14
)  # bytes of the least that a codec is refused: NumPy does not look at what it gets for less
_MEETING_SECONDS = 40.0
KINDS = ("threads", "memory", "files", "address space", "shared memory")
SPECS = (
    *("none", "int8", "int4:block=32", "fp8", "sign", "mpc", "lossless", "bounded:rel=1e-3", "zfp"),
    *("topk:ratio=0.05", "threshold:rel=2.0", "sidco:ratio=0.02"),
)
COUNTS = (100, 5_000, 80_000, 400_000)
WORLD = MPI.COMM_WORLD


@dataclass(frozen=True)
class Plan:
    """Plan that a seed decides.

    Attributes:
        kind: resource that is short.
        ranks: ranks that run short.
        early: whether before the communicator is made; else after.
        amount: amount that there still is, in the kind's own unit.
        least: bytes from which on an allocation fails.
        fail: number of allocations that fail.
        spec, count, operations: codec, number of elements and operations that run.
        threads: threads of the kernels.
    """

    kind: str
    ranks: tuple[int, ...]
    early: bool
    amount: int
    least: int
    fail: int
    spec: str
    count: int
    operations: tuple[str, ...]
    threads: int


def plan_of(seed: int) -> Plan:
    """Return the plan that a seed decides."""
    rng = random.Random(seed)
    kind = rng.choice(KINDS)
    return Plan(
        kind=kind,
        ranks=rng.choice([(0,), (1,), (0, 1)]),
        early=rng.random() < 0.4,
        amount=rng.choice([0, 0, 1, 2, 3, 5, 8]),
        least=rng.choice([1 << 10, 1 << 13, 1 << 16, 1 << 19]),
        fail=rng.choice([1, 1, 2, 1 << 40]),
        spec=rng.choice(SPECS),
        count=rng.choice(COUNTS),
        operations=tuple(rng.choice(list(OPERATIONS)) for _ in range(3)),
        threads=rng.choice([1, 4]),
    )


@contextlib.contextmanager
def planted(plan: Plan) -> Iterator[None]:
    """Run short, as planned."""
    faults = Planted()
    if WORLD.rank not in plan.ranks:
        yield
        return
    if plan.kind == "threads":
        faults.threads(plan.amount)
    elif plan.kind == "memory":
        faults.memory(plan.least, plan.amount, plan.fail)
    elif plan.kind == "files":
        free = (
            number for number in itertools.count() if not _is_open(number)
        )  # a launcher may leave high ones open
        _limit(resource.RLIMIT_NOFILE, next(itertools.islice(free, plan.amount, None)))
    elif plan.kind == "address space":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        # With less, it is the C library and MPI that end the process.
        _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + (12 + 4 * plan.amount) * (1 << 20))
    else:
        _fill()
    try:
        yield
    finally:
        refused.extend(faults.disarm())
        _limit(resource.RLIMIT_NOFILE)
        _limit(resource.RLIMIT_AS)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _limit(what: int, soft: int | None = None) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (hard if soft is None else soft, hard))


def _fill() -> None:
    """Fill what is left of the shared memory's file system; in a name space of its own, see ``resources.py``."""
    number = os.open("/dev/shm", os.O_TMPFILE | os.O_WRONLY)  # stays open
    with contextlib.suppress(OSError):
        while True:
            os.write(number, bytes(1 << 16))


def _meet(folder: Path, made: bool) -> bool:
    """Wait for the other rank, without MPI; tell whether both have made their communicator."""
    mine, other = (folder / f"met-{rank}" for rank in (WORLD.rank, 1 - WORLD.rank))
    mine.with_suffix(".new").write_text("made" if made else "failed")
    mine.with_suffix(".new").rename(mine)
    deadline = time.monotonic() + _MEETING_SECONDS
    while not other.exists():
        if time.monotonic() > deadline:
            raise TimeoutError("the other rank does not come")
        time.sleep(0.005)
    return made and other.read_text() == "made"


# Each operation takes room for twice its values, made before anything is short, and returns the part with its result.


def _all_reduce(comm: Any, x: np.ndarray, room: np.ndarray) -> np.ndarray:
    out = room[: x.size]
    comm.Allreduce(x, out)
    return out


def _later(comm: Any, x: np.ndarray, room: np.ndarray) -> np.ndarray:
    out = room[: x.size]
    request = comm.Iallreduce(x, out)
    time.sleep(0.05)
    request.wait()
    return out


def _all_gather(comm: Any, x: np.ndarray, room: np.ndarray) -> np.ndarray:
    comm.Allgather(x, room)
    return room


def _all_to_all(comm: Any, x: np.ndarray, room: np.ndarray) -> np.ndarray:
    out = room[: x.size]
    comm.Alltoall(x, out)
    return out


def _broadcast(comm: Any, x: np.ndarray, room: np.ndarray) -> np.ndarray:
    out = room[: x.size]
    out[:] = x
    comm.Bcast(out, root=1)
    return out


def _reduce_scatter(comm: Any, x: np.ndarray, room: np.ndarray) -> np.ndarray:
    out = room[: x.size // 2]
    comm.Reduce_scatter_block(x, out)
    return out


def _message(comm: Any, x: np.ndarray, room: np.ndarray) -> np.ndarray:
    if comm.Get_rank() == 0:
        comm.Send(x, 1)
        return x
    out = room[: x.size]
    comm.Recv(out, 0)
    return out


# Operations by the names that errors call them.
OPERATIONS: dict[str, Callable[[Any, np.ndarray, np.ndarray], np.ndarray]] = {
    "all_reduce": _all_reduce,
    "all_reduce, later": _later,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce_scatter": _reduce_scatter,
    "send": _message,
}


class Log:
    """The file of a rank; open from the start, since it may not be opened later."""

    def __init__(self, path: Path) -> None:
        self._number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, **values: Any) -> None:
        """Write a line."""
        os.write(self._number, json.dumps(values).encode() + b"\n")


def attempt(log: Log, phase: str, what: str, do: Callable[[], Any]) -> bool:
    """Do something and write what became of it; tell whether it succeeded."""
    began = time.monotonic()
    error: BaseException | None = None
    result = None
    try:
        result = do()
    except Exception as found:
        error = found
    seconds = time.monotonic() - began
    saved.append((phase, what, result, error, seconds))
    if not short:
        _write_saved(log)
    return error is None


# Numbers of allocations and threads that have failed.
refused: list[int] = []
# While this rank is short of memory nothing is written: that may need some.
saved: list[tuple[str, str, Any, BaseException | None, float]] = []
short: list[bool] = []


def _write_saved(log: Log) -> None:
    while saved:
        _write(log, *saved.pop(0))


def _write(log: Log, phase: str, what: str, result: Any, error: BaseException | None, seconds: float) -> None:
    ended = "right" if error is None else type(error).__name__
    bits = hashlib.sha256(result).hexdigest()[:16] if isinstance(result, np.ndarray) else ""
    ours = isinstance(error, hc.HybridcompError)
    where = traceback.format_tb(error.__traceback__)[-3:] if error is not None and not ours else []
    text = str(error or "") + "".join(where)
    log.write(phase=phase, what=what, ended=ended, text=text, bits=bits, ours=ours, seconds=seconds)


def main(seed: int, folder: str) -> None:
    """Run one plan."""
    plan, log = plan_of(seed), Log(Path(folder, str(WORLD.rank)))
    log.write(phase="plan", **asdict(plan))
    x = np.random.default_rng([seed, WORLD.rank]).standard_normal(plan.count).astype(np.float32)
    hc.set_num_threads(plan.threads)
    rooms = [np.empty(2 * plan.count, np.float32) for _ in plan.operations]
    made: list[hc.Communicator] = []
    assert hc.Communicator  # loads its modules

    def make() -> None:
        made.append(hc.Communicator(WORLD, f"{plan.spec}:min_bytes=0", "dp", timeout=SECONDS))

    if not plan.early:
        attempt(log, "before", "make", make)
    with planted(plan):
        short.append(True)
        if made or attempt(log, "short", "make", make):
            for name, room in zip(plan.operations, rooms, strict=True):
                if not attempt(log, "short", name, partial(OPERATIONS[name], made[0], x, room)):
                    break
    short.clear()
    _write_saved(log)
    # After an error the two ranks may be at different operations.
    if made:
        attempt(log, "after", "all_reduce", lambda: _all_reduce(made[0], x, rooms[0]))
    # Where a rank has failed to make one, without a word to the other, MPI's communicator has a barrier that it owes.
    if _meet(Path(folder), bool(made)):
        attempt(log, "new", "make", make)
        for name, operation in OPERATIONS.items():
            attempt(log, "new", name, partial(operation, made[-1], x, rooms[0]))
    log.write(phase="end", refused=refused)


def codecs_alone() -> None:
    """Refuse each allocation of each codec once, in a new thread; print how often what came of it."""
    faults = Planted()
    x = np.random.default_rng(0).standard_normal(300_000).astype(np.float32)
    x.view(np.uint8)[::4] = 0  # a plane that zstd takes
    for spec in SPECS:
        right = hc.decode(hc.get_codec(spec).encode(x))
        found: Counter[str] = Counter()

        def once(spec: str = spec, right: np.ndarray = right, found: Counter[str] = found) -> None:
            try:
                result = hc.decode(hc.get_codec(spec).encode(x))
            except BaseException as error:
                found[type(error).__name__] += 1
            else:
                found["right" if np.array_equal(result, right) else "wrong"] += 1

        for succeed in itertools.count():
            faults.memory(_ALLOCATION, succeed, 1)
            thread = threading.Thread(target=once)  # which has no contexts of zstd's yet
            thread.start()
            thread.join()
            if not faults.disarm()[0]:
                break
        print(json.dumps({spec: found}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

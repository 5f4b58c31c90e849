"""Time of an operation's start, and of all of it: ``mpiexec -n 2 python benchmarks/starts.py --json starts.json``.

``comm.I*`` beside mpi4py's, and ``torch.distributed`` on our backend beside gloo, on arrays in memory. Ours and theirs
take turns, in blocks of calls so that the threads of one do not run in the other's; the first calls of a block do not
count. ``start`` is the time until a call returns that does not wait, ``whole`` until its operation has ended, for
``blocking`` calls until they return. Each is a median over calls, of the slowest rank. Every result is checked.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from resultfile import write

import hybridcomp as hc
import hybridcomp.torch as hct
from hybridcomp.policy import Policy, Rule

WORLD = MPI.COMM_WORLD
P, ME = WORLD.size, WORLD.rank
RIGHT, LEFT = (ME + 1) % P, (ME - 1) % P
BLOCK, LEFT_OUT = 25, 5  # calls in a block, and those at its beginning that do not count


class Case(NamedTuple):
    """An operation as both sides start it.

    Attributes:
        name: name of the operation.
        ours, theirs: functions that start it and return the requests to wait for; none if they have waited.
        given: values to fill the operation's array with before each call.
        into: that array.
        result, want: array of the result, and its right values.
    """

    name: str
    ours: Callable[[], list[Any]]
    theirs: Callable[[], list[Any]]
    given: np.ndarray
    into: np.ndarray
    result: np.ndarray
    want: np.ndarray


def values(n: int, rank: int = ME) -> np.ndarray:
    """Return small whole numbers, whose sums are exact."""
    return ((np.arange(n) + 3 * rank) % 50).astype(np.float32)


def of_communicators(n: int, codec: str) -> list[Case]:
    """Return cases of a communicator's operations and of mpi4py's."""
    ours, bare = hc.Communicator(WORLD, "none"), WORLD.Dup()
    ask = {} if codec == "none" else {"codec": codec}
    x, y, n1 = values(n), np.zeros(n, np.float32), n // P
    total = np.sum([values(n, r) for r in range(P)], axis=0, dtype=np.float32)
    share, every = np.zeros(n1, np.float32), np.zeros(n * P, np.float32)
    block, gathered = slice(ME * n1, (ME + 1) * n1), np.concatenate([values(n, r) for r in range(P)])

    def both(name: str, start: Callable[..., Any], into: np.ndarray, result: np.ndarray, want: Any) -> Case:
        def listed(comm: Any, **more: Any) -> list[Any]:
            requests = start(comm, **more)
            return requests if isinstance(requests, list) else [requests] if requests is not None else []

        given = into.copy()
        return Case(name, lambda: listed(ours, **ask), lambda: listed(bare), given, into, result, want)

    root = x.copy() if ME == 0 else np.zeros(n, np.float32)

    def message(comm: Any, **more: Any) -> list[Any]:
        return [comm.Irecv(y, LEFT, 3, **more), comm.Isend(x, RIGHT, 3, **more)]

    remembered = []
    if codec != "none":
        rule = Rule(codecs=(hc.get_codec(codec),), feedback="ef", min_bytes=0)
        named, given = hc.Communicator(WORLD, Policy(f"{codec}+ef", rule)), y.copy()
        remembered = [
            Case(
                f"blocking Allreduce{what}",
                lambda ask=ask: named.Allreduce(x, y, **ask) or [],
                lambda: bare.Allreduce(x, y) or [],
                *(given, y, y, total),
            )
            for what, ask in ((", named, with feedback", {"name": "weight"}), (" of the same policy", {}))
        ]

    return [
        *remembered,
        both("Iallreduce", lambda c, **m: c.Iallreduce(x, y, **m), y, y, total),
        both(
            "Ireduce_scatter_block",
            lambda c, **m: c.Ireduce_scatter_block(x[: n1 * P], share, **m),
            share,
            share,
            total[block],
        ),
        both("Iallgather", lambda c, **m: c.Iallgather(x, every, **m), every, every, gathered),
        both("Ibcast", lambda c, **m: c.Ibcast(root, 0, **m), root, root, values(n, 0)),
        both("Irecv and Isend", message, y, y, values(n, LEFT)),
        both("blocking Allreduce", lambda c, **m: c.Allreduce(x, y, **m), y, y, total),
        both("blocking Bcast", lambda c, **m: c.Bcast(root, 0, **m), root, root, values(n, 0)),
        both(
            "blocking Sendrecv",
            lambda c, **m: c.Sendrecv(x, RIGHT, 3, y, LEFT, 3, **m),
            y,
            y,
            values(n, LEFT),
        ),
    ]


def of_torch(n: int) -> list[Case]:
    """Return cases of our backend's operations and of gloo's."""
    gloo = dist.new_group(backend="gloo")
    t, every = torch.from_numpy(values(n)), torch.zeros(n * P)
    total = np.sum([values(n, r) for r in range(P)], axis=0, dtype=np.float32)
    gathered = np.concatenate([values(n, r) for r in range(P)])
    source, got = torch.from_numpy(values(n)), torch.zeros(n)

    def both(name: str, start: Callable[[Any], list[Any]], into: torch.Tensor, want: Any) -> Case:
        array = into.numpy()
        return Case(name, lambda: start(None), lambda: start(gloo), array.copy(), array, array, want)

    return [
        both("all_reduce", lambda g: [dist.all_reduce(t, group=g, async_op=True)], t, total),
        both(
            "all_gather_into_tensor",
            lambda g: [dist.all_gather_into_tensor(every, source, group=g, async_op=True)],
            every,
            gathered,
        ),
        both("broadcast", lambda g: [dist.broadcast(t, 0, group=g, async_op=True)], t, values(n, 0)),
        both(
            "irecv and isend",
            lambda g: [dist.irecv(got, LEFT, group=g), dist.isend(source, RIGHT, group=g)],
            got,
            values(n, LEFT),
        ),
        both("blocking all_reduce", lambda g: dist.all_reduce(t, group=g) or [], t, total),
    ]


def measure(case: Case, calls: int, tolerance: float) -> tuple[list[float], bool]:
    """Return the seconds of our start and whole and of the peer's, and whether all results were right."""
    taken: list[list[float]] = [[], [], [], []]
    good = True
    for block in range(2 * max(1, calls // (BLOCK - LEFT_OUT))):
        side = block % 2
        start = case.theirs if side else case.ours
        for i in range(BLOCK):
            case.into[...] = case.given
            WORLD.Barrier()
            began = perf_counter()
            requests = start()
            started = perf_counter()
            for request in requests:
                request.wait()
            ended = perf_counter()
            if i >= LEFT_OUT:
                taken[2 * side].append(started - began)
                taken[2 * side + 1].append(ended - began)
        good = good and bool(np.abs(case.result - case.want).max() <= tolerance)
        WORLD.Barrier()
    mine = np.array([np.median(seconds) for seconds in taken])
    slowest = np.empty_like(mine)
    WORLD.Allreduce(mine, slowest, MPI.MAX)
    return slowest.tolist(), WORLD.allreduce(good, op=MPI.LAND)


def main() -> None:
    """Print a line for each operation and codec on rank 0; exit with 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=256 << 10, help="of each array")
    parser.add_argument("--calls", type=int, default=400, help="of each, for every figure")
    parser.add_argument("--codec", default="none,int8", help="of the communicator's")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if WORLD.size < 2:
        sys.exit("an operation needs two ranks: mpiexec -n 2 python benchmarks/starts.py")
    torch.set_num_threads(1)
    hct.set_policy("none")
    dist.init_process_group("hybridcomp")
    n = args.bytes // 4
    groups = [("mpi4py", codec, of_communicators(n, codec)) for codec in args.codec.split(",")]
    groups.append(("gloo", "none", of_torch(n)))
    rows = []
    for peer, codec, cases in groups:
        for case in cases:
            (start, whole, their_start, their_whole), good = measure(
                case, args.calls, 0 if codec == "none" else P * 2.0
            )
            row = {
                "op": case.name,
                "codec": codec,
                "bytes": args.bytes,
                "ranks": P,
                "start_microseconds": round(start * 1e6, 1),
                "whole_microseconds": round(whole * 1e6, 1),
                "peer": peer,
                "peer_start_microseconds": round(their_start * 1e6, 1),
                "peer_whole_microseconds": round(their_whole * 1e6, 1),
                "correct": good,
            }
            rows.append(row)
            if ME == 0:
                print(
                    f"{P} ranks  {args.bytes >> 10} KiB  {codec:5} {case.name:24} start {start * 1e6:7.1f}  whole "
                    f"{whole * 1e6:7.1f} us   {peer:6} start {their_start * 1e6:7.1f}  whole {their_whole * 1e6:7.1f} "
                    f"us  {'ok' if good else 'WRONG'}",
                    flush=True,
                )
    if ME == 0 and args.json is not None:
        write(args.json, {"rows": rows})
    dist.destroy_process_group()
    if not all(row["correct"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()

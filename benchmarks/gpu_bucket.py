"""Time a DDP bucket on ranks that share one GPU, and split the time: Python, host copies, messages, the device.

mpiexec -n 4 python benchmarks/gpu_bucket.py --json runs/bench/gpu_bucket_4.json

A bucket is a transformer's block, averaged as the hook does it over gloo, with MPI moving the bytes of its exchanges;
one rank alone has nothing to average. For each codec, in milliseconds, the mean of ranks and buckets:

*   ``total``: from the hook's call until the averages are there;
*   of which a rank's thread spends ``waiting`` for the device, in ``messages`` (other ranks' lateness too), in
    ``starting`` kernels and copies, in ``host_copies`` between pinned memory and exchanges' buffers; the rest is
    ``python``;
*   ``alone``: the kernels of a rank's part while the others do nothing;
*   ``copies``: what CUDA takes to copy the messages' bytes to the host and back.

Ranks of one GPU take turns on it: where ``waiting`` is above ``alone`` times their number, it is switches between their
contexts. An all-reduce of 64 MiB through MPI stands beside it, with the processor time that the rank's process took
(``processor``): Python, MPI and host copies. The exit code is 1 unless all ranks end with the same bits.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Before the tests' helpers look.
os.environ["HYBRIDCOMP_TEST_DEVICE"] = "emulation" if "emulation" in sys.argv else "cuda"
os.environ.setdefault("HC_EMULATION_CHECKS", "0")
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from mpi4py import MPI
from resultfile import write

import hybridcomp as hc
from hybridcomp.arrays import DType, flatten
from hybridcomp.codecs.device.messages import decode_opened, encode_into, open_message, read_opened
from hybridcomp.collectives.device.joint import Joint, JointEvent
from hybridcomp.collectives.device.streams import stream_pool
from hybridcomp.device import Queue
from hybridcomp.policy.toml import parse_policy
from hybridcomp.torch.exchange import batch
from hybridcomp.torch.exchange.staging import HostStaging
from tests.cuda.common import runtime, to_device, to_host
from tests.mpi.device import hook_sides
from tests.mpi.device.counting import block

WORLD = MPI.COMM_WORLD
CODECS = (("none", None), ("int8", None), ("int4", "ef"), ("topk:ratio=0.01", "ef"))
PARTS = ("waiting", "messages", "starting", "host_copies")
Row = dict[str, Any]


class Clock:
    """Time that the thread of operations spends in parts of its work."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that adds its time to a part."""

        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - began

        return run

    def install(self) -> None:
        """Time the parts from now on."""
        for owner, name, part in (
            (HostStaging, "copy", "host_copies"),
            (hook_sides.Exchange, "wait", "messages"),
            (Joint, "start", "starting"),
            (JointEvent, "done", "waiting"),
        ):
            setattr(owner, name, self.timed(part, getattr(owner, name)))
        sleep = self.timed("waiting", time.sleep)
        batch.time = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)  # type: ignore[attr-defined]

    def take(self) -> dict[str, float]:
        """Return the seconds of each part since the last call."""
        taken, self.seconds = self.seconds, dict.fromkeys(PARTS, 0.0)
        return taken


def most(seconds: float) -> float:
    """Return milliseconds of the slowest rank."""
    return float(WORLD.allreduce(seconds * 1e3, op=MPI.MAX))


def mean(seconds: float) -> float:
    """Return milliseconds, the mean of the ranks."""
    return float(WORLD.allreduce(seconds * 1e3)) / WORLD.size


def in_turn(measure: Callable[[], float]) -> float:
    """Measure on one rank after the other; return the slowest one's milliseconds."""
    found = 0.0
    for rank in range(WORLD.size):
        if rank == WORLD.rank:
            found = measure()
        WORLD.Barrier()
    return most(found)


def buckets(width: int, iterations: int, clock: Clock) -> list[Row]:
    """Time buckets of a block of some width, by each codec."""
    shapes = block(width)
    n = sum(int(np.prod(shape)) for shape in shapes.values())
    hook_sides.SHAPES, hook_sides.N = shapes, n
    storage = np.random.default_rng(WORLD.rank).standard_normal(n).astype(np.float32)
    comm, rows = WORLD.Dup(), []
    for spec, form in CODECS:
        feedback = f', feedback = "{form}"' if form else ""
        policy = parse_policy(
            f'min_bytes = 4096\nexclude = ["*bias"]\n[dp]\nall_reduce = {{ codec = "{spec}"{feedback} }}\n',
            "bucket",
        )
        totals, parts, identical = [0.0, 0.0], [clock.take(), clock.take()], True
        if WORLD.size > 1:
            side = hook_sides.Side(hook_sides.Exchanges(comm), device=True)
            totals, parts = [], []
            for step in range(iterations + 1):
                WORLD.Barrier()
                clock.take()
                result = side.average(storage, "float32", policy, step)
                totals.append(side.seconds)
                parts.append(clock.take())
            same = WORLD.bcast(result if WORLD.rank == 0 else None, root=0)
            identical = bool(WORLD.allreduce(same.tobytes() == result.tobytes(), op=MPI.LAND))
        row: Row = {"codec": spec, "feedback": form, "bytes": storage.nbytes, "identical": identical}
        row["total"] = mean(statistics.fmean(totals[1:]))
        for part in PARTS:
            row[part] = mean(statistics.fmean(found[part] for found in parts[1:]))
        row["python"] = row["total"] - sum(row[part] for part in PARTS)
        row["alone"] = in_turn(lambda spec=spec: alone(spec, storage, iterations))
        row["copies"] = in_turn(lambda spec=spec: copies(spec, n, iterations))
        rows.append(row)
        say(row, ("total", *PARTS, "python", "alone", "copies"))
    comm.Free()
    return rows


def alone(spec: str, storage: np.ndarray[Any, Any], iterations: int) -> float:
    """Return the seconds of the kernels of a rank's part: the shards' messages, the sum of its own, the results."""
    codec, ranks, queue = hc.get_codec(spec), WORLD.size, Queue(runtime(), runtime().new_stream()[0])
    data = flatten(to_device(storage), device=True)
    edges = [data.size * i // ranks for i in range(ranks + 1)]
    shards = [data._replace(data=data.data[a:b], shape=(b - a,)) for a, b in itertools.pairwise(edges)]
    parts = [*shards, shards[0]]  # the sum of the own shard comes last
    rooms = [queue.empty(codec.bound(part.size, DType.FLOAT32)) for part in parts]
    outs = [queue.array(part.size, np.float32) for part in parts]
    times = []
    for _ in range(iterations + 1):
        queue.read(queue.status)
        began = time.perf_counter()
        messages = []
        for part, room in zip(parts, rooms, strict=True):
            messages.append(room[: encode_into(codec, part, room, queue).nbytes(queue)])
        # As many come for the own shard as there are other ranks, and one of each shard's sum.
        for message, out in zip([*messages[1:-1], *messages[:-1]], [*outs[1:-1], *outs[:-1]], strict=True):
            header, head = read_opened(queue, message, open_message(queue, message))
            decode_opened(header, head, message, out, DType.FLOAT32, queue)
        queue.read(queue.status)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def copies(spec: str, n: int, iterations: int) -> float:
    """Return the seconds of copies to the host and back of as many bytes as a rank's messages have."""
    codec, ranks = hc.get_codec(spec), WORLD.size
    queue, pool = Queue(runtime(), runtime().new_stream()[0]), stream_pool(runtime()).pinned
    nbytes = 2 * (ranks - 1) * codec.bound(n // ranks, DType.FLOAT32) or 4
    there, here = queue.empty(nbytes), pool.take(nbytes)
    times = []
    for _ in range(iterations + 1):
        began = time.perf_counter()
        runtime().copy(here.ctypes.data, there.ptr, nbytes, queue.stream)
        queue.upload(there, here[:nbytes])
        runtime().synchronize(queue.stream)
        times.append(time.perf_counter() - began)
    pool.give(here)
    return statistics.median(times[1:])


def allreduces(n: int, iterations: int) -> list[Row]:
    """Time an all-reduce of a device array through MPI by each codec, and its processor time."""
    comm, rows = hc.Communicator(WORLD, "none", "dp"), []
    storage = np.random.default_rng(WORLD.rank).standard_normal(n).astype(np.float32)
    send, recv = to_device(storage), to_device(np.zeros_like(storage))
    for spec, _ in CODECS:
        walls, processors = [], []
        for _ in range(iterations + 1):
            WORLD.Barrier()
            began, before = time.perf_counter(), time.process_time()
            comm.Allreduce(send, recv, codec=spec)
            to_host(recv[:1])
            walls.append(time.perf_counter() - began)
            processors.append(time.process_time() - before)
        row = {"codec": spec, "bytes": storage.nbytes, "total": most(statistics.median(walls[1:]))}
        row["processor"] = most(statistics.median(processors[1:]))
        row["alone"] = in_turn(lambda spec=spec: alone(spec, storage, iterations))
        row["copies"] = in_turn(lambda spec=spec: copies(spec, n, iterations))
        rows.append(row)
        say({"feedback": None, **row}, ("total", "processor", "alone", "copies"))
    comm.Free()
    return rows


def say(row: Row, columns: tuple[str, ...]) -> None:
    if WORLD.rank == 0:
        cells = "  ".join(f"{column} {row[column]:.2f}" for column in columns)
        print(f"{row['bytes'] >> 20:>4} MiB  {row['codec']:16} {row['feedback'] or '':3} {cells}", flush=True)


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "emulation"), default="cuda")
    parser.add_argument("--widths", type=int, nargs="+", default=[768, 1182], help="of blocks: 27 and 64 MiB")
    parser.add_argument("--elements", type=int, default=1 << 24, help="float32 values of the all-reduce")
    parser.add_argument("--iters", type=int, default=5, help="buckets of each codec that are counted")
    parser.add_argument("--json", type=Path, help="also write the results there")
    args = parser.parse_args()
    if WORLD.rank == 0:
        print(f"# {WORLD.size} ranks share one device; milliseconds", flush=True)
    clock = Clock()
    clock.install()
    rows = [row for width in args.widths for row in buckets(width, args.iters, clock)]
    record = {"ranks": WORLD.size, "buckets": rows, "all_reduce": allreduces(args.elements, args.iters)}
    if args.json is not None and WORLD.rank == 0:
        write(args.json, record)
    sys.exit(not all(row["identical"] for row in rows))


if __name__ == "__main__":
    main()

"""All-reduce by each codec, beside MPI's own in the same run.

mpirun -n 4 python benchmarks/allreduce.py --codec int8,int4 --size 64K:64M:8
hybridcomp lab -n 4 --rate 1gbit -- python benchmarks/allreduce.py --codec int8 --size 64M
"""

from __future__ import annotations

import sys

import harness
import numpy as np
from harness import WORLD, Row
from mpi4py import MPI

import hybridcomp as hc


def measure(spec: str, size: int, args) -> Row:
    """One codec at one size; MPI's own runs before and after, so that drift of the machine shows in neither."""
    dtype = np.dtype(args.dtype)
    n, p = size // dtype.itemsize, WORLD.size
    send = np.random.default_rng(WORLD.rank).standard_normal(n).astype(dtype)
    recv, own = np.empty_like(send), np.empty_like(send)
    with_own = lambda: WORLD.Allreduce(send, own)  # noqa: E731
    comm = hc.Communicator(WORLD, "none", "dp")
    half = max(1, args.iters // 2)
    before = harness.timed(with_own, args.warmup, half)
    times = harness.timed(lambda: comm.Allreduce(send, recv, codec=spec), args.warmup, args.iters)
    after = harness.timed(with_own, 1, args.iters - half)
    want = np.empty(n, np.float64)
    WORLD.Allreduce(send.astype(np.float64), want)
    error, same = harness.check(recv, want)
    seconds, mpi_seconds = harness.median(times), harness.median(before + after)
    sent = harness.wire_bytes(comm, args.warmup + args.iters)
    limit = harness.wire_limit(sent)
    plain = 2 * (p - 1) * send.nbytes // p
    comm.Free()
    return Row(
        size=send.nbytes,
        codec=hc.get_codec(spec).spec,
        seconds=seconds,
        algbw=send.nbytes / seconds / 1e9,
        busbw=send.nbytes / seconds / 1e9 * 2 * (p - 1) / p,
        wire_bytes=sent,
        ratio=plain / sent if sent else 1.0,
        wire_fraction=None if limit is None else limit / seconds,
        mpi_seconds=mpi_seconds,
        speedup=mpi_seconds / seconds,
        relative_error=error,
        identical=same,
    )


def main() -> None:
    args = harness.arguments(__doc__)
    harness.say(
        f"# all-reduce, {args.dtype}, {WORLD.size} ranks, {MPI.Get_library_version().splitlines()[0]}"
    )
    harness.say(harness.HEADER)
    harness.say(harness.UNITS)
    rows = []
    for size in args.size:
        for spec in args.codec:
            row = measure(spec, size, args)
            if not row.identical:
                harness.say(f"{spec} at {size} bytes: the ranks ended with different bits")
                sys.exit(1)
            harness.show(row)
            rows.append(row)
    harness.finish("all_reduce", args, rows)


if __name__ == "__main__":
    main()

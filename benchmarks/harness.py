"""What the benchmarks of collectives have in common: sizes, timing, checks, bandwidths, output.

As in nccl-tests: ``algbw`` is the buffer's uncompressed bytes over the time, ``busbw`` is ``algbw`` times the
operation's factor (2(n-1)/n for an all-reduce), so that it can be compared with the link whatever n is. A
compressed operation can exceed the link: both count uncompressed bytes. Times are medians over iterations of
the slowest rank. Results are checked before a speed is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from mpi4py import MPI

import hybridcomp as hc

WORLD = MPI.COMM_WORLD
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes of ``64M``, ``4K``, ``1000``."""
    found = re.fullmatch(r"(\d+)([kmg]?)(i?b)?", text.strip().lower())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 4096, 64K, 64M or 1G")
    return int(found[1]) * _UNITS[found[2]]


def parse_sizes(text: str) -> list[int]:
    """Sizes: ``64M``, ``64K,1M``, or ``first:last:factor``."""
    if ":" not in text:
        return [parse_size(part) for part in text.split(",")]
    first, last, *factor = text.split(":")
    step = int(factor[0]) if factor else 2
    if step < 2:
        raise argparse.ArgumentTypeError(f"the factor between sizes must be at least 2, not {step}")
    sizes, size = [], parse_size(first)
    while size <= parse_size(last):
        sizes.append(size)
        size *= step
    return sizes


def parse_codecs(text: str) -> list[str]:
    """Specs separated by ``;``, or by ``,`` where none of them has parameters."""
    specs = text.split(",") if "=" not in text and ";" not in text else text.split(";")
    try:
        return [hc.get_codec(spec).spec for spec in specs]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


class _Parser(argparse.ArgumentParser):
    """Speaks on rank 0 alone; every rank ends with the same code."""

    def _print_message(self, message: str, file=None) -> None:
        if WORLD.rank == 0:
            super()._print_message(message, file)


def arguments(description: str) -> argparse.Namespace:
    """The flags that every benchmark of a collective takes."""
    parser = _Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--codec", type=parse_codecs, default="int8", help="int8,int4 or int8:block=64;topk:ratio=0.01"
    )
    parser.add_argument(
        "--size", type=parse_sizes, default=[64 << 20], help="64M, 64K,1M or first:last:factor"
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64", "float16"])
    parser.add_argument("--warmup", type=int, default=2, help="iterations that are not counted")
    parser.add_argument("--iters", type=int, default=7, help="iterations that are counted")
    parser.add_argument("--json", type=Path, help="also write the results there")
    return parser.parse_args()


@dataclass
class Row:
    """One size and codec. Bytes and seconds; bandwidths in GB/s of uncompressed bytes; errors relative."""

    size: int
    codec: str
    seconds: float
    algbw: float
    busbw: float
    wire_bytes: int
    ratio: float
    wire_fraction: float | None
    mpi_seconds: float
    speedup: float
    relative_error: float
    identical: bool


def timed(run: Callable[[], None], warmup: int, iters: int) -> list[float]:
    """Seconds of each counted iteration on the slowest rank."""
    times = []
    for i in range(warmup + iters):
        WORLD.Barrier()
        began = time.perf_counter()
        run()
        elapsed = WORLD.allreduce(time.perf_counter() - began, op=MPI.MAX)
        if i >= warmup:
            times.append(elapsed)
    return times


def median(times: list[float]) -> float:
    return statistics.median(times)


def wire_limit(bytes_sent: int) -> float | None:
    """Seconds that a host's link needs for what its ranks send (all alike), inside the lab; None elsewhere.

    A message that fits the token bucket's burst passes unshaped: small ones can seem to beat the limit.
    """
    rate = os.environ.get("HYBRIDCOMP_LAB_RATE", "none")
    found = re.fullmatch(r"([\d.]+)([kmg]?)bit", rate)
    if not found:
        return None
    bits = float(found[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[found[2]]
    return bytes_sent * int(os.environ.get("HYBRIDCOMP_LAB_PPN", "1")) * 8 / bits


def check(got: np.ndarray, want: np.ndarray) -> tuple[float, bool]:
    """Relative L2 error on the worst rank, and whether all ranks hold the same bits."""
    error = float(np.linalg.norm(got.astype(np.float64) - want) / (np.linalg.norm(want) or 1.0))
    first = WORLD.bcast(got.tobytes() if WORLD.rank == 0 else None, root=0)
    same = WORLD.allreduce(first == got.tobytes(), op=MPI.LAND)
    return WORLD.allreduce(error, op=MPI.MAX), same


def wire_bytes(comm: hc.Communicator, calls: int) -> int:
    """Bytes that the busiest rank sent per call."""
    sent = sum(row.wire_bytes for row in comm.stats())
    return WORLD.allreduce(sent, op=MPI.MAX) // max(1, calls)


HEADER = (
    f"{'size':>12} {'codec':>22} {'time':>10} {'algbw':>8} {'busbw':>8} {'wire':>12} {'ratio':>6} "
    f"{'of wire':>8} {'MPI own':>10} {'speedup':>8} {'rel. error':>10} {'same bits':>9}"
)
UNITS = (
    f"{'(B)':>12} {'':>22} {'(ms)':>10} {'(GB/s)':>8} {'(GB/s)':>8} {'(B/rank)':>12} {'':>6} "
    f"{'limit':>8} {'(ms)':>10} {'':>8} {'(L2)':>10} {'':>9}"
)


def show(row: Row) -> None:
    """Print a row on rank 0."""
    fraction = "-" if row.wire_fraction is None else f"{row.wire_fraction:.2f}"
    say(
        f"{row.size:>12} {row.codec:>22} {row.seconds * 1e3:>10.3f} {row.algbw:>8.3f} {row.busbw:>8.3f} "
        f"{row.wire_bytes:>12} {row.ratio:>6.2f} {fraction:>8} {row.mpi_seconds * 1e3:>10.3f} {row.speedup:>8.2f} "
        f"{row.relative_error:>10.2e} {'yes' if row.identical else 'NO':>9}"
    )


def say(text: str) -> None:
    """Print on rank 0."""
    if WORLD.rank == 0:
        print(text, flush=True)


def finish(operation: str, args: argparse.Namespace, rows: list[Row]) -> None:
    """Write the JSON file if one was asked for."""
    if args.json is None or WORLD.rank:
        return
    record = {
        "operation": operation,
        "command": shlex.join(["python", *sys.argv]),
        "ranks": WORLD.size,
        "link": os.environ.get("HYBRIDCOMP_LAB_RATE", "this machine"),
        "hosts": int(os.environ.get("HYBRIDCOMP_LAB_HOSTS", "1")),
        "mpi": MPI.Get_library_version().splitlines()[0].strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "dtype": args.dtype,
        "iterations": args.iters,
        "rows": [asdict(row) for row in rows],
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(record, indent=1) + "\n")

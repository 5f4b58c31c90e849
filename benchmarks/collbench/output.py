"""Rows of results, as a table and as JSON."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, dataclass
from typing import Any

from mpi4py import MPI

HEADER = "\n".join(
    (
        f"{'size':>12} {'codec or peer':>26} {'time':>10} {'algbw':>8} {'busbw':>8} {'wire':>11} {'link':>11} "
        f"{'ratio':>6} {'of wire':>8} {'cores':>6} {'best peer':>15} {'speedup':>8} {'rel. error':>10} "
        f"{'same bits':>9}",
        f"{'(B)':>12} {'':>26} {'(ms)':>10} {'(GB/s)':>8} {'(GB/s)':>8} {'(B/rank)':>11} {'(B/host)':>11} "
        f"{'':>6} {'limit':>8} {'busy':>6} {'(ms)':>15} {'':>8} {'(L2)':>10} {'':>9}",
    )
)


@dataclass(frozen=True)
class PeerRow:
    """Figures of a peer at one size, in bytes and seconds; bandwidths in GB/s of uncompressed bytes.

    Attributes:
        link_bytes: bytes on the busiest host's link in its busier direction, by the kernel's count; 0 if unknown.
        cores: processor time of all ranks over the time. A peer may count as busy while it only waits.
        wire_fraction: the least time in which the link carries those bytes, over the time; None without a shaped link.
    """

    size: int
    peer: str
    seconds: float
    algbw: float
    busbw: float
    link_bytes: int
    cores: float
    wire_fraction: float | None

    def line(self) -> str:
        """Return the row as text."""
        return (
            f"{self.size:>12} {self.peer:>26} {self.seconds * 1e3:>10.3f} {self.algbw:>8.3f} {self.busbw:>8.3f} "
            f"{'':>11} {self.link_bytes or '-':>11} {'':>6} {fraction(self.wire_fraction):>8} "
            f"{self.cores:>6.2f}"
        )


@dataclass(frozen=True)
class Row:
    """Figures of a codec at one size; fields with the name of a peer's mean the same.

    Attributes:
        wire_bytes: bytes that the busiest rank sent, by ``comm.stats()``, to ranks of its own host, too.
        ratio: bytes that the usual algorithm would have sent uncompressed, over the bytes sent, by all ranks.
        relative_error: L2 error of the worst rank, against the result in float64.
        identical: whether all ranks hold the same bits; None where their results differ by nature.
        speedup: the best peer's seconds over ours.
    """

    size: int
    codec: str
    seconds: float
    algbw: float
    busbw: float
    wire_bytes: int
    link_bytes: int
    cores: float
    ratio: float
    wire_fraction: float | None
    best_peer: str
    best_peer_seconds: float
    speedup: float
    relative_error: float
    identical: bool | None

    def line(self) -> str:
        """Return the row as text."""
        same = "-" if self.identical is None else "yes" if self.identical else "NO"
        best = f"{self.best_peer} {self.best_peer_seconds * 1e3:.3f}"
        return (
            f"{self.size:>12} {self.codec:>26} {self.seconds * 1e3:>10.3f} {self.algbw:>8.3f} {self.busbw:>8.3f} "
            f"{self.wire_bytes:>11} {self.link_bytes or '-':>11} {self.ratio:>6.2f} "
            f"{fraction(self.wire_fraction):>8} {self.cores:>6.2f} {best:>15} {self.speedup:>8.2f} "
            f"{self.relative_error:>10.2e} {same:>9}"
        )


def fraction(value: float | None) -> str:
    """Return a share as text."""
    return "-" if value is None else f"{value:.2f}"


def layout() -> tuple[int, int, int]:
    """Return the numbers of ranks, hosts, and ranks of the fullest host: the lab's, or by which ranks share memory."""
    world = MPI.COMM_WORLD
    if "HYBRIDCOMP_LAB_HOSTS" in os.environ:
        return world.size, int(os.environ["HYBRIDCOMP_LAB_HOSTS"]), int(os.environ["HYBRIDCOMP_LAB_PPN"])
    host = world.Split_type(MPI.COMM_TYPE_SHARED)
    sizes = world.allgather((host.rank == 0, host.size))
    host.Free()
    return world.size, sum(first for first, _ in sizes), max(size for _, size in sizes)


def record(operation: str, args: argparse.Namespace, rows: list[Any], theirs: list[Any]) -> dict[str, Any]:
    """Return the content of the JSON file but where it comes from; collective."""
    ranks, hosts, ppn = layout()
    return {
        "operation": operation,
        "ranks": ranks,
        "ranks_per_host": ppn,
        "hosts": hosts,
        "link": os.environ.get("HYBRIDCOMP_LAB_RATE", "this machine" if hosts == 1 else "this network"),
        "mpi": MPI.Get_library_version().splitlines()[0].strip(),
        "dtype": args.dtype,
        "iterations": args.iters,
        "rows": [asdict(row) for row in rows],
        "peers": [asdict(row) for row in theirs],
    }

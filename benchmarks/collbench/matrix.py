"""Cells that benchmarks/run_lab.py measures: operations, links, ranks and sizes, with an estimate of their time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, log2
from pathlib import Path

from hybridcomp.net.rate import Rate

from .figures import size_text

SHARED = "shared"  # the link of ranks that share memory
LINKS = ("200mbit", "1gbit", "none", SHARED)
LAYOUTS = ((2, 1), (3, 1), (4, 1), (4, 2))  # hosts, and ranks on each; all on one host for shared memory
SMALL = tuple(4096 << (2 * i) for i in range(6))  # 4 KiB to 4 MiB, in one run
LARGE = tuple(16 << 20 << (2 * i) for i in range(3))  # 16 to 256 MiB, a run each
OVERLAPPED = {"200mbit": 16 << 20, "1gbit": 64 << 20}  # bytes
REDUCED = (
    "int8",
    "int4",
    "bf16",
    "topk:ratio=0.01",
    "threshold:abs=2.5758",
)  # 2.5758: 1 % of a Gaussian is larger
MOVED = ("int8", "int4", "bf16", "lossless")
CELL_SECONDS = 45.0  # most that the turns of one run may be estimated to take
_WARMUP = 2  # turns that are not counted, since the first ones meet fresh memory and connections
_ROUNDS = (9, 5)  # turns, the warm-up's included: 5 where 9 take too long
_SMALL_ITERS = 15
_BITS = {"int8": 8.25, "int4": 4.25, "bf16": 16.0, "lossless": 27.0}  # bits per value; other codecs take few
_SPEEDS = {"none": 4e9, SHARED: 8e9}  # bits per second of a rank on a few cores, where no rate limits it
_PEERS = 2
_REDUCING = ("allreduce", "reduce_scatter")


def volume(benchmark: str, ranks: int) -> float:
    """Return the uncompressed bytes that leave the busiest rank in the usual algorithm, over the size."""
    if benchmark in ("allreduce", "overlap"):
        return 2 * (ranks - 1) / ranks
    if benchmark == "bcast":
        return ceil(log2(ranks))
    return 1.0 if benchmark == "sendrecv" else (ranks - 1) / ranks


@dataclass(frozen=True)
class Cell:
    """One run of one benchmark.

    Attributes:
        benchmark: name of its file, without the ending.
        link: a rate, or ``SHARED``.
        hosts, ppn: number of hosts, and of ranks on each.
        sizes: sizes in bytes.
        iters: counted iterations; 0 if no number of them fits the time.
    """

    benchmark: str
    link: str
    hosts: int
    ppn: int
    sizes: tuple[int, ...]
    iters: int

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.hosts * self.ppn

    @property
    def name(self) -> str:
        """Name of its result file."""
        place = (
            "sharedmemory" if self.link == SHARED else f"{'unshaped' if self.link == 'none' else self.link}"
        )
        sizes = "-".join(dict.fromkeys(size_text(size) for size in (self.sizes[0], self.sizes[-1])))
        return f"{self.benchmark}_{place}_{self.hosts}x{self.ppn}_{sizes}"

    @property
    def codecs(self) -> tuple[str, ...]:
        """Specs of its codecs."""
        if self.benchmark == "overlap":
            return ("int8", "int4")
        return REDUCED if self.benchmark in _REDUCING else MOVED

    def arguments(self, out: Path) -> list[str]:
        """Return the benchmark's command line, without Python."""
        here = Path(__file__).parent.parent
        return [
            *(str(here / f"{self.benchmark}.py"), "--codec", ";".join(self.codecs), "--size", self._sizes),
            *("--iters", str(self.iters), "--warmup", str(_WARMUP), "--peer", "mpi,gloo", "--json", str(out)),
        ]

    def more(self, out: Path) -> list[str]:
        """Return arguments that have another cell's run, of the same benchmark, measure this cell after its own."""
        return ["--more", f"{self._sizes}@{self.iters}@{out}"]

    @property
    def _sizes(self) -> str:
        return ",".join(size_text(size) for size in self.sizes)


def round_seconds(cell: Cell) -> float:
    """Estimate the seconds in which all codecs and peers have had a turn, at the largest size."""
    bits = _SPEEDS.get(cell.link) or Rate.parse(cell.link).bits_per_second or 0
    sharing = max(1, cell.ranks // 4) if cell.link == SHARED else cell.ppn
    plain = volume(cell.benchmark, cell.ranks) * max(cell.sizes) * 8 * sharing / bits
    share = sum(_BITS.get(codec, 3.0) / 32 for codec in cell.codecs)
    turns = 5 if cell.benchmark == "overlap" else 1  # alone, computation, both
    return turns * plain * (_PEERS + share)


def fitted(cell: Cell) -> Cell:
    """Return the cell with as many iterations as fit ``CELL_SECONDS``, 0 if too few do."""
    for rounds in _ROUNDS:
        if rounds * round_seconds(cell) <= CELL_SECONDS:
            return replace(cell, iters=_SMALL_ITERS if cell.sizes == SMALL else rounds - _WARMUP)
    return replace(cell, iters=0)


def every() -> Iterator[Cell]:
    """Yield all cells, those of one link and layout in a row; ``iters`` is 0 where no iterations fit the time."""
    collectives = ("allreduce", "reduce_scatter", "allgather", "alltoall", "bcast", "sendrecv")
    for link in LINKS:
        for hosts, ppn in LAYOUTS:
            layout = (1, hosts * ppn) if link == SHARED else (hosts, ppn)
            for benchmark in collectives:
                for sizes in (SMALL, *((size,) for size in LARGE)):
                    yield fitted(Cell(benchmark, link, *layout, sizes, 0))
            if link in OVERLAPPED and ppn == 1:
                yield Cell("overlap", link, *layout, (OVERLAPPED[link],), 5)


def is_quick(cell: Cell) -> bool:
    """Tell whether a cell is one of the few that show the most."""
    mib64 = (64 << 20,)
    if cell.benchmark == "allreduce" and cell.ranks == 4:
        return cell.sizes in (SMALL, (16 << 20,) if cell.link == "200mbit" else mib64)
    if cell.benchmark == "overlap":
        return cell.hosts in (2, 4)
    if cell.link != "1gbit":
        return False
    return (cell.benchmark == "allreduce" and cell.ranks == 8 and cell.sizes == mib64) or (
        cell.ranks == 4 and cell.sizes == (16 << 20,)
    )

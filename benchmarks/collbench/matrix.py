"""What benchmarks/run_lab.py measures: operations, links, ranks, sizes, and how long each is reckoned to take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, log2
from pathlib import Path

from hybridcomp.lab.rate import Rate

from .figures import size_text

SHARED = "shared"  # the link of ranks that share memory
LINKS = ("200mbit", "1gbit", "none", SHARED)
LAYOUTS = ((2, 1), (3, 1), (4, 1), (4, 2))  # hosts, and ranks on each; through shared memory as many ranks
SMALL = tuple(4096 << (2 * i) for i in range(6))  # 4 KiB to 4 MiB, in one run
LARGE = tuple(16 << 20 << (2 * i) for i in range(3))  # 16 to 256 MiB, a run each
OVERLAPPED = {"200mbit": 16 << 20, "1gbit": 64 << 20}  # sizes
REDUCED = (
    "int8",
    "int4",
    "bf16",
    "topk:ratio=0.01",
    "threshold:abs=2.5758",
)  # 2.5758: 1 % of a Gaussian is larger
MOVED = ("int8", "int4", "bf16", "lossless")
CELL_SECONDS = 45.0  # that the turns of one run are reckoned to take at most
_WARMUP = 2  # turns that are not counted: the first ones meet fresh memory and connections
_ROUNDS = (9, 5)  # as many turns, with those; fewer where that takes too long
_SMALL_ITERS = 15
_BITS = {"int8": 8.25, "int4": 4.25, "bf16": 16.0, "lossless": 27.0}  # of 32; what is not here: little
_SPEEDS = {"none": 4e9, SHARED: 8e9}  # bits per second and rank where no rate limits them, on a few cores
_PEERS = 2
_REDUCING = ("allreduce", "reduce_scatter")


def volume(benchmark: str, ranks: int) -> float:
    """Bytes that leave the busiest rank uncompressed, over the size: of the usual algorithms."""
    if benchmark in ("allreduce", "overlap"):
        return 2 * (ranks - 1) / ranks
    if benchmark == "bcast":
        return ceil(log2(ranks))
    return 1.0 if benchmark == "sendrecv" else (ranks - 1) / ranks


@dataclass(frozen=True)
class Cell:
    """One run of one benchmark.

    Attributes:
        benchmark: its file, without the ending.
        link: a rate, or ``SHARED``.
        hosts, ppn: hosts, and ranks on each.
        sizes: in bytes.
        iters: counted ones; 0 if no number of them fits the time.
    """

    benchmark: str
    link: str
    hosts: int
    ppn: int
    sizes: tuple[int, ...]
    iters: int

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.hosts * self.ppn

    @property
    def name(self) -> str:
        """Of its result file."""
        place = (
            "sharedmemory" if self.link == SHARED else f"{'unshaped' if self.link == 'none' else self.link}"
        )
        sizes = "-".join(dict.fromkeys(size_text(size) for size in (self.sizes[0], self.sizes[-1])))
        return f"{self.benchmark}_{place}_{self.hosts}x{self.ppn}_{sizes}"

    @property
    def codecs(self) -> tuple[str, ...]:
        """Specs."""
        if self.benchmark == "overlap":
            return ("int8", "int4")
        return REDUCED if self.benchmark in _REDUCING else MOVED

    def arguments(self, out: Path) -> list[str]:
        """The benchmark's command line, after Python."""
        here = Path(__file__).parent.parent
        return [
            *(str(here / f"{self.benchmark}.py"), "--codec", ";".join(self.codecs), "--size", self._sizes),
            *("--iters", str(self.iters), "--warmup", str(_WARMUP), "--peer", "mpi,gloo", "--json", str(out)),
        ]

    def more(self, out: Path) -> list[str]:
        """What to add to another cell's command line, of the same benchmark, for this one to be measured after it."""
        return ["--more", f"{self._sizes}@{self.iters}@{out}"]

    @property
    def _sizes(self) -> str:
        return ",".join(size_text(size) for size in self.sizes)


def round_seconds(cell: Cell) -> float:
    """Seconds in which all codecs and peers are reckoned to have had their turn, at the largest size."""
    bits = _SPEEDS.get(cell.link) or Rate.parse(cell.link).bits_per_second or 0
    sharing = max(1, cell.ranks // 4) if cell.link == SHARED else cell.ppn
    plain = volume(cell.benchmark, cell.ranks) * max(cell.sizes) * 8 * sharing / bits
    share = sum(_BITS.get(codec, 3.0) / 32 for codec in cell.codecs)
    turns = 5 if cell.benchmark == "overlap" else 1  # alone, computation, both
    return turns * plain * (_PEERS + share)


def fitted(cell: Cell) -> Cell:
    """The same with as many iterations as fit ``CELL_SECONDS``, 0 if too few do."""
    for rounds in _ROUNDS:
        if rounds * round_seconds(cell) <= CELL_SECONDS:
            return replace(cell, iters=_SMALL_ITERS if cell.sizes == SMALL else rounds - _WARMUP)
    return replace(cell, iters=0)


def every() -> Iterator[Cell]:
    """The matrix; cells with no iterations are left out of it. Those of one link and layout follow each other."""
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
    """Whether a cell is of the few that show the most."""
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

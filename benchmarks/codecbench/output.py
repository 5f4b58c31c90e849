"""Print what ``benchmarks/codecs.py`` measures, as it comes."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .measure import OPERATIONS

Row = dict[str, Any]

SPEED_HEADER = (
    f"{'codec':40} {'kernels':8} {'bits':>7}  "
    + "".join(f"{name + ' GB/s (x memcpy)':>28}" for name in OPERATIONS)
    + "   NaN"
)


@contextlib.contextmanager
def lines(total: int) -> Iterator[Callable[..., None]]:
    """Print lines as they come: above a progress bar on a terminal that has rich, else plainly."""
    try:
        from rich.console import Console  # noqa: PLC0415  (of the train extra)
        from rich.progress import Progress  # noqa: PLC0415
    except ImportError:
        Console = None  # noqa: N806
    if Console is None or not sys.stdout.isatty():
        yield lambda text, done=0: print(text, flush=True)
        return
    with Progress(console=Console(soft_wrap=True), transient=True) as progress:
        task = progress.add_task("codecs", total=total)

        def say(text: str, done: int = 0) -> None:
            progress.console.print(text, markup=False, highlight=False)
            progress.advance(task, done)

        yield say


def unmeasured(row: Row) -> str | None:
    """Return why a row has no figures; None if it has them."""
    if "failed" in row:
        return f"FAILED: {row['failed']}"
    return row.get("missing")


def speed_lines(row: Row) -> str:
    """Format a line for each instruction set; a peer has one."""
    why = unmeasured(row)
    if why is not None:
        return f"{row['name']:40} {why}"
    bits = next(iter(row["sets"].values()))["bits"]
    lines = []
    for isa, speeds in row.get("by_isa", {"": row}).items():
        cells = "".join(
            f"{speeds[name]['gb_s']:>19.2f} ({speeds[name]['ratio']:>6.3f})" for name in OPERATIONS
        )
        kept = "kept" if row["keeps_nan"] else "LOST"
        lines.append(f"{row['name']:40} {isa:8} {bits:>7.3f}  {cells}   {kept}")
    return "\n".join(lines)


def size_line(row: Row) -> str:
    start = f"{row['name']:32} {row['size']:>9} {row['dtype']:>9}  "
    why = unmeasured(row)
    return start + (why or "".join(f"{row[name]['ratio']:>22.3f}" for name in OPERATIONS))


def print_errors(rows: list[Row], sets: list[str]) -> None:
    print("\n# relative L2 error, bits per value, largest error over the largest magnitude")
    print(f"{'codec':40}" + "".join(f"{name:>28}" for name in sets))
    for row in rows:
        if unmeasured(row) is not None:
            continue
        cells = (row["sets"][name] for name in sets)
        print(
            f"{row['name']:40}"
            + "".join(f"{c['l2']:>10.1e} {c['bits']:>7.3f} {c['peak']:>9.1e}" for c in cells)
        )


def print_asked(judged: list[Row], *, as_asked: bool) -> None:
    """Print which speeds are met; ``as_asked``: whether this run had 64 MiB and one thread."""
    if not judged:
        return
    note = "" if as_asked else " (asked for 64 MiB and one thread: not this run)"
    print(f"\n# speeds asked for{note}")
    for row in judged:
        measured = "not measured" if row["met"] is None else f"{row['measured']:.2f}"
        met = {True: "met", False: "NOT MET", None: "-"}[row["met"]]
        print(
            f"{row['spec']:28} {row['isa']:8} {row['operation']:>10} >= {row['times']:<5g} x {row['than']:16} "
            f"{measured:>14}  {met}"
        )


def busy_cores(seconds: float = 1.0) -> float:
    """Measure how many cores other programs use, for a while: a load average still holds our last run."""

    def ticks() -> tuple[int, int]:
        fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return sum(fields), fields[3] + fields[4]  # all ticks, and those of cores idle or waiting for a disk

    try:
        total, idle = ticks()
        time.sleep(seconds)
        total_then, idle_then = ticks()
    except OSError:  # no Linux
        return os.getloadavg()[0]
    elapsed = max(1, total_then - total)
    return (1 - (idle_then - idle) / elapsed) * (os.cpu_count() or 1)

"""Run ``hybridcomp schedule``: show what each rank does in a collective, prove it right, and draw when."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from hybridcomp import style
from hybridcomp.arrays import DType, as_dtype
from hybridcomp.codecs import Codec, get_codec
from hybridcomp.errors import ConfigError
from hybridcomp.files import writing
from hybridcomp.net.rate import Rate
from hybridcomp.schedules import cuts
from hybridcomp.schedules.draw import HEADINGS, picture, rows, summarize
from hybridcomp.schedules.faults import ScheduleError
from hybridcomp.schedules.layout import REDUCTIONS, WHOLE
from hybridcomp.schedules.registry import ALGORITHMS, Algorithm, build, find
from hybridcomp.schedules.schedule import Operation, Schedule, Slot
from hybridcomp.schedules.simulate import Link, Machine, simulate
from hybridcomp.schedules.topology import Topology
from hybridcomp.schedules.verify import verify

EXAMPLES = """examples:
  hybridcomp schedule all_reduce --ranks 4 --size 1M --codec int8 --algorithm ring
  hybridcomp schedule all_reduce --ranks 8 --ranks-per-host 4 --algorithm hierarchical --rank all
  hybridcomp schedule broadcast --ranks 6 --size 64K --algorithm tree --picture tree.png --rate 200mbit

Nothing is sent: the schedules of all ranks are built and checked in this process. docs/algorithms.md explains the
steps, what is checked, and how time is simulated. The exit code is 1 if a schedule is wrong.
"""
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_DTYPES = ("float32", "float64", "float16", "bfloat16")
_PICTURES = (".png", ".svg")
_FILE_WIDTH = 160
_WRONG = 1


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``hybridcomp schedule``."""
    result = argparse.ArgumentParser(
        prog="hybridcomp schedule",
        description="Print what each rank does in a compressed collective, check it, and draw when it is done.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = result.add_argument
    add("operation", choices=ALGORITHMS, metavar="OPERATION", help=f"one of {', '.join(ALGORITHMS)}")
    add(
        "--algorithm",
        metavar="NAME",
        help="how (default: the first that can; a wrong one lists what there is)",
    )
    add("--ranks", type=int, default=4, help="number of ranks (default 4; send has 2)")
    add(
        "--ranks-per-host",
        type=int,
        default=1,
        metavar="N",
        help="consecutive ranks on each host (default 1)",
    )
    add(
        "--size",
        type=_size,
        default=1 << 20,
        metavar="BYTES",
        help="of all parts: 1M, 64K, 1000 (default 1M)",
    )
    add("--dtype", choices=_DTYPES, default="float32", help="of the elements (default float32)")
    add("--codec", default="int8", metavar="SPEC", help="of the messages (default int8)")
    add("--chunk", type=_size, default=1 << 20, metavar="BYTES", help="of one message, at most (default 1M)")
    add("--root", type=int, default=0, metavar="RANK", help="of operations that have one (default 0)")
    add("--mean", action="store_true", help="divide sums by the number of ranks")
    add("--feedback", action="store_true", help="with a memory of error feedback")
    add("--rank", default="0", metavar="RANK", help="whose steps to print: a rank, or all (default 0)")
    add("--picture", type=Path, metavar="FILE", help="draw the simulated time there (.png, .svg)")
    add("--rate", default="1gbit", help="of each host's link, for the simulation (default 1gbit)")
    add("--latency", type=_seconds, default=50e-6, metavar="TIME", help="of the network (default 50us)")
    return result


def main(argv: list[str]) -> int:
    """Run ``hybridcomp schedule ARGV``; return 0, or 1 if a schedule is wrong.

    Raises:
        ConfigError: wrong arguments, or a picture that cannot be written.
        ModuleNotFoundError: a picture is wanted and matplotlib is missing.
    """
    arguments = parser().parse_args(argv)
    if arguments.picture is not None:
        if arguments.picture.suffix not in _PICTURES:
            raise ConfigError(f"--picture {arguments.picture}: its suffix must be {' or '.join(_PICTURES)}")
        if importlib.util.find_spec("matplotlib") is None:
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
    codec, dtype, rate = get_codec(arguments.codec), as_dtype(arguments.dtype), Rate.parse(arguments.rate)
    algorithm, schedules = _built(arguments, codec, dtype)
    console = style.console(width=None if sys.stdout.isatty() else _FILE_WIDTH)
    for schedule in _wanted(arguments.rank, schedules):
        console.print(f"Rank {schedule.rank}")
        console.print(_table(schedule))

    def message_bytes(slot: Slot, count: int) -> int:
        if slot.sizes:
            return get_codec("none").bound(count, DType.UINT32)
        kind = dtype.accumulator if slot.wide else dtype
        return count * kind.itemsize if slot.plain else codec.bound(count, kind)

    try:
        verify(schedules, algorithm.promise)
    except ScheduleError as error:
        console.print(f"Wrong: {error}", markup=False, soft_wrap=True)
        return _WRONG
    link = (
        Link(arguments.latency, rate.bits_per_second / 8) if rate.bits_per_second else Link(arguments.latency)
    )
    schedules = cuts.even(schedules)
    timeline = simulate(schedules, Machine(link), message_bytes)
    numbers = summarize(schedules, message_bytes)
    title = (
        f"{arguments.operation} by {algorithm.name}, {len(schedules)} ranks, "
        f"{_told(arguments.size)} of {dtype.label} by {codec.spec}"
    )
    for line in (
        title,
        f"  each rank, at most: {numbers.steps} steps, {numbers.messages} messages sent of {_told(numbers.sent)}, "
        f"{_told(numbers.room)} of room for messages",
        f"  longest chain of dependent steps, over all ranks: {numbers.chain}",
        f"  simulated at {rate} and {arguments.latency * 1e6:g} us: {timeline.seconds * 1e3:.3f} ms",
        "  verified: no deadlock, no race, and every result is right on all ranks, in place and not",
    ):
        console.print(line, markup=False, soft_wrap=True)
    if arguments.picture is not None:
        kind = arguments.picture.suffix.removeprefix(".")
        with writing(arguments.picture, what="the picture") as file:
            picture(schedules, timeline, f"{title}; {rate}, {arguments.latency * 1e6:g} us", file, kind)
        console.print(f"  picture: {arguments.picture}", markup=False, soft_wrap=True)
    return 0


def _built(arguments: argparse.Namespace, codec: Codec, dtype: DType) -> tuple[Algorithm, list[Schedule]]:
    """Build the schedules of all ranks."""
    kind = arguments.operation
    ranks = 2 if kind == "send" else arguments.ranks
    if ranks < 1 or arguments.ranks_per_host < 1:
        raise ConfigError(
            f"--ranks {ranks}, --ranks-per-host {arguments.ranks_per_host}: at least 1 is needed"
        )
    topology = Topology.even(ranks, arguments.ranks_per_host)
    n = arguments.size // dtype.itemsize
    counts = (n,) if kind in WHOLE else tuple(n // ranks + (q < n % ranks) for q in range(ranks))
    if kind == "all_to_all":
        counts *= ranks
    plain = codec.name == "none"
    operation = Operation(
        kind,
        counts,
        dtype.itemsize,
        plain=plain,
        exact=codec.lossless and not plain,
        feedback=arguments.feedback,
        mean=arguments.mean and kind in REDUCTIONS,
        root=arguments.root,
        chunk_bytes=arguments.chunk,
    )
    name = arguments.algorithm or next(
        name for name, able in ALGORITHMS[kind].items() if able.refuses(topology) is None
    )
    try:
        algorithm = find(kind, name)
        return algorithm, [build(operation, topology, rank, name) for rank in range(ranks)]
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _wanted(rank: str, schedules: list[Schedule]) -> list[Schedule]:
    if rank == "all":
        return schedules
    if not rank.isdecimal() or int(rank) >= len(schedules):
        raise ConfigError(f"--rank {rank}: write 0 to {len(schedules) - 1}, or all")
    return [schedules[int(rank)]]


def _table(schedule: Schedule) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in HEADINGS:
        numeric = heading in ("step", "elements", "channel")
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    for row in rows(schedule):
        table.add_row(*row)
    return table


def _size(text: str) -> int:
    """Parse the bytes of ``64M``, ``4K``, ``1000``, as the benchmarks write them."""
    found = re.fullmatch(r"(\d+)([KMG]?)(i?B)?", text.strip(), re.IGNORECASE)
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 4096, 64K, 1M or 1G")
    return int(found[1]) * _UNITS[found[2].upper()]


def _seconds(text: str) -> float:
    """Parse the seconds of ``50us``, ``0.5ms``, ``1s``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text.strip().lower())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write 50us, 0.5ms or 1s")
    return float(found[1]) * _SECONDS[found[2]]


def _told(nbytes: int) -> str:
    """Format bytes in the units of :func:`_size`."""
    for unit, factor in (("M", 1 << 20), ("K", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.4g}{unit}"
    return f"{nbytes} bytes"

"""Common parts of the benchmarks of collectives: flags, timing in turn with the peers, checks, output.

As in nccl-tests: ``algbw`` is the size's uncompressed bytes over the time, ``busbw`` is ``algbw`` times the
operation's factor (2(n-1)/n for an all-reduce), so that it can be compared with the link whatever n is. A
compressed operation can exceed the link: both count uncompressed bytes. Codecs and peers take turns, iteration by
iteration; a time is the median of the slowest rank's. Results are checked before a speed is printed.
docs/performance.md says how to read the figures.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import random
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from collbench import output, peers
from collbench.elements import TYPES, Elements
from collbench.figures import Piece, Values, link_seconds, parse_codecs, parse_sizes
from collbench.link import Link, between
from collbench.output import PeerRow, Row
from mpi4py import MPI
from numpy.typing import NDArray
from resultfile import write
from tqdm import tqdm

import hybridcomp as hc
from hybridcomp.launcher import abort
from hybridcomp.schedules.registry import ALGORITHMS, SELECTABLE, find

WORLD = MPI.COMM_WORLD
_GRACE = 30.0  # seconds past the timeout, in which our own operation raises its error
# Short operations vary most and take least time: each gets iterations for _ITERS_BYTES, at most _MOST_ITERS, in turns
# of _CALLS calls up to _SHORT_BYTES.
_ITERS_BYTES = 1 << 24
_MOST_ITERS = 125
_CALLS = 5
_SHORT_BYTES = 1 << 20
_STEPS = 3.0  # largest error of a result over its codec's own, since values are encoded more than once
_LINEAR = 2.0  # largest relative error of a linear codec's result


@dataclass(frozen=True)
class Operation:
    """An operation to measure. Buffers are flat arrays; n counts the elements of the size that is shown.

    Attributes:
        name: name in ``comm.stats()``.
        factor: factor of busbw on p ranks.
        send, recv: elements in each buffer, as functions of n and p.
        pieces: pieces of the receive buffer, as a function of (rank, p, n).
        ours: ``run(comm, send, recv, **how)``.
        mpi: ``run(send, recv)``.
        gloo: ``run(torch.distributed, send, recv)`` on tensors.
        in_place: those of "ours", "mpi" and "gloo" that work on the receive buffer alone, which is filled before each
            call.
        same_bits: whether all ranks' results have the same bits.
        least: least number of ranks.
    """

    name: str
    factor: Callable[[int], float]
    pieces: Callable[[int, int, int], list[Piece]]
    ours: Callable[..., Any]
    mpi: Callable[[NDArray, NDArray], Any]
    gloo: Callable[[Any, Any, Any], Any]
    send: Callable[[int, int], int] = lambda n, p: n
    recv: Callable[[int, int], int] = lambda n, p: n
    in_place: frozenset[str] = frozenset()
    same_bits: bool = False
    least: int = 1


@dataclass
class Side:
    """A codec of ours or a peer that takes turns with the others.

    It has the seconds of the slowest rank, bytes of the busiest host, and processor seconds of all ranks.
    """

    kind: str
    name: str
    run: Callable[[], Any]
    comm: hc.Communicator | None = None
    seconds: list[float] = field(default_factory=list)
    crossed: list[int] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    error: float = 0.0
    same: bool | None = None


class _Parser(argparse.ArgumentParser):
    """Argument parser that prints on rank 0 alone; every rank ends with the same code."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if WORLD.rank == 0:
            super()._print_message(message, file)


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of the flags that every benchmark of collectives takes."""
    result = _Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add("--codec", type=parse_codecs, default="int8", help="int8,int4 or int8:block=64;topk:ratio=0.01")
    add("--size", type=parse_sizes, default="64M", help="64M, 64K,1M or first:last:factor")
    add("--dtype", default="float32", choices=TYPES)
    add("--warmup", type=int, default=2, help="iterations that are not counted (default 2)")
    add("--iters", type=int, default=7, help="iterations that are counted, at least (default 7)")
    add("--peer", default="mpi", help="mpi, gloo or mpi,gloo: measured in turn with ours (default mpi)")
    add("--timeout", type=float, default=300.0, help="seconds that one operation may take (default 300)")
    add("--json", type=Path, help="also write the results there")
    return result


def parse_more(text: str) -> dict[str, Any]:
    """Parse ``--more``: other sizes, iterations and result file."""
    try:
        sizes, iters, path = text.split("@", 2)
        more = {"size": parse_sizes(sizes), "iters": int(iters), "json": Path(path), "plot": None}
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not SIZES@ITERS@JSON, such as 64M@5@large.json"
        ) from None
    if more["iters"] < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: ITERS must be at least 1")
    return more


def parse(flags: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the command line, and refuse what cannot be measured."""
    args = flags.parse_args()
    args.peer = args.peer.split(",")
    for peer in args.peer:
        if peer not in peers.PEERS:
            flags.error(f"--peer {peer!r} is unknown; there are {', '.join(peers.PEERS)}")
        if (why := peers.missing(peer, args.dtype)) is not None:
            flags.error(f"--peer {peer}: {why}")
    if args.iters < 1 or args.warmup < 0 or args.timeout <= 0:
        flags.error("--iters must be at least 1, --warmup at least 0, --timeout above 0")
    return args


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """End the process, and say where it was, if the block takes longer.

    A blocking call of a peer cannot be told when to give up.
    """
    faulthandler.dump_traceback_later(seconds + _GRACE, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def clocked(run: Callable[[], Any]) -> tuple[float, float]:
    """Run once all ranks are there; return the seconds and processor seconds of this rank."""
    WORLD.Barrier()
    began, worked = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - began, time.process_time() - worked


def timed(run: Callable[[], Any], link: Link) -> tuple[float, int, float]:
    """Run, and return the slowest rank's seconds, the busiest link's bytes and all ranks' processor seconds."""
    before = link.now()
    elapsed, busy = clocked(run)
    WORLD.Barrier()  # until then a peer's bytes may still leave this host
    crossed = between(before, link.now())
    both, total = np.array([elapsed, crossed]), np.array([busy])
    WORLD.Allreduce(MPI.IN_PLACE, both, op=MPI.MAX)
    WORLD.Allreduce(MPI.IN_PLACE, total)
    return float(both[0]), int(both[1]), float(total[0])


def take_turns(
    sides: list[Side], args: argparse.Namespace, size: int, before: Callable, after: Callable
) -> None:
    """Run all sides in turn; ``before(side, last)`` and ``after(side)``, on the last round, are not timed.

    Bytes are counted in the rounds that warm up, of which there is one at least, and time in the others, where only a
    barrier is between two calls. Each round has an order of its own, the same on all ranks: a side after a slow
    one finds colder caches. Short operations are called several times in a turn, as other benchmarks do all the time.
    """
    link = Link()
    warmup = max(1, args.warmup)
    calls = _CALLS if size <= _SHORT_BYTES else 1
    rounds = warmup + max(args.iters, min(_MOST_ITERS, _ITERS_BYTES // size) // calls)
    for i in tqdm(range(rounds), disable=None if WORLD.rank == 0 else True, leave=False):
        order = random.Random(i).sample(sides, len(sides))
        with bounded(args.timeout * len(sides)):
            for side in order:
                if i < warmup:
                    before(side, False)
                    side.crossed.append(timed(side.run, link)[1])
                    continue
                last = i == rounds - 1
                for _ in range(calls):
                    before(side, last)
                    seconds, busy = clocked(side.run)
                    side.seconds.append(seconds)
                    side.busy.append(busy)
                if last:
                    WORLD.Barrier()
                    after(side)
    for side in sides:
        slowest, total = np.array(side.seconds), np.array(side.busy)
        WORLD.Allreduce(MPI.IN_PLACE, slowest, op=MPI.MAX)
        WORLD.Allreduce(MPI.IN_PLACE, total)
        side.seconds, side.busy = slowest.tolist(), total.tolist()


def filler(op: Operation, elements: Elements, send: NDArray, recv: NDArray) -> Callable[[Side, bool], None]:
    """Return the function that prepares the receive buffer before each call: see :func:`take_turns`."""

    def before(side: Side, last: bool) -> None:
        if last:
            recv.fill(elements.nan)  # elements that a call does not write are found
        if side.kind in op.in_place:
            recv[:] = send

    return before


class CheckError(RuntimeError):
    """A result is wrong."""


def check(op: Operation, side: Side, recv: NDArray, values: Values, pieces: list[Piece]) -> None:
    """Compare a result with the sum in float64, and with the other ranks' bits.

    Raises:
        CheckError: on all ranks, the error is larger than the codec explains, or bits that should agree differ.
    """
    allowed = values.elements.rounding * WORLD.size
    if side.comm is not None:
        # A linear codec's loss depends on what it knows of the tensor and of earlier calls.
        linear = hc.get_codec(side.name).linear
        allowed += _LINEAR if linear else _STEPS * values.codec_error(side.name)
    with np.errstate(invalid="ignore"):
        mine = values.error(recv, pieces)
    worst = WORLD.allreduce(float("inf") if np.isnan(mine) else mine, op=MPI.MAX)  # MAX would lose a NaN
    side.error = worst
    if not worst <= allowed:
        raise CheckError(
            f"{op.name}, {side.name}: relative error {worst:.3g}, at most {allowed:.3g} expected"
        )
    if op.same_bits:
        prints = WORLD.allgather(hashlib.blake2b(recv, digest_size=16).digest())
        side.same = len(set(prints)) == 1
        if not side.same and side.comm is not None:
            raise CheckError(f"{op.name}, {side.name}: the ranks ended with different bits")


def measure(
    op: Operation, size: int, values: Values, args: argparse.Namespace
) -> tuple[list[Row], list[PeerRow]]:
    """Measure all codecs and peers at one size, which is rounded to a multiple of the ranks' elements."""
    elements, p = values.elements, WORLD.size
    n = max(1, size // elements.storage.itemsize // p) * p
    send = values.of(WORLD.rank, op.send(n, p))
    recv = np.empty(op.recv(n, p), elements.storage)
    x, y = elements.handed(send), elements.handed(recv)
    pieces = op.pieces(WORLD.rank, p, n)
    how = {} if args.algorithm is None else {"algorithm": args.algorithm}
    sides = []
    for spec in args.codec:
        comm = hc.Communicator(WORLD, "none", "dp", timeout=args.timeout)
        sides.append(
            Side("ours", spec, lambda comm=comm, spec=spec: op.ours(comm, x, y, codec=spec, **how), comm)
        )
    for peer in args.peer:
        if peer == "mpi":
            sides.append(Side(peer, peer, lambda: op.mpi(send, recv)))
        else:
            dist, s, r = peers.gloo(args.timeout), elements.tensor(send), elements.tensor(recv)
            sides.append(Side(peer, peer, lambda dist=dist, s=s, r=r: op.gloo(dist, s, r)))

    before = filler(op, elements, send, recv)
    take_turns(sides, args, size, before, lambda side: check(op, side, recv, values, pieces))
    for side in sides:
        if side.comm is not None:
            side.comm.Free()
    theirs = [_peer_row(op, size, side) for side in sides if side.comm is None]
    best = min(theirs, key=lambda row: row.seconds)
    return [_row(op, size, side, best) for side in sides if side.comm is not None], theirs


def _bandwidths(op: Operation, nbytes: int, side: Side) -> dict[str, Any]:
    seconds = statistics.median(side.seconds)
    crossed = round(statistics.median(side.crossed))
    limit = link_seconds(crossed, Link().rate)
    algbw = nbytes / seconds / 1e9
    return {
        "size": nbytes,
        "seconds": seconds,
        "algbw": algbw,
        "busbw": algbw * op.factor(WORLD.size),
        "link_bytes": crossed,
        "cores": statistics.median(side.busy) / seconds,
        "wire_fraction": None if limit is None else limit / seconds,
    }


def _peer_row(op: Operation, nbytes: int, side: Side) -> PeerRow:
    return PeerRow(peer=side.name, **_bandwidths(op, nbytes, side))


def _row(op: Operation, nbytes: int, side: Side, best: PeerRow) -> Row:
    assert side.comm is not None
    rows = side.comm.stats()
    calls = max(1, *(row.calls for row in rows))
    plain, wire = (sum(getattr(row, key) for row in rows) for key in ("plain_bytes", "wire_bytes"))
    all_plain, all_wire = WORLD.allreduce(plain), WORLD.allreduce(wire)
    figures = _bandwidths(op, nbytes, side)
    return Row(
        **figures,
        codec=side.name,
        wire_bytes=WORLD.allreduce(wire, op=MPI.MAX) // calls,
        ratio=all_plain / all_wire if all_wire else 1.0,
        relative_error=side.error,
        identical=side.same,
        best_peer=best.peer,
        best_peer_seconds=best.seconds,
        speedup=best.seconds / figures["seconds"],
    )


def run(work: Callable[[], None]) -> None:
    """Run a benchmark; an error of one rank ends all of them."""
    try:
        work()
        peers.close()
    except Exception:
        traceback.print_exc()
        abort(WORLD, 1)


def _algorithm(op: str, name: str) -> str:
    try:
        return find(op, name).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main(op: Operation, description: str) -> None:
    """Run a benchmark's main program."""
    flags = parser(description)
    if op.name in SELECTABLE:
        flags.add_argument(
            "--algorithm",
            type=partial(_algorithm, op.name),
            metavar="NAME",
            help=f"of {', '.join(ALGORITHMS[op.name])}, or of a package's (default: the library's choice)",
        )
    flags.add_argument("--plot", type=Path, help="also draw busbw over size there (.png)")
    flags.add_argument(
        "--more",
        type=parse_more,
        action="append",
        default=[],
        metavar="SIZES@ITERS@JSON",
        help="measure other sizes, too, with results of their own; may be repeated",
    )
    flags.set_defaults(algorithm=None)
    args = parse(flags)
    if WORLD.size < op.least:
        flags.error(f"{op.name} needs at least {op.least} ranks: start it under mpiexec")
    run(lambda: _measure_all(op, args))


def _measure_all(op: Operation, args: argparse.Namespace) -> None:
    say(f"# {op.name}, {args.dtype}, {WORLD.size} ranks, {MPI.Get_library_version().splitlines()[0]}")
    say(output.HEADER)
    values = Values(Elements(args.dtype))
    for more in ({}, *args.more):
        _measure_sizes(op, argparse.Namespace(**(vars(args) | more)), values)


def _measure_sizes(op: Operation, args: argparse.Namespace, values: Values) -> None:
    rows, theirs = [], []
    for size in args.size:
        ours, others = measure(op, size, values, args)
        for row in [*ours, *others]:
            say(row.line())
        rows += ours
        theirs += others
    record = output.record(op.name, args, rows, theirs)
    if WORLD.rank == 0 and args.json is not None:
        write(args.json, record)
    if WORLD.rank == 0 and args.plot is not None:
        from collbench import plots  # noqa: PLC0415  (takes a second to load)

        plots.busbw(record, args.plot)


def say(text: str) -> None:
    """Print on rank 0."""
    if WORLD.rank == 0:
        print(text, flush=True)

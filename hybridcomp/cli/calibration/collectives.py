"""Time collectives for a profile, and fit it to them: the part of ``doctor --calibrate`` on whole operations.

Each fit is judged by sizes that it was not given.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mpi4py import MPI
from rich.progress import track

from hybridcomp import style
from hybridcomp.cli.calibration.machine import Effort
from hybridcomp.cli.calibration.ranks import agreed
from hybridcomp.cli.calibration.timing import communicator, prepared, repeat
from hybridcomp.codecs import get_codec
from hybridcomp.collectives import Communicator
from hybridcomp.perfmodel import Curve, MpiCurves, Profile, Setting, fitting
from hybridcomp.perfmodel.curves import OPERATIONS, bus_factor, fit_curve
from hybridcomp.perfmodel.fitting import CHUNK, Timing
from hybridcomp.perfmodel.mpi import MPI as MPI_OWN
from hybridcomp.schedules.registry import ALGORITHMS, SELECTABLE, find
from hybridcomp.schedules.topology import Topology

# Operation, algorithm, codec; a quick calibration has the first few.
_CASES = (
    ("all_reduce", "direct", "int8"),
    ("all_reduce", "direct", "none"),
    ("all_gather", "direct", "int8"),
    ("reduce_scatter", "direct", "int8"),
    ("send", "direct", "int8"),
    ("send", "direct", "none"),
    ("all_reduce", "one_shot", "bf16"),
    ("all_reduce", "ring", "int8"),
    ("all_reduce", "hierarchical", "int4"),
    ("all_to_all", "direct", "int4"),
    ("broadcast", "tree", "int8"),
    ("reduce", "direct", "int8"),
)
_QUICK_CASES = 5
_FITTED = (10, 14, 18, 22)  # logarithms to the base 2 of the bytes
_HELD_OUT = (11, 15, 19)  # logarithms of a third of the bytes, so that these sizes lie between those
_OWN = range(6, 25)
_OWN_HELD_OUT = range(5, 23, 2)
_NEAR = 8  # a time below the longest over this is no sign that the next size takes too long
_OF_OWN = 2  # each size of MPI's own operations gets a cell's seconds over this: there are more sizes
_FIRST = {op: next(iter(ALGORITHMS[op])) for op in SELECTABLE}


@dataclass(frozen=True)
class Series:
    """Seconds of an operation by its bytes.

    Attributes:
        fitted, held_out: seconds to fit, and seconds to judge the fit by.
    """

    fitted: dict[int, float]
    held_out: dict[int, float]


@dataclass(frozen=True)
class Measured:
    """Times of collectives.

    Attributes:
        fitted, held_out: timings of hybridcomp's algorithms.
        own: series of MPI's own operations, by operation.
        hosts: hosts of the ranks.
    """

    fitted: Sequence[Timing]
    held_out: Sequence[Timing]
    own: dict[str, Series]
    hosts: Topology


def measure(comm: MPI.Comm, hosts: Topology, effort: Effort) -> tuple[Measured | None, list[str]]:
    """Time collectives of several sizes, hybridcomp's and MPI's own. Collective; all ranks get the same.

    Args:
        comm: communicator that nobody else uses.
        hosts: hosts of its ranks.
        effort: seconds, and the largest size.

    Returns:
        The times, and the reasons where there are none.

    Raises:
        CollectiveTimeoutError: a rank no longer answers.
    """
    if comm.size == 1:
        return None, ["there is nobody to send to: no collective was timed, and no cost of one fitted"]
    if not agreed(comm, comm.rank != 0 or importlib.util.find_spec("scipy") is not None):
        return None, ["SciPy is missing: no cost of collectives was fitted (the extra plan has it)"]
    cases = [case for case in _CASES if case[0] == "send" or find(*case[:2]).refuses(hosts) is None]
    if not effort.finely:
        cases = cases[:_QUICK_CASES]
    timer = _Timer(comm, effort)
    fitted: list[Timing] = []
    held_out: list[Timing] = []
    own: dict[str, Series] = {}
    console = style.console(sys.stderr)
    both = [*cases, *((op, MPI_OWN, "none") for op in OPERATIONS)]
    shown = track(both, "collectives", console=console, disable=comm.rank != 0 or not console.is_terminal)
    for op, algorithm, codec in shown:
        if algorithm == MPI_OWN:
            own[op] = timer.own(op)
            continue
        series = timer.ours(op, algorithm, codec)
        for timings, seconds in ((fitted, series.fitted), (held_out, series.held_out)):
            timings += [
                Timing(_setting(op, nbytes, codec, hosts), algorithm, taken)
                for nbytes, taken in seconds.items()
            ]
    timer.free()
    return Measured(fitted, held_out, own, hosts), []


def refine(profile: Profile, measured: Measured, effort: Effort) -> tuple[Profile, dict[str, str], list[str]]:
    """Fit a profile to the times of collectives.

    Args:
        profile: links, memory and codecs as measured alone.
        measured: the times.
        effort: seconds of fitting, at most.

    Returns:
        The profile; errors of predictions at sizes that no fit was given, in words; and notes on what was not fitted.
    """
    if not measured.fitted or not measured.held_out:
        return profile, {}, ["collectives take too long here for costs of them to be fitted"]
    notes = []
    ranks = len(measured.hosts.hosts)
    cores = max(1, round(profile.cores * ranks)) if profile.cores < 1 else None
    found = fitting.fit(profile, measured.fitted, cores, effort.fit)
    refined = fitting.adjusted(profile, found)
    taken = [timing.seconds for timing in measured.held_out]
    before, after = (
        fitting.errors(fitting.predict(each, measured.held_out, cores), taken) for each in (profile, refined)
    )
    rows = {
        "sizes": f"fitted to {len(measured.fitted)} cells, judged by {len(taken)} of other sizes",
        "before the fit": _told(before),
        "fitted": _told(after),
    }
    if after["geometric mean"] >= before["geometric mean"]:
        refined = profile
        notes.append("the fit predicts no better than what was measured alone, which stays")
    curves: dict[str, Curve] = {}
    for op, series in measured.own.items():
        factor = bus_factor(op, ranks)
        try:
            curve = fit_curve(list(series.fitted), list(series.fitted.values()), factor)
        except ValueError as error:
            notes.append(f"no curve of MPI's own {op}: {error}")
            continue
        curves[op] = curve
        if not series.held_out:
            continue
        predicted = [curve.seconds(nbytes, factor) for nbytes in series.held_out]
        rows[f"MPI's {op}"] = _told(fitting.errors(predicted, list(series.held_out.values())))
    own = MpiCurves(measured.hosts.count, ranks, curves) if curves else None
    return dataclasses.replace(refined, mpi=own), rows, notes


class _Timer:
    """Timer of operations at several sizes, on communicators that it makes."""

    def __init__(self, world: MPI.Comm, effort: Effort) -> None:
        self._world = world
        self._effort = effort
        self._made: dict[str, Communicator] = {}

    def ours(self, op: str, algorithm: str, codec: str) -> Series:
        """Time an algorithm; collective."""
        forced = _FIRST | ({op: algorithm} if op in _FIRST else {})
        return self._series(forced, op, codec, _sizes(_FITTED, _HELD_OUT), self._effort.cell)

    def own(self, op: str) -> Series:
        """Time MPI's own operation; collective."""
        step = 1 if self._effort.finely else 2
        sizes = _sizes(_OWN[::step], _OWN_HELD_OUT[::step])
        # The compiled engine would run a sum.
        return self._series(_FIRST, op, "none", sizes, self._effort.cell / _OF_OWN, MPI.MAX)

    def free(self) -> None:
        """Release the communicators; collective."""
        for comm in self._made.values():
            comm.Free()

    def _series(
        self,
        forced: dict[str, str],
        op: str,
        codec: str,
        sizes: Sequence[tuple[int, bool]],
        seconds: float,
        reduction: MPI.Op = MPI.SUM,
    ) -> Series:
        """Time an operation by ascending size, up to one that takes too long."""
        key = str(forced)
        if key not in self._made:
            self._made[key] = communicator(self._world, CHUNK, forced)
        comm = self._made[key]
        series = Series({}, {})
        taken, slowness = 0.0, 0.0  # seconds, and seconds of a byte
        longest = self._effort.longest
        for nbytes, is_held_out in sizes:
            if nbytes > self._effort.largest or (taken > longest / _NEAR and slowness * nbytes > longest):
                break
            operation = prepared(comm, op, nbytes, codec, reduction)
            operation.call()
            taken = statistics.median(repeat(self._world, comm, operation.call, seconds).seconds)
            slowness = taken / operation.nbytes
            (series.held_out if is_held_out else series.fitted)[operation.nbytes] = taken
        return series


def _sizes(fitted: Iterable[int], held_out: Iterable[int]) -> list[tuple[int, bool]]:
    """Return sizes in bytes, ascending, each with whether it is held out."""
    return sorted([(1 << power, False) for power in fitted] + [(3 << power, True) for power in held_out])


def _setting(op: str, nbytes: int, codec: str, hosts: Topology) -> Setting:
    """Return the setting of a timed operation: a send has two ranks, in it and in its schedule."""
    ranks, count, largest = len(hosts.hosts), hosts.count, hosts.largest
    if op == "send":
        far = hosts.hosts[0] != hosts.hosts[ranks // 2]
        ranks, count, largest = 2, 1 + far, 2 - far
    return Setting(op, nbytes, 4, get_codec(codec), ranks, count, largest, compiled=True)


def _told(errors: dict[str, float]) -> str:
    """Return relative errors as text."""
    mean, most = (100 * errors[key] for key in ("geometric mean", "95th percentile"))
    return f"{mean:.1f} % (geometric mean), 95th percentile {most:.0f} %, of {errors['cells']} sizes"

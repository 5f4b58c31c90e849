"""List the algorithms of each operation, with their capabilities and promises; build schedules by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from hybridcomp.schedules.algorithms import (
    direct,
    doubling,
    halving,
    hierarchical,
    oktopk,
    one_shot,
    ring,
    scatter,
    sparse,
    tree,
)
from hybridcomp.schedules.layout import REDUCTIONS, WHOLE
from hybridcomp.schedules.proofs.values import Promise, any_order, host_order, owner_first, rank_order
from hybridcomp.schedules.schedule import Operation, Schedule
from hybridcomp.schedules.topology import Topology

Build = Callable[[Operation, Topology, int], Schedule]

_KEPT = 1024  # schedules that are kept
_MOST_TIMES = 64  # most encodings of a part: one for each bit of the number of ranks


_DIRECT = Promise(owner_first)
_TREE = Promise(any_order, parts=_MOST_TIMES)
_HOSTS = Promise(host_order)
_GATHERED = Promise(rank_order, sums=0)
_BALANCED = Promise(rank_order)
_TWICE = Promise(host_order, parts=2)

# Forms of error feedback whose messages are differences from the receivers' state, and forms that sum up gradients.
_ESTIMATES = ("ef21",)
_VELOCITIES = ("dgc", "ef-sgdm")


@dataclass(frozen=True, slots=True)
class Algorithm:
    """Algorithm of an operation.

    Attributes:
        name: name in calls and in the cost model.
        build: function that builds a rank's schedule.
        promise: promise that :func:`~hybridcomp.schedules.verify.verify` checks.
        reencodes: whether it encodes sums of sums, so that a lossy codec loses more; then it must be asked for.
        feedback: whether it takes error-feedback memory.
        without: forms of error feedback that it does not take.
        sparse: whether it is for sparse codecs alone.
        refuses: function that says why these ranks cannot use it; returns None if they can.
    """

    name: str
    build: Build
    promise: Promise = _DIRECT
    reencodes: bool = False
    feedback: bool = False
    without: tuple[str, ...] = ()
    sparse: bool = False
    refuses: Callable[[Topology], str | None] = lambda topology: None


def _only_two(topology: Topology) -> str | None:
    ranks = len(topology.hosts)
    return None if ranks == 2 else f"there are {ranks} ranks, not 2"


def _two_level(build: Build) -> Algorithm:
    without = _ESTIMATES + _VELOCITIES  # leaders would apply these forms a second time, after each rank's own
    return Algorithm(
        "two_level",
        build,
        _TWICE,
        reencodes=True,
        feedback=True,
        without=without,
        refuses=hierarchical.refuses,
    )


def _named(*algorithms: Algorithm) -> dict[str, Algorithm]:
    return {algorithm.name: algorithm for algorithm in algorithms}


#: Algorithms by operation and name, the default first.
ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "all_reduce": _named(
        Algorithm("direct", direct.all_reduce, feedback=True),
        Algorithm("one_shot", one_shot.all_reduce, _GATHERED, feedback=True, without=_ESTIMATES),
        Algorithm(
            "hierarchical", hierarchical.all_reduce, _HOSTS, feedback=True, refuses=hierarchical.refuses
        ),
        Algorithm("ring", ring.all_reduce, feedback=True),
        _two_level(hierarchical.all_reduce_twice),
        Algorithm("halving", halving.all_reduce, _TREE, reencodes=True),
        Algorithm("sparse", sparse.all_reduce, _GATHERED, feedback=True, without=_ESTIMATES, sparse=True),
        Algorithm("oktopk", oktopk.all_reduce, _BALANCED, feedback=True, without=_ESTIMATES, sparse=True),
    ),
    "reduce_scatter": _named(
        Algorithm("direct", direct.reduce_scatter, feedback=True),
        Algorithm(
            "hierarchical", hierarchical.reduce_scatter, _HOSTS, feedback=True, refuses=hierarchical.refuses
        ),
        Algorithm("ring", ring.reduce_scatter, feedback=True),
        _two_level(hierarchical.reduce_scatter_twice),
        Algorithm("halving", halving.reduce_scatter, _TREE, reencodes=True),
    ),
    "all_gather": _named(
        Algorithm("direct", direct.all_gather),
        Algorithm("hierarchical", hierarchical.all_gather, refuses=hierarchical.refuses),
        Algorithm("ring", ring.all_gather),
        Algorithm("doubling", doubling.all_gather),
    ),
    "broadcast": _named(
        Algorithm("tree", tree.broadcast),
        Algorithm("direct", direct.broadcast),
        Algorithm("scatter", scatter.broadcast),
    ),
    "reduce": _named(
        Algorithm("direct", direct.reduce),
        Algorithm("tree", tree.reduce, _TREE, reencodes=True),
    ),
    "all_to_all": _named(Algorithm("direct", direct.all_to_all)),
    "gather": _named(Algorithm("direct", direct.gather)),
    "scatter": _named(Algorithm("direct", direct.scatter)),
    "send": _named(Algorithm("direct", direct.send, refuses=_only_two)),
}


def find(kind: str, name: str) -> Algorithm:
    """Return an algorithm of an operation.

    Raises:
        ValueError: there is no such operation, or none of that name.
    """
    if kind not in ALGORITHMS:
        raise ValueError(f"there is no operation {kind!r}; allowed: {', '.join(ALGORITHMS)}")
    if name not in ALGORITHMS[kind]:
        raise ValueError(f"{kind} has no algorithm {name!r}; allowed: {', '.join(ALGORITHMS[kind])}")
    return ALGORITHMS[kind][name]


@lru_cache(_KEPT)
def build(operation: Operation, topology: Topology, rank: int, algorithm: str) -> Schedule:
    """Build the schedule of a rank, or return it if it was built before.

    Raises:
        ValueError: the algorithm cannot do the operation; says why, and what is allowed.
    """
    found, ranks = find(operation.kind, algorithm), len(topology.hosts)
    wanted = 1 if operation.kind in WHOLE else ranks * ranks if operation.kind == "all_to_all" else ranks
    problem = found.refuses(topology)
    if len(operation.counts) != wanted or min(operation.counts) < 0:
        problem = f"it takes {wanted} counts of 0 or more, not {operation.counts}"
    elif not 0 <= rank < ranks:
        problem = f"ranks are 0 to {ranks - 1}, not {rank}"
    elif not 0 <= operation.root < ranks:
        problem = f"roots are 0 to {ranks - 1}, not {operation.root}"
    elif operation.itemsize < 1 or operation.chunk_bytes < 1:
        problem = f"elements and chunks have bytes, not {operation.itemsize} and {operation.chunk_bytes}"
    elif operation.feedback and not found.feedback:
        able = [name for name, other in ALGORITHMS[operation.kind].items() if other.feedback]
        problem = f"it takes no error feedback; allowed: {', '.join(able) or 'none'}"
    elif operation.mean and operation.kind not in REDUCTIONS:
        problem = f"only {', '.join(REDUCTIONS)} may divide by the number of ranks"
    elif operation.feedback and (operation.plain or operation.exact):
        problem = "error feedback is for lossy codecs"
    if problem is not None:
        raise ValueError(f"{operation.kind} by {algorithm!r}: {problem}")
    return found.build(operation, topology, rank)

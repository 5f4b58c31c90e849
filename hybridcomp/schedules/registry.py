"""List the algorithms of each operation, with their capabilities, promises and costs; build schedules by them.

Other packages add theirs by :func:`register_algorithm`, or by an entry point of ``hybridcomp.algorithms``: a mapping
from operations to :class:`Algorithm`, under the algorithms' name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from hybridcomp.entry_points import EntryPoints, Offer, check_name, is_name
from hybridcomp.schedules import formulas
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
Formula = Callable[[Any], float]
ENTRY_POINTS = EntryPoints("hybridcomp.algorithms")

_KEPT = 1024  # schedules that are kept
_MOST_TIMES = 64  # most encodings of a part: one for each bit of the number of ranks


def _scattered(topology: Topology) -> tuple[int, int]:
    """Count one message of every rank but the owner of the sum, which is not encoded."""
    return len(topology.hosts) - 1, 0


def _gathered(topology: Topology) -> tuple[int, int]:
    """Count one message of every rank."""
    return len(topology.hosts), 0


def _hosts(topology: Topology) -> tuple[int, int]:
    """Count one message of every host but that of the owner of the sum, and the sum's own."""
    return topology.count - 1, 1


def _hosts_scattered(topology: Topology) -> tuple[int, int]:
    """Count one message of every host but that of the owner of the sum, which is not encoded."""
    return topology.count - 1, 0


def _halved(topology: Topology) -> tuple[int, int]:
    """Count one message of every rank but the owner of the sum; a rank that has folded gets the sum encoded."""
    ranks = len(topology.hosts)
    return ranks - 1, int(ranks & (ranks - 1) != 0)


def _balanced(topology: Topology) -> tuple[int, int]:
    """Count one message of every rank, and the sum's own."""
    return len(topology.hosts), 1


_DIRECT = Promise(owner_first)
_SCATTERED = Promise(owner_first, sums=0, losses=_scattered)
_TREE = Promise(any_order, parts=_MOST_TIMES)
_TREE_SCATTERED = Promise(any_order, parts=_MOST_TIMES, losses=_halved)
_TREE_ROOTED = Promise(any_order, parts=_MOST_TIMES, sums=0, losses=_scattered)
_HOSTS = Promise(host_order, losses=_hosts)
_HOSTS_SCATTERED = Promise(host_order, sums=0, losses=_hosts_scattered)
_GATHERED = Promise(rank_order, sums=0, losses=_gathered)
_BALANCED = Promise(rank_order, losses=_balanced)
_TWICE = Promise(host_order, parts=2)
_TWICE_SCATTERED = Promise(host_order, parts=2, sums=0, losses=_scattered)

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
        formula: function that returns the seconds it takes in a :class:`~.formulas.Case`, by which it is chosen; None:
            it is taken only where a call, a policy or ``HYBRIDCOMP_ALGORITHM`` names it.
    """

    name: str
    build: Build
    promise: Promise = _DIRECT
    reencodes: bool = False
    feedback: bool = False
    without: tuple[str, ...] = ()
    sparse: bool = False
    refuses: Callable[[Topology], str | None] = lambda topology: None
    formula: Formula | None = None


def _only_two(topology: Topology) -> str | None:
    ranks = len(topology.hosts)
    return None if ranks == 2 else f"there are {ranks} ranks, not 2"


def _two_level(build: Build, promise: Promise, formula: Callable[..., float]) -> Algorithm:
    without = _ESTIMATES + _VELOCITIES  # leaders would apply these forms a second time, after each rank's own
    return Algorithm(
        "two_level",
        build,
        promise,
        reencodes=True,
        feedback=True,
        without=without,
        refuses=hierarchical.refuses,
        formula=partial(formula, twice=True),
    )


def _named(*algorithms: Algorithm) -> dict[str, Algorithm]:
    return {algorithm.name: algorithm for algorithm in algorithms}


#: Algorithms by operation and name, the default first.
ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "all_reduce": _named(
        Algorithm("direct", direct.all_reduce, feedback=True, formula=formulas.allreduce_direct),
        Algorithm(
            "one_shot",
            one_shot.all_reduce,
            _GATHERED,
            feedback=True,
            without=_ESTIMATES,
            formula=formulas.allreduce_one_shot,
        ),
        Algorithm(
            "hierarchical",
            hierarchical.all_reduce,
            _HOSTS,
            feedback=True,
            refuses=hierarchical.refuses,
            formula=formulas.allreduce_hierarchical,
        ),
        Algorithm("ring", ring.all_reduce, feedback=True, formula=formulas.allreduce_ring),
        _two_level(hierarchical.all_reduce_twice, _TWICE, formulas.allreduce_hierarchical),
        Algorithm("halving", halving.all_reduce, _TREE, reencodes=True, formula=formulas.allreduce_halving),
        Algorithm(
            "sparse",
            sparse.all_reduce,
            _GATHERED,
            feedback=True,
            without=_ESTIMATES,
            sparse=True,
            formula=formulas.allreduce_sparse,
        ),
        Algorithm(
            "oktopk",
            oktopk.all_reduce,
            _BALANCED,
            feedback=True,
            without=_ESTIMATES,
            sparse=True,
            formula=formulas.allreduce_oktopk,
        ),
    ),
    "reduce_scatter": _named(
        Algorithm(
            "direct", direct.reduce_scatter, _SCATTERED, feedback=True, formula=formulas.scatter_direct
        ),
        Algorithm(
            "hierarchical",
            hierarchical.reduce_scatter,
            _HOSTS_SCATTERED,
            feedback=True,
            refuses=hierarchical.refuses,
            formula=formulas.scatter_hierarchical,
        ),
        Algorithm("ring", ring.reduce_scatter, _SCATTERED, feedback=True, formula=formulas.scatter_ring),
        _two_level(hierarchical.reduce_scatter_twice, _TWICE_SCATTERED, formulas.scatter_hierarchical),
        Algorithm(
            "halving",
            halving.reduce_scatter,
            _TREE_SCATTERED,
            reencodes=True,
            formula=formulas.scatter_halving,
        ),
    ),
    "all_gather": _named(
        Algorithm("direct", direct.all_gather, formula=formulas.gather_direct),
        Algorithm(
            "hierarchical",
            hierarchical.all_gather,
            refuses=hierarchical.refuses,
            formula=formulas.gather_hierarchical,
        ),
        Algorithm("ring", ring.all_gather, formula=formulas.gather_ring),
        Algorithm("doubling", doubling.all_gather, formula=formulas.gather_doubling),
    ),
    "broadcast": _named(
        Algorithm("tree", tree.broadcast, formula=formulas.broadcast_tree),
        Algorithm("direct", direct.broadcast, formula=formulas.broadcast_direct),
        Algorithm("scatter", scatter.broadcast, formula=formulas.broadcast_scatter),
    ),
    "reduce": _named(
        Algorithm("direct", direct.reduce, _SCATTERED, formula=formulas.reduce_direct),
        Algorithm("tree", tree.reduce, _TREE_ROOTED, reencodes=True, formula=formulas.reduce_tree),
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
    found = lookup(kind, name)
    if found is None:
        known = [
            *ALGORITHMS[kind],
            *(other for other in ENTRY_POINTS.names() if other not in ALGORITHMS[kind]),
        ]
        said = [
            f"{kind} has no algorithm {name!r}",
            f"{missing(name)}allowed: {', '.join(known)}",
            *ENTRY_POINTS.faults(),
        ]
        raise ValueError("; ".join(said))
    return found


def lookup(kind: str, name: str) -> Algorithm | None:
    """Return an algorithm of an operation, which an installed package may offer; None if there is none.

    Raises:
        ConfigError: a package offers it that cannot give it, or two do; names them.
    """
    found = ALGORITHMS[kind].get(name)
    if found is None and kind in SELECTABLE:
        offer = ENTRY_POINTS.find(name)
        if offer is not None:
            _take(offer)
            found = ALGORITHMS[kind].get(name)
    return found


def missing(name: str) -> str:
    """Say, for an error's text, of which package an algorithm of an unknown name would be, where that may be."""
    package, dot, _ = name.partition(".")
    if not dot or not is_name(name):
        return ""
    return f"it would be of a package {package!r}, which is not installed here or has none; "


def _take(offer: Offer) -> None:
    """Register the algorithms that a package offers under a name.

    Raises:
        ConfigError: they are none, or cannot be registered; names the package.
    """
    given: Any = offer.load()
    if not isinstance(given, Mapping) or not given:
        raise offer.fault(f"{offer.point.value!r} is no mapping from operations to algorithms")
    for operation, algorithm in given.items():
        try:
            if isinstance(algorithm, Algorithm) and algorithm.name != offer.name:
                raise ValueError(f"it has the name {str(algorithm.name)[:64]!r}")
            register_algorithm(operation, algorithm)
        except (ValueError, TypeError) as error:
            raise offer.fault(f"for {str(operation)[:64]!r}: {error}") from error


def register_algorithm(operation: str, algorithm: Algorithm) -> None:
    """Add an algorithm of another package to those of an operation.

    It is taken where a call, a policy or ``HYBRIDCOMP_ALGORITHM`` names it; one that has a formula by communicators
    that are made from then on, wherever its formula is the fastest. Every rank must register the same. One that was
    defined anew by the same module takes the earlier one's place.

    Args:
        operation: one of :data:`SELECTABLE`.
        algorithm: algorithm, whose schedules :func:`hybridcomp.testing.check_algorithm` proves right.

    Raises:
        TypeError: it is no :class:`Algorithm`.
        ValueError: there is no such operation, the name is none, or taken; names both packages.
    """
    if operation not in SELECTABLE:
        allowed = ", ".join(SELECTABLE)
        raise ValueError(f"algorithms can be added to {allowed}, not to {str(operation)[:64]!r}")
    if not isinstance(algorithm, Algorithm):
        raise TypeError(
            f"an algorithm is a hybridcomp.schedules.registry.Algorithm, not {type(algorithm).__name__}"
        )
    name = check_name("an algorithm", algorithm.name)
    with _lock:
        taken = ALGORITHMS[operation].get(name)
        if taken is not None and _module(taken) != _module(algorithm):
            raise ValueError(
                f"the name {name!r} of an algorithm of {package_of(algorithm)} is that of one of {package_of(taken)}"
            )
        ALGORITHMS[operation][name] = algorithm
    if taken is not None and taken != algorithm:
        build.cache_clear()


def _module(algorithm: Algorithm) -> str:
    made_by = algorithm.build.func if isinstance(algorithm.build, partial) else algorithm.build
    return str(getattr(made_by, "__module__", type(made_by).__module__))


def package_of(algorithm: Algorithm) -> str:
    """Return name and version of the package that an algorithm is of; of one that no package offers, its module."""
    return "hybridcomp" if is_own(algorithm) else ENTRY_POINTS.package_of(_module(algorithm))


def is_own(algorithm: Algorithm) -> bool:
    """Tell whether an algorithm is this package's."""
    return _module(algorithm).startswith("hybridcomp.")


def added(kind: str) -> list[Algorithm]:
    """Return the algorithms of an operation that other packages have registered, by name."""
    return sorted((one for one in ALGORITHMS[kind].values() if not is_own(one)), key=lambda one: one.name)


_lock = threading.Lock()
#: Operations with more than one algorithm, to which others may be added.
SELECTABLE = tuple(op for op, named in ALGORITHMS.items() if len(named) > 1)


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

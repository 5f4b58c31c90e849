"""Predict the time of algorithms, choose the fastest, and the size of its chunks.

The functions are pure, of a profile and a setting: ranks that have both in common choose alike.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from hybridcomp.perfmodel.case import Case
from hybridcomp.perfmodel.mpi import MPI, measured_seconds
from hybridcomp.perfmodel.profile import Profile
from hybridcomp.perfmodel.terms import Setting
from hybridcomp.schedules.registry import ALGORITHMS, Formula, find
from hybridcomp.schedules.shards import CHUNK_BYTES

_CHUNKS = tuple(1 << power for power in range(18, 23))  # 256 KiB to 4 MiB
_EQUAL = 1.02  # seconds within this factor are equal: the model is no more exact
TWO_LEVELS = ("hierarchical", "two_level")  # algorithms by which each byte crosses to a host once
BULK_BYTES = 1 << 14  # bytes of an array below which latency counts as much as what crosses between hosts
_BULK_SUM_BYTES = (
    1 << 16
)  # the same for an all-reduce, which crosses twice in two levels, and once by ``one_shot``
_EQUAL_CHUNKS = 1.02  # the same for chunks; large ones cost less of the cores than the model sees


def algorithms(op: str) -> tuple[str, ...]:
    """Return the names of an operation's algorithms that the model knows.

    Raises:
        ValueError: the model does not know the operation.
    """
    known = {
        kind: [a.name for a in named.values() if a.formula is not None] for kind, named in ALGORITHMS.items()
    }
    if not known.get(op):
        allowed = ", ".join(kind for kind, names in known.items() if names)
        raise ValueError(f"no model of the operation {op!r}; known: {allowed}")
    return tuple(known[op])


def predict(profile: Profile, algorithm: str, setting: Setting) -> float:
    """Return the seconds that an algorithm takes in a setting, with chunks of the best size.

    ``"mpi"`` stands for MPI's own operation: its curve where the profile has one for these ranks, else the first of
    hybridcomp's algorithms.

    Raises:
        ValueError: there is no model of the operation or algorithm; or a ``sparse`` one gets a codec that is not.
    """
    if algorithm == MPI:
        measured = measured_seconds(profile, setting)
        if measured is not None:
            return measured
        algorithm = algorithms(setting.op)[0]
    formula = _formula(algorithm, setting)
    return min(_seconds(formula, algorithm, Case(profile, setting, chunk)) for chunk in _CHUNKS)


def spares_network(profile: Profile, setting: Setting) -> bool:
    """Tell whether an operation goes in two levels, between hosts and inside them, whatever their formulas say.

    So it is in the compiled engine, where hosts have several ranks, the network is slower than memory, and the array
    is not small: what else the job sends has need of the link, too, of which the formulas know nothing.
    """
    slower = profile.network.bandwidth < profile.memory
    bulk = _BULK_SUM_BYTES if setting.op == "all_reduce" else BULK_BYTES
    return setting.compiled and setting.tiered and slower and setting.nbytes >= bulk


def choose(profile: Profile, setting: Setting, candidates: Sequence[str]) -> str:
    """Return the fastest of ``candidates`` in a setting: of those within 2% of the fastest, the first.

    Where :func:`spares_network` says so, those of two levels are the only candidates, if there are any. Where ranks
    share cores, it is the one of those within 2% that would be fastest if they did not.

    Raises:
        ValueError: there is no candidate, or as from :func:`predict`.
    """
    if not candidates:
        raise ValueError(f"no algorithm to choose from for {setting.op}")
    if spares_network(profile, setting):
        candidates = [name for name in candidates if name in TWO_LEVELS] or candidates
    seconds = [predict(profile, algorithm, setting) for algorithm in candidates]
    limit = min(seconds) * _EQUAL
    fastest = [name for name, taken in zip(candidates, seconds, strict=True) if taken <= limit]
    if len(fastest) > 1 and profile.cores < 1:
        return choose(dataclasses.replace(profile, cores=1.0), setting, fastest)
    return fastest[0]


def chunk_bytes(profile: Profile, setting: Setting, algorithm: str) -> int:
    """Return the uncompressed bytes of a chunk of an algorithm's pipeline: a power of two from 256 KiB to 4 MiB.

    Of an algorithm without a formula it is 1 MiB.

    Small chunks fill the pipeline soon, large ones cost few messages and calls. Among sizes that make no difference the
    largest is taken: it leaves the cores to the ranks that compute.

    Raises:
        ValueError: as from :func:`predict`.
    """
    if find(setting.op, algorithm).formula is None:
        return CHUNK_BYTES
    formula = _formula(algorithm, setting)
    # Shared cores bound the time whatever the chunks are. Small ones still fill the pipeline sooner.
    profile = dataclasses.replace(profile, cores=1.0)
    seconds = {chunk: _seconds(formula, algorithm, Case(profile, setting, chunk)) for chunk in _CHUNKS}
    limit = min(seconds.values()) * _EQUAL_CHUNKS
    return max(chunk for chunk in _CHUNKS if seconds[chunk] <= limit)


def _formula(algorithm: str, setting: Setting) -> Formula:
    if algorithm not in algorithms(setting.op):
        known = ", ".join(algorithms(setting.op))
        raise ValueError(f"no model of the {setting.op} algorithm {algorithm!r}; known: {known}")
    if find(setting.op, algorithm).sparse and not setting.sparse:
        raise ValueError(f"the algorithm {algorithm!r} takes a sparse codec, not {setting.codec.spec!r}")
    formula = find(setting.op, algorithm).formula
    assert formula is not None  # it is among those with one
    return formula


def _seconds(formula: Formula, algorithm: str, case: Case) -> float:
    seconds = formula(case)
    if not 0 <= seconds < math.inf:  # by which nothing could be chosen
        raise ValueError(f"the formula of the algorithm {algorithm!r} says {seconds!r} seconds")
    return seconds

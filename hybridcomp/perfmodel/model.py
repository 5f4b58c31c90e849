"""Predict the time of algorithms, choose the fastest, and the size of its chunks.

The functions are pure, of a profile and a setting: ranks that have both in common choose alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hybridcomp.perfmodel.case import Case
from hybridcomp.perfmodel.formulas import FORMULAS, Formula
from hybridcomp.perfmodel.mpi import MPI, measured_seconds
from hybridcomp.perfmodel.profile import Profile
from hybridcomp.perfmodel.terms import Setting
from hybridcomp.schedules.registry import find

_CHUNKS = tuple(1 << power for power in range(18, 23))  # 256 KiB to 4 MiB
_EQUAL = 1.02  # seconds within this factor are equal: the model is no more exact
_EQUAL_CHUNKS = 1.02  # the same for chunks; large ones cost less of the cores than the model sees


def algorithms(op: str) -> tuple[str, ...]:
    """Return the names of an operation's algorithms that the model knows.

    Raises:
        ValueError: the model does not know the operation.
    """
    if op not in FORMULAS:
        raise ValueError(f"no model of the operation {op!r}; known: {', '.join(FORMULAS)}")
    return tuple(FORMULAS[op])


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
    return min(formula(Case(profile, setting, chunk)) for chunk in _CHUNKS)


def choose(profile: Profile, setting: Setting, candidates: Sequence[str]) -> str:
    """Return the fastest of ``candidates`` in a setting: of those within 2% of the fastest, the first.

    Where ranks share cores, it is the one of those within 2% that would be fastest if they did not.

    Raises:
        ValueError: there is no candidate, or as from :func:`predict`.
    """
    if not candidates:
        raise ValueError(f"no algorithm to choose from for {setting.op}")
    seconds = [predict(profile, algorithm, setting) for algorithm in candidates]
    limit = min(seconds) * _EQUAL
    fastest = [name for name, taken in zip(candidates, seconds, strict=True) if taken <= limit]
    if len(fastest) > 1 and profile.cores < 1:
        return choose(dataclasses.replace(profile, cores=1.0), setting, fastest)
    return fastest[0]


def chunk_bytes(profile: Profile, setting: Setting, algorithm: str) -> int:
    """Return the uncompressed bytes of a chunk of an algorithm's pipeline: a power of two from 256 KiB to 4 MiB.

    Small chunks fill the pipeline soon, large ones cost few messages and calls. Among sizes that make no difference the
    largest is taken: it leaves the cores to the ranks that compute.

    Raises:
        ValueError: as from :func:`predict`.
    """
    formula = _formula(algorithm, setting)
    # Shared cores bound the time whatever the chunks are. Small ones still fill the pipeline sooner.
    profile = dataclasses.replace(profile, cores=1.0)
    seconds = {chunk: formula(Case(profile, setting, chunk)) for chunk in _CHUNKS}
    limit = min(seconds.values()) * _EQUAL_CHUNKS
    return max(chunk for chunk in _CHUNKS if seconds[chunk] <= limit)


def _formula(algorithm: str, setting: Setting) -> Formula:
    if algorithm not in algorithms(setting.op):
        known = ", ".join(algorithms(setting.op))
        raise ValueError(f"no model of the {setting.op} algorithm {algorithm!r}; known: {known}")
    if find(setting.op, algorithm).sparse and not setting.sparse:
        raise ValueError(f"the algorithm {algorithm!r} takes a sparse codec, not {setting.codec.spec!r}")
    return FORMULAS[setting.op][algorithm]

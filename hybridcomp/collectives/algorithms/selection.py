"""Choose the algorithm and the chunk size of each operation, alike on all ranks."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from hybridcomp import variables
from hybridcomp.arrays import DType
from hybridcomp.codecs import Codec, parse_form
from hybridcomp.codecs.sparse.base import SparseCodec
from hybridcomp.errors import ConfigError
from hybridcomp.perfmodel import Profile, Setting, choose, chunk_bytes, load_profile
from hybridcomp.perfmodel.model import TWO_LEVELS, spares_network
from hybridcomp.schedules.registry import (
    ALGORITHMS,
    SELECTABLE,
    Algorithm,
    added,
    is_own,
    lookup,
    missing,
    package_of,
)
from hybridcomp.schedules.topology import Topology

_BETWEEN = "\x1f"  # which no printable text has


class AlgorithmChoice(NamedTuple):
    """Choice of an algorithm, and of the uncompressed bytes in each of its chunks."""

    algorithm: Algorithm
    chunk_bytes: int


def refusal(
    algorithm: Algorithm, topology: Topology, codec: Codec, feedback: str | None = None
) -> str | None:
    """Say why an algorithm cannot be used by these ranks, with this codec and form of feedback; None if it can."""
    if algorithm.sparse and not isinstance(codec, SparseCodec):
        return f"{codec.name} is not a sparse codec"
    if feedback is not None and not algorithm.feedback:
        return "it has no error feedback"
    if feedback is not None and (form := parse_form(feedback).name) in algorithm.without:
        return f"it has no error feedback of the form {form}"
    return algorithm.refuses(topology)


class Chooser:
    """Choice of algorithms for one communicator.

    Args:
        topology: topology of the communicator's ranks.
        profile: costs of links and codecs.
        forced: name of the algorithm to use wherever it can be, by operation.
        chunk: uncompressed bytes of every chunk; None to choose.
        others: algorithms of other packages that may be chosen unasked, by operation: those that all ranks have.
    """

    def __init__(
        self,
        topology: Topology,
        profile: Profile,
        forced: Mapping[str, str],
        chunk: int | None = None,
        others: Mapping[str, Collection[str]] = MappingProxyType({}),
    ) -> None:
        self._topology = topology
        self._profile = profile
        self._forced = forced
        self._chunk = chunk
        self._others = others
        self._choices: dict[tuple[Any, ...], AlgorithmChoice] = {}
        self._tiered = topology.tiered

    @property
    def profile(self) -> Profile:
        """Return the costs of links and codecs; may be set, alike on all ranks."""
        return self._profile

    @profile.setter
    def profile(self, profile: Profile) -> None:
        if profile is not self._profile:
            self._profile = profile
            self._choices.clear()

    def choose(
        self,
        op: str,
        nbytes: int,
        dtype: DType,
        codec: Codec,
        feedback: str | None,
        requested: str | None = None,
        preferred: str | None = None,
    ) -> AlgorithmChoice:
        """Choose the algorithm and the chunk size of an operation, as the compiled engine runs it fastest.

        Arrays on a device have the same, and so the same bits.

        Args:
            op: one of :data:`SELECTABLE`.
            nbytes: bytes of the whole buffer, uncompressed.
            dtype: dtype of the buffer's elements.
            codec: codec that carries the buffer.
            feedback: form of the error feedback; None if the operation has none.
            requested: algorithm that the caller asks for; None to choose.
            preferred: algorithm that the policy names, used wherever it can be; None to choose.

        Raises:
            ValueError: there is no algorithm of that name, or it cannot be used here.
        """
        # Sizes within an eighth of each other count as one: the model takes a millisecond or more to answer.
        coarse = max(0, nbytes.bit_length() - 4)
        key = (op, nbytes >> coarse << coarse, dtype, codec, feedback, requested, preferred)
        chosen = self._choices.get(key)
        if chosen is None:
            if len(self._choices) > 4096:
                self._choices.clear()
            chosen = self._choices[key] = self._choose(*key)
        return chosen

    def _choose(
        self,
        op: str,
        nbytes: int,
        dtype: DType,
        codec: Codec,
        feedback: str | None,
        requested: str | None,
        preferred: str | None,
    ) -> AlgorithmChoice:
        wanted = (requested, preferred, self._forced.get(op))
        for name in filter(None, wanted):
            lookup(op, name)  # a package may offer it
        able: dict[str, Algorithm] = {}
        refused: dict[str, str] = {}
        for algorithm in ALGORITHMS[op].values():
            why = refusal(algorithm, self._topology, codec, feedback)
            if why is None:
                able[algorithm.name] = algorithm
            else:
                refused[algorithm.name] = why
        if requested is not None and requested not in able:
            why = refused.get(requested) or f"{missing(requested)}there is none of that name"
            raise ValueError(
                f"{op} cannot use algorithm {requested!r} here: {why}; allowed: {', '.join(able)}"
            )
        setting = self._setting(op, nbytes, dtype, codec)
        name = next((name for name in wanted if name in able), "")
        if not name:
            known = [a for a in able.values() if is_own(a) or a.name in self._others.get(op, ())]
            good = [a.name for a in known if codec.lossless or not a.reencodes]
            name = choose(self._profile, setting, good)
        return AlgorithmChoice(able[name], self._chunk or chunk_bytes(self._profile, setting, name))

    def spares_network(self, op: str, nbytes: int, dtype: DType, codec: Codec) -> bool:
        """Tell whether two levels are the best way for an operation that the compiled engine would run.

        Args:
            op, nbytes, dtype, codec: as for :meth:`choose`.
        """
        if not self._tiered or not spares_network(self._profile, self._setting(op, nbytes, dtype, codec)):
            return False
        return self.choose(op, nbytes, dtype, codec, None).algorithm.name in TWO_LEVELS

    def _setting(self, op: str, nbytes: int, dtype: DType, codec: Codec) -> Setting:
        topology = self._topology
        ranks, largest = len(topology.hosts), topology.largest
        return Setting(op, nbytes, dtype.itemsize, codec, ranks, topology.count, largest, compiled=True)


def own_settings() -> str:
    """Return this process's environment and profile as one text for :func:`chooser`, or the error found in them."""
    try:
        forced = variables.ALGORITHM.read()
        _check_algorithms(forced)
        words = ",".join(f"{op}={name}" for op, name in forced.items())
        chunk = variables.CHUNK_BYTES.read()
        others = [
            f"{op}={one.name}={package_of(one)}"
            for op in SELECTABLE
            for one in added(op)
            if one.formula is not None
        ]
        return "\n".join([words, str(chunk or ""), _BETWEEN.join(others), load_profile().to_toml()])
    except ConfigError as error:
        return f"\n\n\n\n{error}"


def chooser(topology: Topology, settings: str) -> Chooser:
    """Make a chooser from settings; choosers of equal settings choose alike on all ranks.

    Args:
        topology: topology of the communicator.
        settings: text that :func:`own_settings` returned on rank 0.

    Raises:
        ConfigError: one of the settings is wrong, or this rank lacks an algorithm that rank 0 has, or has it of another
            package; names both.
    """
    profile, forced, chunk, told = _parsed(settings)
    others: dict[str, list[str]] = {}
    for op, name, package in told:
        found = lookup(op, name) if op in SELECTABLE else None
        mine = "no such algorithm" if found is None else f"that of {package_of(found)}"
        if found is None or package_of(found) != package:
            raise ConfigError(
                f"rank 0 chooses among algorithms the {name!r} of {package} for {op}, this rank has {mine}"
            )
        others.setdefault(op, []).append(name)
    for op, name in forced.items():
        if lookup(op, name) is None:
            raise ConfigError(
                f"rank 0 is told to do {op} by {name!r}, {missing(name)}this rank has none of that name"
            )
    return Chooser(topology, profile, forced, chunk, others)


@functools.lru_cache(maxsize=4)
def _parsed(settings: str) -> tuple[Profile, dict[str, str], int | None, list[tuple[str, str, str]]]:
    forced, chunk, others, profile = settings.split("\n", 3)
    if profile.startswith("\n"):
        raise ConfigError(profile.strip())
    known = Profile.from_bytes(profile.encode(), "rank 0's")
    told = [tuple(one.split("=", 2)) for one in others.split(_BETWEEN) if one]
    return known, variables.ALGORITHM.parse(forced), variables.CHUNK_BYTES.parse(chunk), told  # type: ignore[return-value]


def _check_algorithms(forced: Mapping[str, str]) -> None:
    """Check the value of ``HYBRIDCOMP_ALGORITHM``.

    Raises:
        ConfigError: it names no such operation or algorithm.
    """
    for op, name in forced.items():
        if op not in SELECTABLE or lookup(op, name) is None:
            allowed = "; ".join(f"{one}={'|'.join(ALGORITHMS[one])}" for one in SELECTABLE)
            raise variables.ALGORITHM.wrong(f"{op}={name}", f"separated by commas, {allowed}")

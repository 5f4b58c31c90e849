"""Choose the algorithm and the chunk size of each operation, alike on all ranks."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from hybridcomp import variables
from hybridcomp.arrays import DType
from hybridcomp.codecs import Codec, parse_form
from hybridcomp.codecs.sparse.base import SparseCodec
from hybridcomp.errors import ConfigError
from hybridcomp.perfmodel import Profile, Setting, choose, chunk_bytes, load_profile
from hybridcomp.schedules.registry import ALGORITHMS, Algorithm
from hybridcomp.schedules.topology import Topology

#: Operations with more than one algorithm.
OPERATIONS = tuple(op for op, named in ALGORITHMS.items() if len(named) > 1)


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
    """

    def __init__(
        self, topology: Topology, profile: Profile, forced: Mapping[str, str], chunk: int | None = None
    ) -> None:
        self._topology = topology
        self._profile = profile
        self._forced = forced
        self._chunk = chunk
        self._choices: dict[tuple[Any, ...], AlgorithmChoice] = {}

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
        *,
        engine: bool = False,
    ) -> AlgorithmChoice:
        """Choose the algorithm and the chunk size of an operation.

        Args:
            op: one of :data:`OPERATIONS`.
            nbytes: bytes of the whole buffer, uncompressed.
            dtype: dtype of the buffer's elements.
            codec: codec that carries the buffer.
            feedback: form of the error feedback; None if the operation has none.
            requested: algorithm that the caller asks for; None to choose.
            preferred: algorithm that the policy names, used wherever it can be; None to choose.
            engine: whether the compiled engine is to run the operation, which needs less of a core.

        Raises:
            ValueError: there is no algorithm of that name, or it cannot be used here.
        """
        # Sizes within an eighth of each other count as one: the model takes a millisecond or more to answer.
        coarse = max(0, nbytes.bit_length() - 4)
        key = (op, nbytes >> coarse << coarse, dtype, codec, feedback, requested, preferred, engine)
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
        engine: bool,
    ) -> AlgorithmChoice:
        able: dict[str, Algorithm] = {}
        refused: dict[str, str] = {}
        for algorithm in ALGORITHMS[op].values():
            why = refusal(algorithm, self._topology, codec, feedback)
            if why is None:
                able[algorithm.name] = algorithm
            else:
                refused[algorithm.name] = why
        if requested is not None and requested not in able:
            why = refused.get(requested, "there is none of that name")
            raise ValueError(
                f"{op} cannot use algorithm {requested!r} here: {why}; allowed: {', '.join(able)}"
            )
        topology = self._topology
        setting = Setting(
            op, nbytes, dtype.itemsize, codec, len(topology.hosts), topology.count, topology.largest, engine
        )
        wanted = (requested, preferred, self._forced.get(op))
        name = next((name for name in wanted if name in able), "")
        if not name:
            good = [a.name for a in able.values() if codec.lossless or not a.reencodes]
            name = choose(self._profile, setting, good)
        return AlgorithmChoice(able[name], self._chunk or chunk_bytes(self._profile, setting, name))


def own_settings() -> str:
    """Return this process's environment and profile as one text for :func:`chooser`, or the error found in them."""
    try:
        forced = variables.ALGORITHM.read()
        _check_algorithms(forced)
        words = ",".join(f"{op}={name}" for op, name in forced.items())
        chunk = variables.CHUNK_BYTES.read()
        return "\n".join([words, str(chunk or ""), load_profile().to_toml()])
    except ConfigError as error:
        return f"\n\n\n{error}"


def chooser(topology: Topology, settings: str) -> Chooser:
    """Make a chooser from settings; choosers of equal settings choose alike on all ranks.

    Args:
        topology: topology of the communicator.
        settings: text that :func:`own_settings` returned on rank 0.

    Raises:
        ConfigError: one of the settings is wrong.
    """
    return Chooser(topology, *_parsed(settings))


@functools.lru_cache(maxsize=4)
def _parsed(settings: str) -> tuple[Profile, dict[str, str], int | None]:
    forced, chunk, profile = settings.split("\n", 2)
    if profile.startswith("\n"):
        raise ConfigError(profile.strip())
    known = Profile.from_bytes(profile.encode(), "rank 0's")
    return known, variables.ALGORITHM.parse(forced), variables.CHUNK_BYTES.parse(chunk)


def _check_algorithms(forced: Mapping[str, str]) -> None:
    """Check the value of ``HYBRIDCOMP_ALGORITHM``.

    Raises:
        ConfigError: it names no such operation or algorithm.
    """
    for op, name in forced.items():
        if op not in OPERATIONS or name not in ALGORITHMS[op]:
            allowed = "; ".join(f"{one}={'|'.join(ALGORITHMS[one])}" for one in OPERATIONS)
            raise variables.ALGORITHM.wrong(f"{op}={name}", f"separated by commas, {allowed}")

"""Compute the costs of a step's messages: collectives of an axis, and sends between stages."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from hybridcomp.arrays import DType
from hybridcomp.codecs import Codec, get_codec
from hybridcomp.collectives.algorithms.selection import Chooser
from hybridcomp.perfmodel import Profile, Setting, carried_by_mpi, predict
from hybridcomp.perfmodel.mpi import measured_seconds
from hybridcomp.perfmodel.terms import Phase
from hybridcomp.schedules.topology import Topology

NONE = get_codec("none")
_CHUNK = 4 << 20
_ENDLESS = 1e15  # bytes/s of a link that takes no time
_SLIVER = 1e-6  # share of a core, with which only work on the core takes time


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a message or collective that has links and processors to itself.

    Attributes:
        cpu: seconds of a processor on each rank that takes part; for a send, on the sender.
        latency: seconds in which neither processors nor links are busy.
        link: seconds for which the busiest link is busy.
        wire: bytes that the busiest rank sends.
        receive: for a send, seconds of the receiver's processor.
    """

    cpu: float
    latency: float
    link: float
    wire: float
    receive: float = 0.0

    @property
    def seconds(self) -> float:
        """Return the seconds from start to end, where nothing else goes on."""
        return self.cpu + self.latency + self.link + self.receive

    def __add__(self, other: Cost) -> Cost:
        """Return the cost of one after the other."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Cost(*(a + b for a, b in pairs))


NOTHING = Cost(0.0, 0.0, 0.0, 0.0)


class Links:
    """Profile with the rate of some hosts' links: a key of caches, with the choosers of communicators.

    Args:
        profile: speeds of links and codecs.
        rate: bytes/s of the hosts' links.
    """

    def __init__(self, profile: Profile, rate: float) -> None:
        network = dataclasses.replace(profile.network, bandwidth=rate)
        self.profile = profile
        # Curves of MPI's own operations hold for the links they were measured on, and include the cost of shared cores.
        apart = rate == profile.network.bandwidth and profile.cores == 1
        self.alone = dataclasses.replace(
            profile, network=network, cores=1.0, mpi=profile.mpi if apart else None
        )
        self._choosers: dict[Topology, Chooser] = {}

    def chooser(self, topology: Topology) -> Chooser:
        """Return the chooser of a communicator, which goes by the profile that the ranks read."""
        if topology not in self._choosers:
            self._choosers[topology] = Chooser(topology, self.profile, {})
        return self._choosers[topology]


@functools.lru_cache(65536)
def collective(
    links: Links,
    op: str,
    nbytes: int,
    dtype: DType,
    codec: Codec,
    feedback: str | None,
    hosts: tuple[int, ...],
) -> Cost:
    """Return the cost of a collective, by the algorithm that a communicator would choose.

    Args:
        links: links of the ranks' hosts.
        op: ``all_reduce``, ``all_gather`` or ``reduce_scatter``.
        nbytes: uncompressed bytes of the whole array.
        dtype: dtype of its elements.
        codec: codec that carries it.
        feedback: form of error feedback; None for none.
        hosts: host of each rank, numbered from 0.
    """
    if len(hosts) == 1 or nbytes == 0:
        return NOTHING
    topology = Topology(hosts)
    if codec.linear:  # the ranks exchange factors, as floats, in two sums
        size = codec.bound(nbytes // dtype.itemsize, dtype)
        factors = collective(links, op, size, DType.FLOAT32, NONE, None, hosts)
        rate = links.alone.speed(codec)
        return dataclasses.replace(factors, cpu=factors.cpu + nbytes / rate.encode + nbytes / rate.decode)
    algorithm = links.chooser(topology).choose(op, nbytes, dtype, codec, feedback).algorithm.name
    setting = Setting(
        op, nbytes, dtype.itemsize, codec, len(hosts), topology.count, topology.largest, compiled=True
    )
    alone = links.alone
    quick = dataclasses.replace(alone.network, bandwidth=_ENDLESS)
    total = predict(alone, algorithm, setting)
    unlinked = min(total, predict(dataclasses.replace(alone, network=quick), algorithm, setting))
    starved = dataclasses.replace(alone, network=quick, cores=_SLIVER)
    cpu = min(unlinked, predict(starved, algorithm, setting) * _SLIVER)
    measured = measured_seconds(alone, setting) if carried_by_mpi(setting) else None
    share = 1.0 if measured is None else measured / total  # MPI's own: of processors, links and rest
    sent = _sent(alone, setting, algorithm)
    return Cost(cpu * share, (unlinked - cpu) * share, (total - unlinked) * share, sent)


def _sent(profile: Profile, setting: Setting, algorithm: str) -> float:
    """Return the bytes that a rank sends."""
    ranks, elements = setting.ranks, setting.nbytes / setting.itemsize
    phase = Phase(profile, setting, _CHUNK)
    if algorithm in ("one_shot", "sparse"):
        return (ranks - 1) * phase.message_bytes(elements)
    rounds = 2 if setting.op == "all_reduce" else 1
    return rounds * (ranks - 1) * phase.message_bytes(elements / ranks)


@functools.lru_cache(65536)
def send(links: Links, nbytes: int, dtype: DType, codec: Codec, far: bool) -> Cost:
    """Return the cost of a message between two ranks.

    Args:
        links: links of the sender's host.
        nbytes: uncompressed bytes.
        dtype: dtype of its elements.
        codec: codec that carries it.
        far: whether it leaves the host.
    """
    known = links.alone
    setting = Setting(
        "reduce", nbytes, dtype.itemsize, codec, 2, 2 if far else 1, 1 if far else 2, compiled=True
    )
    wire = Phase(known, setting, _CHUNK).message_bytes(nbytes / dtype.itemsize)
    speed = known.speed(codec)
    plain = codec.name == "none"
    encode = 0.0 if plain else speed.overhead + nbytes / speed.encode
    decode = 0.0 if plain else speed.overhead + nbytes / speed.decode
    handed = known.message / 2
    if not far:
        return Cost(
            encode + handed + wire / known.host.bandwidth, known.host.latency, 0.0, wire, decode + handed
        )
    moved = handed + wire * known.wire
    return Cost(encode + moved, known.network.latency, wire / known.network.bandwidth, wire, decode + moved)


def hosts_alike(hosts: Sequence[int]) -> tuple[int, ...]:
    """Return hosts numbered from 0 in the order in which they come: groups that lie alike are then equal."""
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(host, len(numbers)) for host in hosts)


@functools.lru_cache(256)
def _links(held: _Held, rate: float) -> Links:
    return Links(held.profile, rate)


class _Held:
    """Profile that is equal to itself alone: comparing all its codecs would take longer than the cache saves."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and other.profile is self.profile

    def __hash__(self) -> int:
        return id(self.profile)


def links_of(profile: Profile, rate: float) -> Links:
    """Return the links of hosts: the same object for the same profile and rate."""
    return _links(_Held(profile), rate)

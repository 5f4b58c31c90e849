"""Predict a message's time by each codec: an estimate of all codecs, then the model's prediction of the few best."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from hybridcomp.arrays import DType, as_dtype
from hybridcomp.codecs import Codec, get_codec
from hybridcomp.perfmodel import Profile, Setting, carried_by_mpi, predict, spares_network
from hybridcomp.perfmodel.mpi import MPI
from hybridcomp.policy.auto.signature import Signature

_NONE = get_codec("none")
_FP32 = 4  # bytes; speeds are of fp32
_MODELLED = ("all_reduce", "reduce_scatter", "all_gather")
# Stand for the other algorithms, which give codecs the same order: on ranks that have a host each or one for all, and
# on hosts of several ranks.
_FLAT, _TWO_LEVELS = "direct", "hierarchical"
_FLOPS = 12e9  # flops/s of a core in PowerSGD's thin products
_LEAST_SPEEDUP, _MOST_SPEEDUP = 1 / 256, 256.0  # bounds of a link's change, against the profile


class Place(NamedTuple):
    """Hosts and engine of a communicator's ranks.

    Attributes:
        ranks: number of ranks of the communicator.
        hosts: number of hosts that they are on.
        ranks_per_host: most ranks on any host.
        compiled: whether the compiled engine runs its operations.
    """

    ranks: int
    hosts: int
    ranks_per_host: int
    compiled: bool


class MessageCost(NamedTuple):
    """Estimated seconds of a message.

    Attributes:
        compute: seconds on a core.
        wire: seconds on the busiest link.
        latency: latencies of the messages that wait for each other.
    """

    compute: float
    wire: float
    latency: float

    @property
    def seconds(self) -> float:
        """Return the seconds in all: the busier of core and link, and a quarter of the other to fill the pipeline."""
        busy, idle = max(self.compute, self.wire), min(self.compute, self.wire)
        return self.latency + busy + idle / 4


def estimate(profile: Profile, place: Place, wanted: Signature, codec: Codec) -> MessageCost:
    """Estimate the seconds of a kind of message by a codec."""
    p, h, per = place.ranks, place.hosts, place.ranks_per_host
    nbytes = whole_bytes(wanted, p)
    itemsize = as_dtype(wanted.dtype).itemsize
    n = nbytes / itemsize
    speed = profile.speed(codec)
    tier = profile.network if h > 1 else profile.host
    if codec.linear:
        factors = linear_bytes(nbytes, wanted.thin, codec)
        compute = 6 * n * codec.params["rank"] / _FLOPS / profile.cores
        plain = estimate(profile, place, wanted._replace(nbytes=factors, thin=0), _NONE)
        return MessageCost(compute + plain.compute, plain.wire, 2 * plain.latency)
    size = _wire_bytes(codec, n, itemsize, speed.size)
    encode, decode, add = (n * _FP32 / rate for rate in (speed.encode, speed.decode, speed.add))
    times = 2 if wanted.op == "all_reduce" else 1
    # Where hosts have several ranks, each rank encodes its share of what its host sends.
    parts, sharers = (h, per) if h > 1 and per > 1 and wanted.op in _MODELLED else (p, 1)
    share = (parts - 1) / parts
    each_way = share * size  # out of a host, all its ranks together
    if sharers == 1 and h > 1:
        each_way *= per * (p - per) / (p - 1)
    compute = {
        "all_reduce": encode * (1 + 1 / parts) + share * add + decode,
        "reduce_scatter": share * (encode + add),
        "all_gather": encode / parts + decode,
    }.get(wanted.op, encode + decode) / sharers
    latency = times * tier.latency
    if sharers > 1:  # the plain parts that ranks of a host give each other
        compute += times * (per - 1) / per * nbytes / profile.host.bandwidth
        latency += times * profile.host.latency
    if wanted.op == "send":
        each_way = size
    compute += times * 2 * each_way / per * profile.wire if h > 1 else 0.0
    return MessageCost(compute / profile.cores, times * each_way / tier.bandwidth, latency)


def refined(profile: Profile, place: Place, wanted: Signature, codec: Codec) -> float:
    """Return the model's seconds of a kind of message by a codec; the estimate where no model covers it."""
    if wanted.op not in _MODELLED:
        return estimate(profile, place, wanted, codec).seconds
    nbytes = whole_bytes(wanted, place.ranks)
    itemsize = as_dtype(wanted.dtype).itemsize
    where = (place.ranks, place.hosts, place.ranks_per_host, place.compiled)
    if codec.linear:
        factors = linear_bytes(nbytes, wanted.thin, codec) // itemsize * itemsize
        setting = Setting(wanted.op, factors // 2, itemsize, _NONE, *where)
        compute = estimate(profile, place, wanted, codec).compute
        return compute + 2 * predict(profile, _algorithm(profile, setting), setting)
    setting = Setting(wanted.op, nbytes, itemsize, codec, *where)
    return predict(profile, _algorithm(profile, setting), setting)


def _algorithm(profile: Profile, setting: Setting) -> str:
    """Return the algorithm that stands for those of an operation on these hosts."""
    # Outside the compiled engine all operations of hosts of several ranks go in two levels.
    if setting.tiered and (not setting.compiled or spares_network(profile, setting)):
        return _TWO_LEVELS
    return MPI if carried_by_mpi(setting) else _FLAT


def whole_bytes(wanted: Signature, ranks: int) -> int:
    """Return the bytes of all ranks' parts together: a message of an all-gather is one rank's part."""
    return wanted.nbytes * ranks if wanted.op == "all_gather" else wanted.nbytes


def linear_bytes(nbytes: int, thin: int, codec: Codec) -> int:
    """Return about the bytes of a matrix's factors; ``thin`` says how many times smaller those of rank 1 are."""
    smaller = max(1.0, 0.75 * 2**thin / int(codec.params["rank"]))
    return int(nbytes / smaller)


def slowed(profile: Profile, place: Place, speedup: float) -> Profile:
    """Return the profile with the communicator's links at ``speedup`` times their speed.

    It has no curves of MPI's own operations: they were measured on the links as those were.
    """
    factor = min(_MOST_SPEEDUP, max(_LEAST_SPEEDUP, speedup))
    name = "network" if place.hosts > 1 else "host"
    tier = getattr(profile, name)
    changed = dataclasses.replace(tier, bandwidth=tier.bandwidth * factor)
    return dataclasses.replace(profile, mpi=None, **{name: changed})


def _wire_bytes(codec: Codec, n: float, itemsize: int, measured: float) -> float:
    if codec.name == "none":
        return n * itemsize
    if codec.fixed_size:
        return float(codec.bound(int(n), {2: DType.FLOAT16, 8: DType.FLOAT64}.get(itemsize, DType.FLOAT32)))
    return n * itemsize * measured

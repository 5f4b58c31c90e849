"""Predict an algorithm's time by simulating the schedules of all ranks with the costs of a profile."""

from __future__ import annotations

import functools

import numpy as np

from hybridcomp.codecs import get_codec
from hybridcomp.perfmodel.mpi import MPI, measured_seconds
from hybridcomp.perfmodel.profile import Profile
from hybridcomp.perfmodel.terms import FP32, Setting, message_size
from hybridcomp.schedules import cuts
from hybridcomp.schedules.layout import WHOLE
from hybridcomp.schedules.registry import ALGORITHMS, build
from hybridcomp.schedules.schedule import Kind, Operation, Slot
from hybridcomp.schedules.simulate import Columns, Floats, Link, Machine, Timeline, columns, run
from hybridcomp.schedules.topology import Topology

_NONE = get_codec("none")
_SLOW = ("reduce",)  # operations outside the fast path of collectives/operations
_PATIENCE = 200e-6  # seconds for which kernels/engine/waiting gives way before it sleeps
_MOST_LOOKS = 1000  # looks before a rank sleeps, at most: each is simulated
_MOST_RANKS = 64  # ranks that are simulated one by one where hosts are alike, at most
#: Algorithms in which all hosts do the same, rotated by their numbers.
_ALIKE = ("direct", "one_shot", "ring", "hierarchical", "two_level", "doubling")
_TURNED = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")


def seconds(
    profile: Profile, algorithm: str, setting: Setting, chunk: int, cores: int | None = None
) -> float:
    """Return the seconds from the start of all ranks until the last one has its result.

    Args:
        profile: speeds of links, cores and codecs.
        algorithm: algorithm of the setting's operation; ``"mpi"`` for MPI's own, by its curve, or by the operation's
            first algorithm where the profile has none.
        setting: operation, bytes, codec, ranks.
        chunk: uncompressed bytes of a message.
        cores: cores that all ranks of all hosts share, as in the lab; by default the profile's.
    """
    if algorithm == MPI:
        measured = measured_seconds(profile, setting)
        if measured is not None:
            return measured
        algorithm = next(iter(ALGORITHMS[setting.op]))
    return timeline(profile, algorithm, setting, chunk, cores).seconds


def timeline(
    profile: Profile, algorithm: str, setting: Setting, chunk: int, cores: int | None = None
) -> Timeline:
    """Return the start and end of each step of the ranks, or of the first host's ranks where all hosts do the same."""
    steps = _steps(algorithm, setting, chunk, profile.speed(setting.codec).size)
    machine = machine_of(profile, setting, cores)
    work = functools.partial(_work, profile, setting)
    first = run(steps, machine, work)
    if not profile.network.burst or setting.hosts == 1:
        return first
    # Start with the bytes that links have saved up: they rest between two operations, and while ranks compute.
    return run(steps, machine, work, list(first.credits))


def machine_of(profile: Profile, setting: Setting, cores: int | None = None) -> Machine:
    """Return the machine of a profile, with ``cores`` that all ranks share: by default as many as the profile says."""
    network, host = profile.network, profile.host
    if cores is None and profile.cores < 1:
        cores = max(1, round(profile.cores * setting.ranks))
    return Machine(
        network=Link(network.latency, network.bandwidth, network.burst, network.incoming or None),
        host=Link(host.latency, host.bandwidth),
        cores=cores,
        eager=profile.eager,
        start=profile.slow_start if setting.op in _SLOW else profile.start,
        look=max(profile.look, _PATIENCE / _MOST_LOOKS),
        patience=_PATIENCE,
        wake=profile.wake,
    )


@functools.lru_cache(256)
def _steps(algorithm: str, setting: Setting, chunk: int, size: float) -> Columns:
    """Return the steps of an operation's ranks: of the first host's where there are many and all hosts do the same."""
    topology = Topology.even(setting.ranks, setting.ranks_per_host)
    alike = (
        setting.ranks > _MOST_RANKS
        and setting.op in _TURNED
        and algorithm in _ALIKE
        and setting.ranks % setting.ranks_per_host == 0
    )
    operation = operation_of(setting, chunk, even=alike)
    simulated = range(setting.ranks_per_host if alike else setting.ranks)
    schedules = [build(operation, topology, rank, algorithm) for rank in simulated]
    if not alike:
        schedules = cuts.even(schedules)
    itemsize = setting.itemsize

    def message_bytes(slot: Slot, count: int) -> int:
        if slot.sizes:
            return 4 * count
        if slot.plain:
            return count * itemsize
        return round(message_size(setting.codec, size, itemsize, count))

    return columns(schedules, message_bytes, alike=alike)


def operation_of(setting: Setting, chunk: int, *, even: bool = False) -> Operation:
    """Return a setting's operation on whole elements; ``even``: equally many for each rank."""
    n = max(1, setting.nbytes // setting.itemsize)
    p = setting.ranks
    if even:
        n = -(-n // p) * p
    if setting.op in WHOLE:
        counts: tuple[int, ...] = (n,)
    elif setting.op == "all_to_all":
        counts = (-(-n // p),) * (p * p)
    else:
        counts = (-(-n // p),) * p
    plain = setting.codec.name == "none"
    return Operation(
        setting.op,
        counts,
        setting.itemsize,
        plain=plain,
        exact=setting.codec.lossless and not plain,
        chunk_bytes=chunk,
    )


def _work(profile: Profile, setting: Setting, c: Columns) -> Floats:
    """Return the seconds of a core for each step."""
    speed, itemsize = profile.speed(setting.codec), setting.itemsize
    # A call from Python costs a plain codec's overhead, too; the rest is the codec's own.
    call = profile.call + max(0.0, speed.overhead - profile.speed(_NONE).overhead)
    n = c.count * float(FP32)
    raw = c.count * float(itemsize)
    neighbours = setting.ranks_per_host > 1
    copy = call + raw / profile.memory
    # Plain messages between hosts are sent from where the values are, and received where they belong.
    given = copy if neighbours else np.zeros(len(n))
    encode = np.where(c.plain, given, call + n / speed.encode)
    decode = np.where(c.plain, given, call + n / speed.decode)
    added = np.where(c.plain, call + raw / profile.memory, call + n / speed.add)
    message = np.where(c.near, profile.near / 2, profile.far / 2 + profile.wire * c.nbytes)
    costs = {
        Kind.ENCODE: encode,
        Kind.SEND: message,
        Kind.RECV: message,
        Kind.CHECK: np.where(c.plain, 0.0, call + c.nbytes / profile.memory),
        Kind.DECODE: decode,
        Kind.SUM: np.where(c.span, copy, 0.0) + c.reads * added,
        Kind.SUM_ENCODE: c.reads * added + np.where(c.plain, copy, encode),
        Kind.COPY: copy,
        Kind.SIZES: np.full(len(n), call),
        Kind.CUT: np.full(len(n), call),
    }
    return np.select([c.kind == kind for kind in costs], list(costs.values()))

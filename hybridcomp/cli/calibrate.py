"""Measure links, memory and codecs for a profile, on every rank: ``hybridcomp doctor --calibrate``."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI
from rich.console import Console
from rich.progress import track

from hybridcomp.codecs import get_codec
from hybridcomp.collectives import Communicator
from hybridcomp.collectives.algorithms.selection import CHUNK_VARIABLE
from hybridcomp.collectives.transport.shared_memory import connect_peers, own_pool
from hybridcomp.collectives.transport.topology import discover
from hybridcomp.errors import CollectiveTimeoutError
from hybridcomp.perfmodel.calibrate import SPECS, codec_speed, memory_speed
from hybridcomp.perfmodel.profile import DEFAULT, Profile, Speed, Tier
from hybridcomp.planner.compute import Fitted
from hybridcomp.schedules.topology import Topology

_TIMEOUT = 120.0  # seconds
_SLEEP, _LONG_SLEEP = 50e-6, 5e-3
_TAG = 1
_BIG = 8 << 20  # bytes: far more than the burst that a shaped link lets through at once
_BURSTS = tuple(1 << power for power in range(16, 22))  # bytes of messages that may pass at once
_SAVING = 0.05  # seconds in which a shaped link saves its burst
_TRIES = 4  # of each
_SLOW = 1.0  # seconds of a big message, past which few are enough
_LEAST = 2
_TINY = 1024  # bytes of a chunk that takes no time but for being a message
_CHUNKS = 32
_OF_OPERATIONS = 8  # of a model, measured in the time of a codec: there are a hundred
_SOME_SIZE = 0.5  # of a message by a codec that was not measured


@dataclass(frozen=True)
class Effort:
    """The amount of work to measure.

    Attributes:
        pings: small messages there and back.
        messages: big ones; the first does not count.
        seconds: of computing on each codec.
    """

    pings: int
    messages: int
    seconds: float


THOROUGH = Effort(pings=400, messages=9, seconds=0.4)
QUICK = Effort(pings=50, messages=3, seconds=0.02)


def hosts_of(comm: MPI.Comm) -> tuple[Topology, bool]:
    """Find out which ranks share a host, and whether those of each read messages in place; collective."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        topology = discover(comm, node)
        shares_memory = own_pool() is not None if node.size == 1 else connect_peers(comm, node) is not None
    finally:
        node.Free()
    return topology, agreed(comm, shares_memory)


def wait(requests: Sequence[MPI.Request], comm: MPI.Comm, what: str, *, idle: bool = True) -> None:
    """Wait for requests without keeping a core from the ranks that compute or send.

    Args:
        requests: what to wait for.
        comm: whose rank an error names.
        what: is being done.
        idle: sleep between looks; otherwise only give up the time slice, as who is timed must.

    Raises:
        CollectiveTimeoutError: they are not done in two minutes.
    """
    begin = time.monotonic()
    while not MPI.Request.Testall(list(requests)):
        waited = time.monotonic() - begin
        if idle:
            time.sleep(min(max(waited / 16, _SLEEP), _LONG_SLEEP))
        else:
            os.sched_yield()
        if waited > _TIMEOUT:
            raise CollectiveTimeoutError(f"{what}: rank {comm.rank} has waited for {_TIMEOUT:g} s")


def calibrate(comm: MPI.Comm, hosts: Topology, old: Profile, effort: Effort) -> tuple[Profile, list[str]]:
    """Measure what the ranks of ``comm`` can. Collective; all ranks get the same.

    Args:
        comm: nobody else uses it.
        hosts: where its ranks are.
        old: what stays of tiers that there are not.
        effort: how long.

    Returns:
        The profile, and what was not measured and why.

    Raises:
        CollectiveTimeoutError: a rank no longer answers.
    """
    notes: list[str] = []
    host, network, work = old.host, old.network, old.wire
    full = next((ranks for h in range(hosts.count) if len(ranks := hosts.ranks(h)) > 1), None)
    if full is not None:
        host = _tier(comm, hosts.ranks(hosts.hosts[comm.rank]), (full[0], full[1]), effort)
    else:
        notes.append(f"no two ranks share a host: [host] stays as in {old.name}")
    firsts = [hosts.ranks(h)[0] for h in range(hosts.count)]
    if len(firsts) > 1:
        network = _tier(comm, firsts, (firsts[0], firsts[1]), effort)
        network = dataclasses.replace(network, burst=_burst(comm, firsts, network.bandwidth))
        work = _wire(comm, firsts)
    else:
        notes.append(f"all ranks are on one host: [network] stays as in {old.name}")
    memory = _middle(comm, [memory_speed(effort.seconds)])[0]
    message = old.message
    if comm.size > 1:
        message = _middle(comm, [_message(comm, effort.messages)])[0]
        if len(firsts) > 1:
            latency = max(network.latency, _round(comm, effort.pings) - (comm.size - 1) * message)
            network = dataclasses.replace(network, latency=float(f"{latency:.4g}"))
    else:
        notes.append(f"there is nobody to send to: message stays as in {old.name}")
    speeds: dict[str, Speed] = {}
    console = Console(stderr=True)
    for spec in track(SPECS, "codecs", console=console, disable=comm.rank != 0 or not console.is_terminal):
        codec = get_codec(spec)
        mine = codec_speed(codec, effort.seconds)
        speeds[codec.spec] = Speed(
            *_middle(comm, [mine.encode, mine.decode, mine.add, mine.overhead, mine.size])
        )
    # The codecs that were not measured are not the fast ones.
    speeds[DEFAULT] = Speed(
        encode=min(s.encode for s in speeds.values()),
        decode=min(s.decode for s in speeds.values()),
        add=min(s.add for s in speeds.values()),
        overhead=statistics.median(s.overhead for s in speeds.values()),
        size=_SOME_SIZE,
    )
    return dataclasses.replace(
        old, host=host, network=network, memory=memory, message=message, wire=work, codecs=speeds
    ), notes


def compute(comm: MPI.Comm, effort: Effort) -> tuple[Fitted | None, list[str]]:
    """Measure how fast ranks execute a model's operations, all at once. Collective; all ranks get the same.

    Returns:
        The fit to the median of the ranks' times, and why there is none.
    """
    needed = ("torch", "scipy")
    if not agreed(comm, all(importlib.util.find_spec(name) for name in needed)):
        return None, [
            "PyTorch or SciPy is missing: no [compute] for `hybridcomp plan` (the extra plan has both)"
        ]
    from hybridcomp.planner.measure import measure  # noqa: PLC0415  (imports torch)

    timings = measure(effort.seconds / _OF_OPERATIONS)
    return timings.fitted(_middle(comm, list(timings.seconds))), []


def _message(comm: MPI.Comm, rounds: int) -> float:
    """Measure the seconds of this core for one message: all-reduces that are cut into chunks of next to nothing."""
    before = os.environ.get(CHUNK_VARIABLE)
    os.environ[CHUNK_VARIABLE] = str(_TINY)
    try:
        ours = Communicator(comm, "none", "calibration", timeout=_TIMEOUT)
    finally:
        if before is None:
            del os.environ[CHUNK_VARIABLE]
        else:
            os.environ[CHUNK_VARIABLE] = before
    data = np.ones(_CHUNKS * comm.size * _TINY // 4, np.float32)
    begin = 0.0
    for i in range(rounds + 1):
        if i == 1:
            begin = time.thread_time()
        ours.Allreduce(MPI.IN_PLACE, data, codec="int8", algorithm="direct")
    seconds = time.thread_time() - begin
    ours.Free()
    return seconds / (rounds * _CHUNKS * 2 * (comm.size - 1))


def _round(comm: MPI.Comm, count: int) -> float:
    """Measure the seconds of one exchange among all ranks more: what waking costs is in it, and not in ``_ping``.

    They are the difference between short all-reduces of two exchanges and of one; collective over ``comm``.
    """
    ours = Communicator(comm, "none", "calibration", timeout=_TIMEOUT)
    data = np.ones(64, np.float32)
    taken: dict[str, list[float]] = {"one_shot": [], "direct": []}
    for _ in range(count):
        for algorithm, seconds in taken.items():
            begin = time.perf_counter()
            ours.Allreduce(MPI.IN_PLACE, data, codec="int8", algorithm=algorithm)
            seconds.append(time.perf_counter() - begin)
    ours.Free()
    one, two = (statistics.median(_gathered(comm, [statistics.median(s)])[0]) for s in taken.values())
    return two - one


def _tier(comm: MPI.Comm, ring: list[int], pair: tuple[int, int], effort: Effort) -> Tier:
    """Measure a tier's latency between ``pair`` while the others rest, its bandwidth as all of each ``ring`` send.

    Collective over ``comm``; a rank that is not in its ``ring``, or is alone in it, only waits.
    """
    latency = 0.0
    if comm.rank in pair:
        latency = _ping(comm, pair[1 - pair.index(comm.rank)], comm.rank == pair[0], effort.pings)
    _rest(comm)
    slowest = max(_gathered(comm, _shift(comm, ring, 1)[:1])[0])
    # The first message makes connections, and the first after a rest may use up what a shaped link had saved.
    seconds = _shift(comm, ring, _LEAST if slowest > _SLOW else effort.messages)
    lasts = statistics.median(seconds[1:] or seconds)
    return Tier(*_middle(comm, [latency, _BIG / lasts if lasts else 0.0]))


def _burst(comm: MPI.Comm, ring: list[int], bandwidth: float) -> float:
    """Measure the bytes that links pass at once after a rest; collective over ``comm``.

    They are those of the largest message that takes less than half of its time at the rate; 0 if there is none.
    """
    passed = 0
    for size in _BURSTS:
        taken = []
        for _ in range(_TRIES):
            time.sleep(_SAVING)
            _rest(comm)
            taken.append(max(_gathered(comm, _shift(comm, ring, 1, size=size))[0]))
        if min(taken) < size / bandwidth / 2:
            passed = size
    return float(passed)


def _ping(comm: MPI.Comm, other: int, first: bool, count: int) -> float:
    """Measure the median seconds one way of a message of 8 bytes."""
    data = np.zeros(1)
    taken = []
    for _ in range(count):
        begin = time.perf_counter()
        for sends in (first, not first):
            start = comm.Isend if sends else comm.Irecv
            wait([start(data, other, _TAG)], comm, f"messages to and from rank {other}", idle=False)
        taken.append((time.perf_counter() - begin) / 2)
    return statistics.median(taken)


def _wire(comm: MPI.Comm, ring: list[int]) -> float:
    """Measure the seconds of a core for each byte sent or received between hosts; collective over ``comm``."""
    begin = time.process_time()
    count = len(_shift(comm, ring, _LEAST, idle=True))
    mine = (time.process_time() - begin) / (2 * count * _BIG) if comm.rank in ring else 0.0
    return _middle(comm, [mine])[0]


def _shift(
    comm: MPI.Comm, ring: list[int], count: int, *, idle: bool = False, size: int = _BIG
) -> list[float]:
    """Return the seconds of each of ``count`` messages to the next of a ring, while one comes from before.

    They have ``size`` bytes. Returns one 0 on a rank that is in no ring.
    """
    if comm.rank not in ring or len(ring) == 1:
        return [0.0]
    at = ring.index(comm.rank)
    before, after = ring[at - 1], ring[(at + 1) % len(ring)]
    out, into = np.ones(size, np.uint8), np.empty(size, np.uint8)
    what = f"big messages from rank {before} and to rank {after}"
    taken = []
    for _ in range(count):
        begin = time.perf_counter()
        wait([comm.Irecv(into, before, _TAG), comm.Isend(out, after, _TAG)], comm, what, idle=idle)
        taken.append(time.perf_counter() - begin)
    return taken


def agreed(comm: MPI.Comm, good: bool) -> bool:
    """Tell whether all ranks agree that it is good; collective."""
    return all(_gathered(comm, [float(good)])[0])


def shared(comm: MPI.Comm, code: int) -> int:
    """Return rank 0's exit code on all ranks; collective."""
    value = np.array([code], np.int64)
    wait([comm.Ibcast(value)], comm, "waiting for rank 0")
    return int(value[0])


def _gathered(comm: MPI.Comm, values: list[float]) -> list[list[float]]:
    """Gather each value of every rank; collective."""
    mine = np.array(values)
    everyone = np.empty((comm.size, mine.size))
    wait([comm.Iallgather(mine, everyone)], comm, "comparing measurements")
    columns: list[list[float]] = everyone.T.tolist()
    return columns


def _middle(comm: MPI.Comm, values: list[float]) -> list[float]:
    """Return the median of each value over the ranks that have one, which is not 0; collective."""
    middles = (statistics.median([v for v in column if v]) for column in _gathered(comm, values))
    return [float(f"{value:.4g}") for value in middles]  # as many digits as mean anything


def _rest(comm: MPI.Comm) -> None:
    """Wait for all ranks, asleep."""
    wait([comm.Ibarrier()], comm, "waiting for the other ranks")

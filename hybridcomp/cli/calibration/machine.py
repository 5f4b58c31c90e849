"""Measure links, memory and codecs for a profile, on every rank: ``hybridcomp doctor --calibrate``."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import platform
import statistics
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from mpi4py import MPI
from rich.progress import track

from hybridcomp import style
from hybridcomp.cli.calibration.ranks import TIMEOUT, agreed, gathered, middle, rest, wait
from hybridcomp.cli.calibration.timing import communicator
from hybridcomp.codecs import get_codec
from hybridcomp.collectives import Communicator
from hybridcomp.collectives.engine.groups import connect_engine, own_arena
from hybridcomp.collectives.transport.topology import discover
from hybridcomp.perfmodel.calibrate import SPECS, codec_speed, memory_speed
from hybridcomp.perfmodel.profile import DEFAULT, Profile, Speed, Tier
from hybridcomp.schedules.topology import Topology

_TAG = 1
_BIG = 8 << 20  # bytes: far more than the burst that a shaped link lets through at once
_BURSTS = tuple(1 << power for power in range(16, 22))  # bytes of messages, tried in turn to find the burst
_SAVING = 0.05  # seconds of rest in which a shaped link saves up its burst
_TRIES = 4  # rounds of each measurement
_SLOW = 1.0  # seconds of a big message, past which few are enough
_LEAST = 2
_MORE = 1.25  # times what one host sends: a host's incoming rate above this is a rate of its own
_MOST_CORES = 1024  # most cores of a machine that are told apart
_TINY = 1024  # bytes of a chunk whose only cost is that it is a message
_CHUNKS = 32
_OF_OPERATIONS = 8  # each of a model's hundred operations gets a codec's seconds over this
_SOME_SIZE = 0.5  # message bytes over encoded bytes, for a codec that was not measured


@dataclass(frozen=True)
class Effort:
    """Amount of work to spend on measuring.

    Attributes:
        pings: small messages there and back.
        messages: big messages; the first does not count.
        seconds: computing time for each codec.
        cell: seconds of repetitions of a collective of one size.
        longest: seconds of a collective beyond which larger sizes are left out.
        largest: bytes of the largest collective.
        finely: measure MPI's own collectives at every power of two, not every second one; and more collectives of ours.
        fit: seconds of fitting, at most.
    """

    pings: int
    messages: int
    seconds: float
    cell: float
    longest: float
    largest: int
    finely: bool
    fit: float


THOROUGH = Effort(
    pings=400,
    messages=9,
    seconds=0.4,
    cell=0.12,
    longest=0.6,
    largest=16 << 20,
    finely=True,
    fit=20.0,
)
QUICK = Effort(
    pings=50,
    messages=3,
    seconds=0.02,
    cell=0.005,
    longest=0.1,
    largest=1 << 20,
    finely=False,
    fit=2.0,
)


def hosts_of(comm: MPI.Comm) -> tuple[Topology, bool]:
    """Return which ranks share a host, and whether those of each host read messages in place; collective."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        topology = discover(comm, node)
        shares_memory = connect_engine(comm, node) is not None and own_arena() is not None
    finally:
        node.Free()
    return topology, agreed(comm, shares_memory)


def calibrate(comm: MPI.Comm, hosts: Topology, old: Profile, effort: Effort) -> tuple[Profile, list[str]]:
    """Measure all parts of a profile that the ranks of ``comm`` allow. Collective; all ranks get the same.

    Args:
        comm: communicator that nobody else uses.
        hosts: hosts of its ranks.
        old: profile whose values stay for tiers that these ranks do not have.
        effort: amount of work.

    Returns:
        The profile, and notes on what was not measured and why.

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
        burst = _burst(comm, firsts, network.bandwidth)
        network = dataclasses.replace(
            network, burst=burst, incoming=_incoming(comm, firsts, network.bandwidth)
        )
        work = _wire(comm, firsts)
    else:
        notes.append(f"all ranks are on one host: [network] stays as in {old.name}")
    memory = middle(comm, [memory_speed(effort.seconds)])[0]
    message = old.message
    if comm.size > 1:
        message = middle(comm, [_message(comm, effort.messages)])[0]
        if len(firsts) > 1:
            latency = max(network.latency, _round(comm, effort.pings) - (comm.size - 1) * message)
            network = dataclasses.replace(network, latency=float(f"{latency:.4g}"))
    else:
        notes.append(f"there is nobody to send to: message stays as in {old.name}")
    speeds: dict[str, Speed] = {}
    console = style.console(sys.stderr)
    for spec in track(SPECS, "codecs", console=console, disable=comm.rank != 0 or not console.is_terminal):
        codec = get_codec(spec)
        mine = codec_speed(codec, effort.seconds)
        speeds[codec.spec] = Speed(
            *middle(comm, [mine.encode, mine.decode, mine.add, mine.overhead, mine.size])
        )
    # Codecs that were not measured get the slowest speeds.
    speeds[DEFAULT] = Speed(
        encode=min(s.encode for s in speeds.values()),
        decode=min(s.decode for s in speeds.values()),
        add=min(s.add for s in speeds.values()),
        overhead=statistics.median(s.overhead for s in speeds.values()),
        size=_SOME_SIZE,
    )
    return dataclasses.replace(
        old,
        host=host,
        network=network,
        memory=memory,
        message=message,
        wire=work,
        cores=_cores(comm),
        codecs=speeds,
    ), notes


def compute(comm: MPI.Comm, effort: Effort) -> tuple[str, list[str]]:
    """Measure how fast ranks execute a model's operations, all at once. Collective; all ranks get the same.

    Returns:
        The profile's section ``[compute]``, fitted to the median of the ranks' times; "" and the reasons where there is
        none.
    """
    needed = ("torch", "scipy")
    if not agreed(comm, all(importlib.util.find_spec(name) for name in needed)):
        return "", [
            "PyTorch or SciPy is missing: no [compute] for `hybridcomp plan` (the extra plan has both)"
        ]
    # By its name: it measures the layers of the trainer, on which the toolkit does not stand.
    planner = importlib.import_module("hybridcomp_lab.planner.measure")
    timings = planner.measure(effort.seconds / _OF_OPERATIONS)
    return timings.fitted(middle(comm, list(timings.seconds))).to_toml(), []


def _message(comm: MPI.Comm, rounds: int) -> float:
    """Measure the seconds of this core for one message: all-reduces that are cut into chunks of next to nothing."""
    ours = communicator(comm, _TINY)
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
    """Measure the seconds of one more exchange among all ranks, with the cost of waking, which ``_ping`` leaves out.

    They are the difference between short all-reduces of two exchanges and of one; collective over ``comm``.
    """
    ours = Communicator(comm, "none", "calibration", timeout=TIMEOUT)
    data = np.ones(64, np.float32)
    taken: dict[str, list[float]] = {"one_shot": [], "direct": []}
    for _ in range(count):
        for algorithm, seconds in taken.items():
            begin = time.perf_counter()
            ours.Allreduce(MPI.IN_PLACE, data, codec="int8", algorithm=algorithm)
            seconds.append(time.perf_counter() - begin)
    ours.Free()
    one, two = (statistics.median(gathered(comm, [statistics.median(s)])[0]) for s in taken.values())
    return two - one


def _tier(comm: MPI.Comm, ring: list[int], pair: tuple[int, int], effort: Effort) -> Tier:
    """Measure a tier's latency between ``pair`` while the others rest, its bandwidth as all of each ``ring`` send.

    Collective over ``comm``; a rank that is not in its ``ring``, or is alone in it, only waits.
    """
    latency = 0.0
    if comm.rank in pair:
        latency = _ping(comm, pair[1 - pair.index(comm.rank)], comm.rank == pair[0], effort.pings)
    rest(comm)
    slowest = max(gathered(comm, _shift(comm, ring, 1)[:1])[0])
    # The first message makes connections, and the first after a rest may use up what a shaped link had saved.
    seconds = _shift(comm, ring, _LEAST if slowest > _SLOW else effort.messages)
    lasts = statistics.median(seconds[1:] or seconds)
    return Tier(*middle(comm, [latency, _BIG / lasts if lasts else 0.0]))


def _burst(comm: MPI.Comm, ring: list[int], bandwidth: float) -> float:
    """Measure the bytes that links pass at once after a rest; collective over ``comm``.

    They are those of the largest message that takes less than half of its time at ``bandwidth``; 0 if there is none.
    """
    passed = 0
    for size in _BURSTS:
        taken = []
        for _ in range(_TRIES):
            time.sleep(_SAVING)
            rest(comm)
            taken.append(max(gathered(comm, _shift(comm, ring, 1, size=size))[0]))
        if min(taken) < size / bandwidth / 2:
            passed = size
    return float(passed)


def _incoming(comm: MPI.Comm, ring: list[int], bandwidth: float) -> float:
    """Measure the bytes/s that enter a host to which all others send at once; collective over ``comm``.

    Returns 0 if that is about the rate at which one of them sends.
    """
    taken = 0.0
    target, *others = ring
    for _ in range(2):  # the first round makes connections
        rest(comm)
        begin = time.perf_counter()
        if comm.rank == target:
            into = [np.empty(_BIG, np.uint8) for _ in others]
            messages = [comm.Irecv(each, rank, _TAG) for each, rank in zip(into, others, strict=True)]
            wait(messages, comm, "big messages from all hosts", idle=False)
            taken = time.perf_counter() - begin
        elif comm.rank in others:
            wait([comm.Isend(np.ones(_BIG, np.uint8), target, _TAG)], comm, f"a big message to rank {target}")
    rate = len(others) * _BIG / max(gathered(comm, [taken])[0])
    return float(f"{rate:.4g}") if rate > _MORE * bandwidth else 0.0


def _cores(comm: MPI.Comm) -> float:
    """Return the cores of each rank, at most 1, on the machine with the fewest for each; collective.

    Hosts are of one machine, as those of a lab are, if the kernel was booted once for them.
    """
    try:
        machine = float(zlib.crc32(Path("/proc/sys/kernel/random/boot_id").read_bytes()))
    except OSError:  # not Linux
        machine = float(zlib.crc32(platform.node().encode()))
    able = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    numbers = [float(number in able) for number in range(_MOST_CORES)]
    machines, *columns = gathered(comm, [machine, *numbers])
    least = 1.0
    for one in set(machines):
        ranks = [rank for rank, other in enumerate(machines) if other == one]
        cores = sum(any(column[rank] for rank in ranks) for column in columns)
        least = min(least, cores / len(ranks))
    return float(f"{least:.4g}")


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
    return middle(comm, [mine])[0]


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
